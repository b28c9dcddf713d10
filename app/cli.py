"""The command line: flags and `--config` to `Settings`, and an entry point's exit status."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml
from transformers import HfArgumentParser

from app.distributed.environment import check_accelerate_environment, check_environment, rank_and_sizes
from app.distributed.failure import ShortErrorHandler, exit_now, report_failure_to_connect
from app.distributed.process_group import join
from app.errors import UserError, escape_unencodable_output, shorten
from app.settings import GROUPS, Settings


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The module's docstring as it stands, then each flag in a line of its own with its default where it has one."""

    VALUES: ClassVar[dict[Any, str]] = {int: "N", float: "X"}

    def __init__(self, prog: str) -> None:
        # get_terminal_size reads COLUMNS, and takes no notice of it where it is no number or 0.
        super().__init__(prog, max_help_position=36, width=min(120, shutil.get_terminal_size((100, 24)).columns))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """`--flag VALUE`: the spelling with hyphens works too and needn't be told of each flag."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.nargs in (0, "?"):  # a switch
            return action.option_strings[0]
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
        value = choices or action.metavar or self.VALUES.get(action.type, "TEXT")
        return f"{action.option_strings[0]} {value}"


class SettingsParser(HfArgumentParser):
    """`HfArgumentParser` whose complaints are one-line `UserError`s instead of a usage text and an exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shorten(message, 300)} (--help lists every flag)")

    def values(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What was asked for: defaults, then `--config`, then the command line."""
        config = self.parse(arguments)["config"]
        if config is not None:
            self.set_defaults(**self.parse_yaml(Path(config)))
        values = self.parse(arguments)
        del values["config"]
        return values

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        namespace, unknown = self.parse_known_intermixed_args(list(arguments))
        if unknown:
            self.error(f"unknown argument {unknown[0]}{self.suggestion(unknown[0])}")
        return vars(namespace)

    def suggestion(self, flag: str) -> str:
        if not flag.startswith("--"):
            return ""
        flags = [option for option in self._option_string_actions if "-" not in option[2:]]
        close = difflib.get_close_matches("--" + flag.partition("=")[0].lstrip("-").replace("-", "_"), flags, n=1)
        return f": did you mean {close[0]}?" if close else ""

    def parse_yaml(self, path: Path) -> dict[str, Any]:
        """The settings that a YAML mapping `flag: value` names, checked like those of the command line."""
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader) or {}  # words stay words: no is "no"
        except OSError as problem:
            raise UserError(f"--config {path}: {problem.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as problem:
            raise UserError(f"--config {path}: not YAML: {' '.join(str(problem).split())}") from None
        if not isinstance(content, dict):
            raise UserError(f"--config {path}: must be a mapping of settings, one `name: value` a line")
        arguments: list[str] = []
        for name, value in content.items():
            if isinstance(value, dict | list):
                raise UserError(f"--config {path}: {name} must be a single value")
            if value not in ("", "null", "~"):
                arguments += [f"--{name}={value}"]
        try:
            parsed = self.parse(arguments)
        except UserError as problem:
            raise UserError(f"--config {path}: {problem}") from None
        return {name: parsed[name] for name in (str(key).replace("-", "_") for key in content) if name in parsed}


def settings_parser(description: str | None) -> SettingsParser:
    """A parser of every training flag and of `--config`."""
    program = Path(sys.argv[0]).stem
    parser = SettingsParser(
        GROUPS,  # type: ignore[arg-type]
        prog=f"python -m app.{program}",
        usage="%(prog)s [--flag VALUE …]",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a file; flags on the command line win")
    return parser


def parse_settings(description: str | None = None, arguments: Sequence[str] | None = None) -> Settings:
    """The settings of this process.

    Raises:
        UserError: an unknown flag, a value of the wrong type or out of range, an unreadable config file.
    """
    return Settings(**settings_parser(description).values(sys.argv[1:] if arguments is None else arguments))


def as_flags(settings: Settings) -> list[str]:
    """The command line that gives these settings: what differs from the defaults."""
    defaults = Settings().as_dict()
    changed = {name: value for name, value in settings.as_dict().items() if value != defaults[name]}
    return [f"--{name}={value}" for name, value in changed.items()]


def launch(main: Callable[[Settings], None], description: str | None) -> NoReturn:
    """Run the entry point of a rank and exit. If it does not finish, one rank prints one line.

    Exit statuses: 0 finished, also if a restarted job finds its run finished; 2 the user's mistake; 75 stopped on
    request, a checkpoint was saved; 1 the run failed; 130 Ctrl-C before or after training.

    Args:
        main: runs with this rank's settings and joins the process group itself.
        description: the entry point's docstring, for `--help`.
    """
    escape_unencodable_output()
    try:
        check_environment()  # before anything reads the rank
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    rank = rank_and_sizes()[0]
    if rank != 0 and {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(0)  # rank 0 prints it
    try:
        try:
            settings = parse_settings(description)
            check_accelerate_environment(settings)
        except UserError as problem:
            with join(Settings(use_cpu=True), str(problem)):
                raise AssertionError("a problem that one rank passes to join is raised on all ranks") from problem
        main(settings)
    except KeyboardInterrupt:
        if rank == 0:
            print("interrupted", file=sys.stderr)
        exit_now(130)
    except Exception as failure:  # before the process group
        ShortErrorHandler().record_exception(failure)
        report_failure_to_connect(failure, rank)
    sys.exit(0)
