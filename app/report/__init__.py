"""The comparison of two runs: statistics, plots, pages."""
