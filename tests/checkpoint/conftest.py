"""Fixtures that open run records without training, and the folder of a run that was killed."""

from helpers.killed_run import folder  # noqa: F401
from helpers.record_fixtures import new_record  # noqa: F401
