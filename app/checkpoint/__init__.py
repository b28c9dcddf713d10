"""Checkpoints: write, find and load them, and resume from them."""
