"""Data: from a CSV of reviews to batches of token ids."""
