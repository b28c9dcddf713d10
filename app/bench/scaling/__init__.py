"""The scaling laboratory, `python -m app.bench.scaling`: predict the time of training steps, and measure it."""
