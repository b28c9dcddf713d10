"""The command line: parse flags and `--config` into `Settings`."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from .common.errors import UserError, shorten
from .common.paths import PACKAGE, with_package_name
from .setting_groups import Above0, Count
from .settings import EVERYDAY_SETTINGS, GROUPS, TYPES, Settings, describe, help_of

BATCH_SIZES = ("train_batch_size", "per_device_train_batch_size")  # alternatives


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Print a docstring as it is, and defaults that are not mentioned in the help of a flag."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, help_text = action.default, action.help or ""
        if default in (None, False, argparse.SUPPRESS) or "default: " in help_text:
            return help_text
        return f"{help_text} (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"


class OneLineParser(argparse.ArgumentParser):
    """The parser of every program. A mistake is a one-line `UserError` instead of the usage and an exit."""

    def __init__(self, **options: Any) -> None:
        options["description"] = with_package_name(options.get("description") or "")
        look: dict[str, Any] = {"prog": f"python -m {program_name()}", "usage": "%(prog)s [--flag VALUE …]"}
        look |= {"formatter_class": HelpFormatter, "allow_abbrev": False}
        super().__init__(**look | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None, **options: Any) -> Any:
        """Parse flags, which may also be written with hyphens: `--some-name`."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)  # what follows is no flag
        flags = [*map(underscored, given[:end])]
        for place, flag in enumerate(flags):
            is_switch = getattr(self._option_string_actions.get(flag), "nargs", None) == "?"
            if is_switch and "".join(flags[place + 1 : place + 2]).lower() not in ("true", "false"):
                flags[place] += "=true"  # otherwise it would take the text after it as its value
        return super().parse_known_args([*flags, *given[end:]], namespace, **options)

    def error(self, message: str) -> NoReturn:
        message = shorten(message.replace("unrecognized arguments:", "unknown argument"), 300)
        raise UserError(f"{message} (see --help)")


def underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def count(text: str, kind: Any = Count) -> Any:
    """Parse a positive whole number, as the `type` of a flag."""
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as problem:
        raise argparse.ArgumentTypeError(describe(problem.errors()[0])) from None


positive = partial(count, kind=Above0)  # a positive number


