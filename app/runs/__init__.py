"""The run folder: its format, its writer and its reader."""
