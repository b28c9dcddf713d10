"""Experiments that measure correctness."""
