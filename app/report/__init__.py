"""What a comparison says: statistics, figures, pages."""
