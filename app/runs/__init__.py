"""The format of a run folder: names, schemas, and the code that reads it. `record` writes it."""
