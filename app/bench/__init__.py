"""Benchmarks that measure speed."""
