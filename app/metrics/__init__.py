"""Classification metrics: an `evaluate` module, and `score`, which computes all scores of an evaluation."""
