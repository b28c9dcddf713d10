"""Comparison of two runs: statistics, plots and the report."""