@dataclass(frozen=True)
class CommandLine:
    """The flags of a program: the settings that it has, `--config`, and flags of its own."""

    description: str | None = None  # the docstring of the entry point, which `--help` prints first
    # Adds the program's own flags to a parser, and sets its own defaults of settings.
    add_arguments: Callable[[OneLineParser], None] = lambda parser: None
    only: Collection[str] = tuple(TYPES)  # the settings that the program has

    def parse(self, arguments: Sequence[str]) -> tuple[Settings, dict[str, Any]]:
        """Return the settings, and the values of the program's own flags.

        Raises:
            UserError: An unknown flag, a value of the wrong type or out of range, or an unreadable config file.
        """
        given = self.parse_given(arguments)
        settings = {name: given.pop(name) for name in given.keys() & {*self.only}}
        return Settings(**settings), given

    def parse_given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the settings that are given, most of them as texts, and the values of all flags of the program itself.

        The command line overrides `--config`, which overrides the program's own defaults.

        Raises:
            UserError: An unknown flag, or an unreadable config file.
        """
        parser = OneLineParser(description=self.description)
        self.add_arguments(parser)
        defaults, shown = dict(parser._defaults), {*self.only}
        of_config = "YAML file of settings, which flags override; those that this program does not have are left out"
        if shown:
            parser.add_argument("--config", metavar="FILE.yaml", help=of_config)
        if len(shown) > len(EVERYDAY_SETTINGS):  # too many to list
            parser.add_argument("--help_all", action="help", help=f"list all {len(shown)} settings")
            if "--help_all" not in map(underscored, arguments):
                shown &= EVERYDAY_SETTINGS
        for group in GROUPS:
            section = parser.add_argument_group(str(group.__doc__))
            for field in fields(group):
                if field.name in self.only:
                    help_text = help_of(field.name).replace("%", "%%") if field.name in shown else argparse.SUPPRESS
                    default = defaults.get(field.name, field.default)
                    section.add_argument(f"--{field.name}", help=help_text, default=default, **options_of(field.name))
                if field.name == "precision" and field.name in self.only:
                    section.add_argument("--bf16", **options_of("tf32"), help="same as --precision bf16")
        # argparse sets no default where a value exists: a setting stays None unless it is given.
        unset = argparse.Namespace(**dict.fromkeys((*self.only, "config", "bf16")))
        namespace, unknown = parser.parse_known_intermixed_args(list(arguments), unset)
        if unknown:
            name = underscored(unknown[0]).partition("=")[0]
            similar = difflib.get_close_matches(name, parser._option_string_actions, n=1, cutoff=0.8)
            parser.error(f"unknown argument {unknown[0]}" + (f": did you mean {similar[0]}?" if similar else ""))
        given = {name: value for name, value in vars(namespace).items() if value is not None or name not in self.only}
        config = read_config(given.pop("config"), self.only)
        for values in (given, config):
            resolve_alternatives(values)
        if given.keys() & BATCH_SIZES:
            config = {name: value for name, value in config.items() if name not in BATCH_SIZES}
        return defaults | config | given


def options_of(name: str) -> dict[str, Any]:
    """Return the options of `add_argument` for a setting. `Settings` converts and checks its value."""
    kind, optional = get_args(TYPES[name])[0], get_args(get_args(TYPES[name])[0])
    if kind is bool:
        return {"nargs": "?", "const": "true", "metavar": "true"}
    choices = next((get_args(one) for one in (kind, *optional) if get_origin(one) is Literal), ())
    number = {int: "N", float: "X"}.get(get_args(optional[0])[0] if optional and not choices else kind)
    metavar = "{" + ",".join(choices) + "}" if choices else number
    return {"metavar": metavar} if metavar else {}


def read_config(path: str | None, only: Collection[str]) -> dict[str, Any]:
    """Return the settings in a YAML file as texts, without YAML's conversions, which would turn `no` into False."""
    if path is None:
        return {}
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), yaml.BaseLoader) or {}
        config = {str(name).replace("-", "_"): value for name, value in content.items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or "must be a YAML file with one `name: value` per line"
        raise UserError(f"--config {path}: {reason}") from None
    for name in config:
        if name not in (*TYPES, "bf16"):
            raise UserError(f"--config {path}: unknown setting {shorten(name)} (see --help)")
    kept = {*only, "bf16"} if "precision" in only else only
    return {name: value for name, value in config.items() if name in kept and value not in ("", "null", "~")}


def resolve_alternatives(values: dict[str, Any]) -> None:
    """Replace the alias `bf16` by the precision that it stands for.

    Raises:
        UserError: Alternatives contradict each other.
    """
    if values.keys() >= {*BATCH_SIZES}:
        raise UserError("--train_batch_size and --per_device_train_batch_size exclude each other: give only one")
    bf16 = values.pop("bf16", None)
    if bf16 not in (None, "true", "false"):
        raise UserError(f"--bf16 {shorten(str(bf16))}: must be true or false")
    if bf16 == "true" and values.setdefault("precision", "bf16") != "bf16":
        raise UserError(f"--bf16 contradicts --precision {values['precision']}")


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Parse the command line of a training path."""
    return CommandLine().parse(arguments)[0]


def as_flags(settings: Settings) -> list[str]:
    """Return the command line that parses into these settings. It contains only values that are not defaults."""
    defaults = Settings(model=settings.model).as_dict() | {"model": Settings.model}
    changed = {name: value for name, value in settings.as_dict().items() if value != defaults[name]}
    if settings.per_device_train_batch_size is not None:
        changed.pop("train_batch_size", None)  # derived from it, and the flags exclude each other
    return [f"--{name}={value}" for name, value in changed.items()]


def program_name() -> str:
    """Return the module that this process was started with, such as `app.bench.memory`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None if it was started as a file, missing in pdb
    if spec:
        return str(spec.name).removesuffix(".__main__")
    file = Path(sys.argv[0])
    return f"{PACKAGE}.{file.parent.name if file.stem == '__main__' else file.stem}"


def command_line() -> str:
    """Return the command that started this process, without torchrun."""
    return shlex.join(["python", "-m", program_name(), *sys.argv[1:]])
