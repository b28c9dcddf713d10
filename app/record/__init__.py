"""The writer of a run folder. Its format is in `runs`."""
