"""Adapters that only the Trainer path needs."""
