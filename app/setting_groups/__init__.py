"""The settings of a training run, in the groups in which `--help` lists them, with their defaults and valid values.

Names follow `transformers.TrainingArguments`, with one deliberate exception: `train_batch_size` is the *global* batch
size, which is divided among ranks and accumulation steps, so that one process and eight train on the same batches.
"""

from __future__ import annotations

from .built_in import BUILT_IN, TINY, TINY_BERT, recipe_of
from .data import DataSettings
from .running import MAX_THREADS, CheckpointSettings, EvaluationSettings, OutputSettings, ProcessSettings
from .training import ModelSettings, TrainingSettings

GROUPS = (
    *(DataSettings, ModelSettings, TrainingSettings, EvaluationSettings),
    *(CheckpointSettings, ProcessSettings, OutputSettings),
)

__all__ = [
    "BUILT_IN",
    "GROUPS",
    "MAX_THREADS",
    "TINY",
    "TINY_BERT",
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "ModelSettings",
    "OutputSettings",
    "ProcessSettings",
    "TrainingSettings",
    "recipe_of",
]
