"""The types of settings: their ranges, and the checks of texts that have a syntax of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow", "swanlab")
MAX_THREADS = 1024  # OpenMP aborts the process if the system cannot provide the requested threads
MAX_PROFILED = 1000  # steps: the trace of one has some ten thousand events
LARGEST_COUNT = 2**31 - 1  # every library used here accepts counts and seeds up to this value


def check_name(text: str) -> str:
    if not text:
        raise ValueError("must not be empty (an unset shell variable is)")
    if text != text.encode("utf-8", "ignore").decode():
        raise ValueError("must be valid UTF-8, which safetensors and JSON require")
    return text


def check_class_weights(text: str) -> str:
    # fp32 holds these, and their sums over a batch.
    if text != "balanced" and not all(1e-30 < weight < 1e30 for weight in map(float, text.split(","))):
        raise ValueError("must be `balanced`, or one number above 0 per class, such as 1,2.5")
    return text


def check_label_names(text: str) -> str:
    names = split_label_names(text)
    if not names or "" in {*names, *names.values()} or len(names) <= text.count(","):
        raise ValueError("must name each label once, such as 0=bad,1=good")
    return text


def check_trackers(text: str) -> str:
    if not {name.strip() for name in text.split(",")} <= {"none", *TRACKERS}:
        raise ValueError(f"must be one or more of none, {', '.join(TRACKERS)}")
    return text


def split_label_names(text: str) -> dict[str, str]:
    """Return the names in a text such as `0=negative,1=positive`, by label."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    return {label.strip(): name.strip() for label, _, name in pairs}


Name = Annotated[str, AfterValidator(check_name)]
ClassWeights = Annotated[str, AfterValidator(check_class_weights)]
LabelNames = Annotated[str, AfterValidator(check_label_names)]
Trackers = Annotated[str, AfterValidator(check_trackers)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Length = Annotated[int, Field(ge=3, le=LARGEST_COUNT)]  # a text has at least one token and the two special ones
Seed = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Steps = Annotated[int, Field(ge=-1, le=LARGEST_COUNT)]
Epochs = Annotated[float, Field(gt=0, le=LARGEST_COUNT)]
Warmup = Annotated[float, Field(ge=0, le=LARGEST_COUNT)]
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
Profiled = Annotated[int, Field(ge=0, le=MAX_PROFILED)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
When = Literal["epoch", "steps", "no"]
DType = Literal["fp32", "bf16"]
