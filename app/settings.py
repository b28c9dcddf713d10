"""All settings of a training run, as one dataclass that validates itself.

The command line, `--config` files and `settings.json` are all derived from it. Its fields, with their defaults and
valid values, are in `app.setting_groups`; the rules between fields are here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from .common.errors import UserError, shorten
from .common.paths import DOWNLOADED_CSV, SAMPLE_CSV
from .setting_groups import (
    EVERYDAY,
    FEW_ROWS,
    TINY,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OutputSettings,
    ProcessSettings,
    TrainingSettings,
)

WRAPPED_IN_DDP = ("ddp", "zero1")  # the strategies that use DDP, and so have --ddp_comm_hook
SHARDED = ("zero2", "zero3")  # those that use FSDP2, and so have --param_dtype and --reduce_dtype
STRATEGIES = (*WRAPPED_IN_DDP, *SHARDED)  # the values of --strategy


@dataclass
class Settings(
    OutputSettings,
    ProcessSettings,
    CheckpointSettings,
    EvaluationSettings,
    TrainingSettings,
    ModelSettings,
    DataSettings,
):  # dataclasses collect fields from the last base class to the first, so settings.json starts with the data
    """The validated settings of a run. Values may be given as texts, which are converted.

    Raises:
        UserError: One or more values are invalid. The message names every such flag and the values that are allowed.
    """

    def __post_init__(self) -> None:
        if self.max_length is None:
            self.max_length = 256 if self.model == TINY else 128
        try:
            vars(self).update(vars(VALUES.model_validate(vars(self))))
        except ValidationError as problem:
            raise UserError("; ".join(f"--{one['loc'][0]} {describe(one)}" for one in problem.errors())) from None
        if problems := [*self._contradictions()]:
            raise UserError("; ".join(problems))

    def _contradictions(self) -> Iterator[str]:
        """Yield the rules between settings that are broken."""
        hook = self.ddp_comm_hook
        if self.max_steps == 0:
            yield "--max_steps 0: must be 1 or more, or -1 (not set)"
        if self.max_length % self.pad_to_multiple_of:
            yield f"--pad_to_multiple_of {self.pad_to_multiple_of}: must divide --max_length {self.max_length}"
        if self.label_column == self.text_column:
            yield f"--label_column {self.label_column}: must be another column than --text_column"
        if self.tf32 and self.use_cpu:
            yield "--tf32 needs GPUs: remove it, or --use_cpu"
        if self.cpu_offload and self.strategy != "zero3":
            yield f"--cpu_offload needs --strategy zero3, not {self.strategy}"
        if hook != "no" and self.strategy not in WRAPPED_IN_DDP:
            yield f"--ddp_comm_hook {hook} needs --strategy ddp or zero1, not {self.strategy}"
        for name in ("param_dtype", "reduce_dtype"):
            if (dtype := getattr(self, name)) != "fp32" and self.strategy not in SHARDED:
                yield f"--{name} {dtype} needs --strategy zero2 or zero3, not {self.strategy}"
        if self.param_dtype == "bf16" and self.precision not in ("bf16", "auto"):
            yield f"--param_dtype bf16 needs --precision bf16, not {self.precision}"
        if hook == "power_sgd" and (self.precision == "fp16" or self.ddp_find_unused_parameters):
            # An overflow in fp16 would stay in its compression errors.
            other = "--ddp_find_unused_parameters" if self.ddp_find_unused_parameters else "--precision fp16"
            yield f"--ddp_comm_hook power_sgd needs a finite gradient of every parameter in every step: remove {other}"
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(self, name) and (not self.may_validate or self.eval_strategy == "no"):
                yield (
                    f"--{name} needs validation rows to choose on, because test rows must not be used: add "
                    "--validation_size 0.1 and an --eval_strategy"
                )
        files = [name for name in ("csv", "validation_file", "test_file") if getattr(self, name) is not None]
        if self.dataset_name is not None and files:
            yield f"--dataset_name and --{files[0]} exclude each other: give only one of them"
        elif files and self.csv is None:
            yield f"--{files[0]} needs --csv, the file of the training rows"
        if self.validation_file is not None and self.validation_size > 0:
            yield "--validation_file and --validation_size exclude each other: the file has the validation rows"
        if self.test_file is not None and self.test_size != type(self).test_size:
            yield "--test_file and --test_size exclude each other: the file has the test rows"
        if self.early_stopping_threshold > 0 and self.early_stopping_patience is None:
            yield "--early_stopping_threshold needs --early_stopping_patience"

    @property
    def trackers(self) -> list[str]:
        """The names in `--report_to`, each once."""
        names = dict.fromkeys(name.strip() for name in self.report_to.split(","))
        return [name for name in names if name != "none"]

    @property
    def may_validate(self) -> bool:
        """Whether there are validation rows. Only reading a `--dataset_name` tells whether it has some."""
        return self.validation_size > 0 or self.validation_file is not None or self.dataset_name is not None

    @property
    def csv_path(self) -> Path:
        """The CSV file to read: `--csv` if given, otherwise the real reviews if downloaded, otherwise the sample."""
        if self.csv is not None:
            return Path(self.csv)
        return DOWNLOADED_CSV if DOWNLOADED_CSV.exists() else SAMPLE_CSV

    def epochs(self, n_train: int) -> float:
        """Return `--num_train_epochs` or, if it is not set, the default of the model for a number of training rows."""
        of_tiny = 12.0 if n_train < FEW_ROWS else 6.0
        return self.num_train_epochs or (of_tiny if self.model == TINY else 3.0)

    def divides_among(self, ranks: int) -> bool:
        """Tell whether a batch can be divided among a number of ranks. The job checks all other conditions."""
        if self.logical_ranks is not None:
            return self.logical_ranks % ranks == 0
        if self.per_device_train_batch_size is not None:
            return True
        return self.train_batch_size % (ranks * self.gradient_accumulation_steps) == 0

    def as_dict(self) -> dict[str, Any]:
        """Return all settings in the order of `settings.json`."""
        return dataclasses.asdict(self)


GROUPS = Settings.__bases__[::-1]  # in the order of `--help`, which prints their docstrings as titles
TYPES = get_type_hints(Settings, include_extras=True)  # of each setting: `Annotated`, with its help
EVERYDAY_SETTINGS = {name for name, kind in TYPES.items() if EVERYDAY in get_args(kind)}
VALUES = create_model("VALUES", **TYPES)

# For programs that train single steps: how a step updates the weights, and what its time and memory depend on.
OF_AN_UPDATE = {"learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"}
OF_AN_UPDATE |= {"adam_beta1", "adam_beta2", "adam_epsilon"}
OF_A_RUN = {"on_duplicates_between_parts", "num_train_epochs", "max_steps", "class_weights", "label_smoothing_factor"}
OF_A_RUN |= {*EvaluationSettings.__annotations__, *CheckpointSettings.__annotations__, *OutputSettings.__annotations__}
OF_A_STEP = TYPES.keys() - OF_AN_UPDATE - OF_A_RUN


def help_of(name: str) -> str:
    """Return the help of a setting."""
    return next(fact for fact in get_args(TYPES[name])[1:] if isinstance(fact, str))


def describe(error: ErrorDetails) -> str:
    """Describe an invalid value in one line."""
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return f"{shorten(str(error['input'])) or repr('')}: {message}"
