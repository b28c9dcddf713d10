"""From a CSV of reviews to batches."""
