"""Predict the time of collectives and of training steps, for `app.bench.communication` and `app.bench.scaling`."""
