"""The command line: parse flags and `--config` into `Settings`."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from .common.errors import UserError, shorten
from .common.paths import PACKAGE, with_package_name
from .setting_groups import GROUPS
from .settings import Settings

BATCH_SIZES = ("train_batch_size", "per_device_train_batch_size")  # alternatives
# The flags that programs reject, and do not list in their help: all but the training paths.
FLAGS_OF_ONE_RUN = {
    "dry_run": f"only {PACKAGE}.ddp_loop and {PACKAGE}.trainer_run have it; {PACKAGE}.plan plans all strategies"
}


class ConfigLoader(yaml.BaseLoader):
    """Load YAML without its conversions, which would turn `no` into False, and reject duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value).replace("-", "_") for key, _ in node.value]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise yaml.YAMLError(f"{duplicates[0]} is set more than once")
        return super().construct_mapping(node, deep)


class OneLineParser(argparse.ArgumentParser):
    """The parser of every program: its help, and a one-line `UserError` instead of the usage and an exit."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("description"):  # a docstring
            options["description"] = with_package_name(options["description"])
        look: dict[str, Any] = {"prog": f"python -m {program_name()}", "usage": "%(prog)s [--flag VALUE …]"}
        look |= {"formatter_class": HelpFormatter, "allow_abbrev": False}
        super().__init__(*arguments, **look | options)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add a flag `--some_name`, which may also be written as `--some-name`."""
        with_hyphens = (name.replace("_", "-") for name in names if name.startswith("--"))
        return super().add_argument(*dict.fromkeys((*names, *with_hyphens)), **options)

    def error(self, message: str) -> NoReturn:
        message = shorten(message.replace("unrecognized arguments:", "unknown argument"), 300)
        raise UserError(f"{message} (--help lists all flags)")


def count(text: str) -> int:
    """Parse a positive whole number, as the `type` of a flag."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be a whole number, 1 or more")
    return int(text)


def positive(text: str) -> float:
    """Parse a positive number, as the `type` of a flag."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be a number above 0")
    return value


def boolean(text: str) -> bool:
    """Parse a switch's value, as the `type` of a flag."""
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{shorten(text)}: must be true or false")


