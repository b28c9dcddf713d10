"""Print `--help`, and report a user's mistakes, before a program imports torch, which takes seconds.

`python -m app.ddp_loop` imports the package `app`, whose `__init__.py` calls `check_command_line`, and then runs the
program, which can keep its imports at the top. It parses the same command line again when it starts.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .bench.scaling_flags import add_scaling_flags
from .cli import FLAGS_OF_ONE_RUN, OneLineParser, parse_flags, program_name
from .common.errors import UserError, escape_unencodable_output
from .common.files import check_exists
from .common.paths import PACKAGE
from .distributed.environment import (
    check_environment,
    rank_and_sizes,
    split_off_local_rank,
)
from .flags import (
    BENCHMARKS,
    COLLECTIVE_SECTIONS,
    REJECTED_BY_PREDICT,
    add_check_flags,
    add_communication_flags,
    add_compare_flags,
    add_growth_flags,
    add_memory_flags,
    add_minimal_flags,
    add_plan_flags,
    add_predict_flags,
    add_speed_flags,
    measure_tiny_bert,
)
from .program import print_mistake
from .settings import Settings

PATHS: dict[str, Mapping[str, str]] = {"ddp_loop": {}, "trainer_run": {}}
# The programs whose command line is checked. These have training settings, and reject some of them; those in
# WITHOUT_SETTINGS have only flags of their own. All other programs import torch late.
REJECTED = (
    PATHS
    | BENCHMARKS
    | {"predict": REJECTED_BY_PREDICT}
    | dict.fromkeys(("check", "compare", "plan"), FLAGS_OF_ONE_RUN)
)
WITHOUT_SETTINGS: dict[str, Callable[[OneLineParser], None]] = {
    "bench.growth": add_growth_flags,
    "bench.scaling": add_scaling_flags,
    "minimal": add_minimal_flags,
}
WITHOUT_RANKS = ("compare", "plan", "bench.growth", "bench.scaling", "bench.speed")
OWN_FLAGS: dict[str, Callable[[OneLineParser], None]] = {
    "bench.speed": add_speed_flags,
    "check": add_check_flags,
    "predict": add_predict_flags,
    "bench.memory": add_memory_flags,
    "bench.communication": add_communication_flags,
    "bench.traffic": measure_tiny_bert,
    "compare": add_compare_flags,
    "plan": add_plan_flags,
}


def check_command_line() -> None:
    """Exit if `--help` is given, or if there is a mistake that all ranks make. Only for these programs."""
    name = program_name().removeprefix(f"{PACKAGE}.")
    if name not in REJECTED | WITHOUT_SETTINGS:
        return
    escape_unencodable_output()
    wants_help = bool({"-h", "--help"} & set(sys.argv[1:]))
    rank, size, local_size = 0, 1, 1
    try:
        if name not in WITHOUT_RANKS:
            check_environment()
            rank, size, _, local_size = rank_and_sizes()
        if wants_help and rank != 0:
            sys.exit(0)  # rank 0 prints the help
        # The ranks of one node read the same files, but another node's may differ. All ranks then have to learn of a
        # mistake, so `launch` connects them first.
        if wants_help or size == local_size:
            check_flags(name, description=docstring(name) if wants_help else None)
    except UserError as problem:
        sys.exit(print_mistake(problem, rank))


def check_flags(name: str, description: str | None) -> None:
    """Parse the command line of a program.

    Raises:
        UserError: there is a mistake.
    """
    arguments = sys.argv[1:]
    if name not in WITHOUT_RANKS:
        arguments, _ = split_off_local_rank(arguments)
    settings, own_flags = parse(name, arguments, description)
    if name not in ("bench.scaling", "check"):  # which read no reviews
        check_csv(settings, own_flags)


def parse(name: str, arguments: Sequence[str], description: str | None = None) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of a program, which has few or none if it is in `WITHOUT_SETTINGS`, and its own flags."""
    if name in REJECTED:
        return parse_flags(description, arguments, OWN_FLAGS.get(name), rejected=REJECTED[name])
    parser = OneLineParser(description=description)
    WITHOUT_SETTINGS[name](parser)
    own_flags = vars(parser.parse_args(arguments))
    return Settings(csv=own_flags.get("csv")), own_flags


def check_csv(settings: Settings, own_flags: Mapping[str, Any]) -> None:
    """Check that the reviews exist, unless the program does not read them.

    Raises:
        UserError: there is no such file.
    """
    if own_flags.get("runs") or set(own_flags.get("sections") or ["all"]) <= set(COLLECTIVE_SECTIONS):
        return
    # Resuming a finished run must report that it is finished, even if its reviews no longer exist.
    if settings.resume_from_checkpoint is None:
        for path in (settings.csv_path, settings.validation_file, settings.test_file):
            if path is not None and settings.dataset_name is None:
                check_exists(Path(path))


def docstring(name: str) -> str | None:
    """Return the docstring of a program, such as `bench.memory`, without importing it."""
    path = Path(__file__).parent.joinpath(*name.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False)
