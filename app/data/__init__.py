"""Reviews: CSV, split, tokens, batches and loaders."""
