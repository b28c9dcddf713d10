"""Fixtures that open run records without training, and the folder of a run that was killed."""

from checkpoint.killed_run import folder  # noqa: F401
from record.record_fixtures import new_record  # noqa: F401
