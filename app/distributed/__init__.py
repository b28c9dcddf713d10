"""What several processes do together."""
