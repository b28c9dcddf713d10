"""Experiments: they measure correctness."""
