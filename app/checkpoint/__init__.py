"""Checkpoints: what they hold, and how they are written so that an interruption loses nothing."""
