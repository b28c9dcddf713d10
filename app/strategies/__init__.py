"""Training strategies: how a model is distributed over the ranks."""
