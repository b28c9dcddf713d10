"""The sections of the communication laboratory, `app.bench.communication`."""
