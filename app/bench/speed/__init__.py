"""Compare the speed of the two training paths with other ways to train the same model."""
