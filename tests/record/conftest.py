"""Fixtures that open run records without training."""

from helpers.record_fixtures import new_record  # noqa: F401
