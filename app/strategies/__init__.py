"""Parallel training strategies."""
