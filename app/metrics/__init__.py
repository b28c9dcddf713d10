"""Classification metrics: `evaluate` modules, loaded by path, and `score`, which asks them all."""