class SettingsParser(OneLineParser):
    """A parser of all settings, and of the flags that a program adds.

    Its flags are those of transformers' `HfArgumentParser`, whose import would take a second: `--some_name` or
    `--some-name`, and switches as `--name`, `--name=true` or `--name false`.

    Attributes:
        rejected: the settings that the program rejects, and why. They are not listed.
    """

    def __init__(self, rejected: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.rejected = rejected
        for settings in GROUPS:
            group, types = self.add_argument_group(settings._argument_group_name), get_type_hints(settings)
            for field in fields(settings):
                names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
                group.add_argument(
                    *names, default=field.default, help=field.metadata["help"], **options_of(types[field.name])
                )
                if field.name == "precision":
                    group.add_argument("--bf16", nargs="?", const=True, type=boolean, help="same as --precision bf16")

    def values(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the value of every flag: from the command line, otherwise from `--config`, otherwise its default.

        Raises:
            UserError: An unknown or rejected flag, a value of the wrong type, or a config file that cannot be used.
        """
        config = self.parse(arguments)["config"]
        if config is not None:
            self.set_defaults(**self.parse_yaml(Path(config)))
        return {name: value for name, value in self.parse(arguments).items() if name != "config"}

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Parse arguments without the config file."""
        # argparse does not apply its defaults to attributes that exist: these stay None unless they are given.
        namespace = argparse.Namespace(**dict.fromkeys((*BATCH_SIZES, "precision", *self.rejected)))
        namespace, unknown = self.parse_known_intermixed_args(list(arguments), namespace)
        if unknown:
            # Only flags that --help lists: a suggestion must not be rejected in turn.
            listed = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            flags = {name[2:] for name in listed if name.startswith("--") and "-" not in name[2:]}
            from .common.flag_hints import hint_for  # here, because only a mistake needs it

            hint = hint_for(unknown[0], flags)
            self.error(f"unknown argument {unknown[0]}" + (f": {hint}" if hint else ""))
        for name, reason in self.rejected.items():
            if getattr(namespace, name) not in (None, False):  # even if it is the default: the user expects an effect
                raise UserError(f"--{name}: {reason}")
            setattr(namespace, name, self.get_default(name))
        given = [name for name in BATCH_SIZES if getattr(namespace, name) is not None]
        if len(given) == 2:
            self.error("--train_batch_size and --per_device_train_batch_size exclude each other: give only one of them")
        if not given:
            vars(namespace).update({name: self.get_default(name) for name in BATCH_SIZES})
        elif given == ["per_device_train_batch_size"]:
            namespace.train_batch_size = Settings.train_batch_size  # resolve_train_batch_size replaces it
        namespace.precision = self.precision_of(namespace.precision, namespace.bf16)
        del namespace.bf16
        return vars(namespace)

    def precision_of(self, precision: str | None, bf16: bool | None) -> str:
        """Return the precision that `--precision` and its alias `--bf16` select.

        Args:
            precision, bf16: None if the flag is not given.
        """
        if bf16 and precision not in (None, "bf16"):
            raise UserError(f"--bf16 contradicts --precision {precision}")
        default = str(self.get_default("precision"))
        if bf16 is False and default == "bf16":  # `--bf16=false` overrides the config file
            default = "fp32"
        return precision or ("bf16" if bf16 else default)

    def parse_yaml(self, path: Path) -> dict[str, Any]:
        """Return the settings in a YAML mapping, validated like command-line flags."""
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), ConfigLoader) or {}
        except OSError as problem:
            raise UserError(f"--config {path}: {problem.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as problem:
            raise UserError(f"--config {path}: not valid YAML: {' '.join(str(problem).split())}") from None
        except RecursionError:
            raise UserError(f"--config {path}: is nested too deeply; must be a mapping of settings") from None
        if not isinstance(content, dict):
            raise UserError(f"--config {path}: must be a mapping of settings, with one `name: value` per line")
        content = {str(name).replace("-", "_"): value for name, value in content.items()}
        known = {action.dest for action in self._actions}
        arguments: list[str] = []
        for name, value in content.items():
            if isinstance(value, dict | list):
                raise UserError(f"--config {path}: {name} must be a single value")
            if name == "config":
                raise UserError(f"--config {path}: config cannot be set in a config file")
            if name not in known or value not in ("", "null", "~"):  # parse() reports unknown names
                arguments.append(f"--{name}={value}")
        for action in self._actions:
            action.required = False  # the command line has them
        try:
            parsed = self.parse(arguments)
        except UserError as problem:
            raise UserError(f"--config {path}: {problem}") from None
        names = ["precision" if name == "bf16" else name for name in content]
        return {name: parsed[name] for name in names}


def options_of(annotation: Any) -> dict[str, Any]:
    """Return the options of `add_argument` for the type of a setting: `bool`, a `Literal`, or a type that converts."""
    if get_origin(annotation) in (Union, UnionType):  # of a type and None, which is no value of a flag
        (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
    if annotation is bool:
        return {"nargs": "?", "const": True, "type": boolean}
    return {"choices": get_args(annotation)} if get_origin(annotation) is Literal else {"type": annotation}


def program_name() -> str:
    """Return the module that this process was started with, such as `app.bench.memory`."""
    if sys.argv[0] == "-m":  # Python has not found the module yet: it is importing this package first
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m").removesuffix(".__main__")
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None if it was started as a file, missing in pdb
    if spec:
        return str(spec.name).removesuffix(".__main__")
    file = Path(sys.argv[0])
    return f"{PACKAGE}.{file.parent.name if file.stem == '__main__' else file.stem}"


def command_line() -> str:
    """Return the command that started this process, without torchrun."""
    return shlex.join(["python", "-m", program_name(), *sys.argv[1:]])


def settings_parser(
    description: str | None,
    add_arguments: Callable[[OneLineParser], None] | None = None,
    rejected: Mapping[str, str] = FLAGS_OF_ONE_RUN,
) -> SettingsParser:
    """Create a parser with the program's own flags, which `--help` lists first, every training flag and `--config`.

    Args:
        description: The docstring of the entry point, which `--help` prints first.
        add_arguments: Adds the program's own flags to a parser, whose names must differ from those of all settings.
        rejected: The settings that the program rejects, and why.
    """
    own = OneLineParser(add_help=False)
    if add_arguments is not None:
        add_arguments(own)
    own.add_argument("--config", metavar="FILE.yaml", help="YAML file of settings; command-line flags override it")
    parser = SettingsParser(rejected, description=description, parents=[own])  # the parents' flags are listed first
    parser.set_defaults(**own._defaults)  # the program's own defaults of settings
    for action in parser._actions:
        if action.dest in rejected:
            action.help = argparse.SUPPRESS
    return parser


def parse_flags(
    description: str | None,
    arguments: Sequence[str],
    add_arguments: Callable[[OneLineParser], None] | None = None,
    *,
    rejected: Mapping[str, str] = FLAGS_OF_ONE_RUN,
) -> tuple[Settings, dict[str, Any]]:
    """Parse a command line with `settings_parser`. Return the settings, and the values of the program's own flags.

    Raises:
        UserError: An unknown flag, a value of the wrong type or out of range, or an unreadable config file.
    """
    values = settings_parser(description, add_arguments, rejected).values(arguments)
    own_flags = {name: values.pop(name) for name in values.keys() - {field.name for field in fields(Settings)}}
    return Settings(**values), own_flags


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Parse the command line of a training path."""
    return parse_flags(None, arguments, rejected={})[0]


def as_flags(settings: Settings) -> list[str]:
    """Return the command line that parses into these settings. It contains only values that are not defaults."""
    defaults = Settings(model=settings.model).as_dict() | {"model": Settings.model}
    changed = {name: value for name, value in settings.as_dict().items() if value != defaults[name]}
    if settings.per_device_train_batch_size is not None:
        changed.pop("train_batch_size", None)  # derived from it, and the flags exclude each other
    return [f"--{name}={value}" for name, value in changed.items()]


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Print the description unchanged, then each flag once, with its default if it has one."""

    PLACEHOLDERS: ClassVar[dict[Any, str]] = {int: "N", float: "X"}

    def __init__(self, prog: str) -> None:
        # get_terminal_size ignores a COLUMNS variable that is not a positive number; argparse's default does not.
        super().__init__(prog, max_help_position=36, width=min(120, shutil.get_terminal_size((100, 24)).columns))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Format as `--flag VALUE`, without the alternative spelling with hyphens."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.nargs in (0, "?"):  # a switch
            return action.option_strings[0]
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
        value = choices or action.metavar or self.PLACEHOLDERS.get(action.type, "TEXT")
        return f"{action.option_strings[0]} {value}"
