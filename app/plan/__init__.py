"""Predict the memory and the traffic of a training step: `python -m app.plan`, `--dry_run`."""
