"""Benchmarks: they measure speed."""
