"""The arguments of ``ckpt``'s commands: their form in a table, and what several commands have."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.cli.launch.process import check_working_directory
from automodel_ckpt.errors import RecipeError

CHECK_PATH = "check the path, its permissions and the free space"
WHERE = "a run directory, a checkpoint, or a pointer such as checkpoints/LATEST"
PATH = f"path ? =. PATH | {WHERE} (default: current directory)"
RUN = "path ? =. RUN | a run directory, or a path inside it (default: current directory)"
CHECKPOINT_NAME = """
--step >=0 S  | step in the checkpoint's name (default: {0})
--epoch >=0 E | epoch in the checkpoint's name (default: {0})
"""
"""The name of the checkpoint that is written; ``{0}`` is what the defaults are."""

PATHS = frozenset(
    [
        "a",
        "b",
        "path",
        "paths",
        "source",
        "sources",
        "run",
        "output",
        "file",
        "directory",
        "base",
        "card",
        "config",
        "eval",
        "image",
        "include_path",
        "model_config",
        "names",
    ]
)
"""The arguments of all commands that take a path, or a list of paths."""

Types = Mapping[str, Callable[[str], Any]]


def options_in(text: str, types: Types | None = None) -> Iterator[tuple[list[str], ValueDict]]:
    """Yield the names and the settings of argparse of each argument in a table.

    A line is ``NAMES WORDS | help``. Lines that begin with two spaces continue the help before. Words are a metavar,
    ``>=N`` for a whole number, ``int``, ``path``, ``=DEFAULT``, ``{A,B}`` for choices, ``?`` ``+`` ``*`` for the number
    of values, ``required``, ``repeat``, and ``to:ATTRIBUTE``. An option without a metavar and choices is a flag.
    *types* has the types of other arguments by name.
    """
    for line in filter(None, text.replace("\n  ", " ").splitlines()):
        words, _, description = line.partition("| ")
        name, *others = words.split()
        names = [name]
        settings: ValueDict = {"help": description}
        if types and name in types:
            settings["type"] = types[name]
        for word in others:
            if word.startswith("-"):
                names.append(word)
            else:
                settings |= _setting(word)
        if name.startswith("-") and not settings.keys() & {"metavar", "choices"}:
            settings["action"] = "store_true"
        yield names, settings


def _setting(word: str) -> ValueDict:
    """The setting of argparse that a word of a table is."""
    fixed: dict[str, ValueDict] = {
        "required": {"required": True},
        "repeat": {"action": "append", "default": []},
        "int": {"type": int},
        "path": {"type": Path},
    }
    if word in fixed:
        return fixed[word]
    if word in ("?", "+", "*"):
        return {"nargs": word}
    if word.startswith(">="):
        return {"type": number_at_least(int(word[2:]))}
    if word.startswith("="):
        return {"default": word[1:]}
    if word.startswith("to:"):
        return {"dest": word[3:]}
    if word.startswith("{"):
        return {"choices": word[1:-1].split(",")}
    return {"metavar": word}


def add_usage(command: ArgumentParser, usage: str, types: Types | None = None) -> None:
    """Set the description of a command's parser, and add its arguments, which follow after a blank line."""
    description, _, arguments = usage.strip().partition("\n\n")
    command.description = description.replace("\n", " ")
    for names, settings in options_in(arguments, types):
        command.add_argument(*names, **settings)


def resolve_paths(arguments: Namespace) -> None:
    """Check each path, and replace ``~/`` at its beginning by the home directory of the user.

    Shells do this for ``-o ~/model``, but not for ``--output=~/model``. Raises :class:`RecipeError` for an empty path,
    and for a relative one if the working directory was removed.
    """
    for name in PATHS & vars(arguments).keys():
        value = getattr(arguments, name)
        # Path("") is the current directory: `ckpt prune "$RUN"` must not prune it if the variable is not set.
        if value == "" or (isinstance(value, list) and "" in value):
            raise RecipeError(
                "a path is empty",
                f"ckpt {arguments.command}",
                "''",
                "check the variable that it comes from; . is the current directory",
            )
        if isinstance(value, list):
            setattr(arguments, name, [_expanded(each) for each in value])
        elif value is not None:
            setattr(arguments, name, _expanded(value))


def _expanded(value: Any) -> Any:
    """Return *value* with the home directory if it is a path that begins with ``~/``."""
    # `~name` may be a file: an editor's backup, or a name from a pattern.
    if str(value).startswith("~/"):
        return type(value)(os.path.expanduser(value))
    if not os.path.isabs(value) and not is_url(str(value)):
        check_working_directory()
    return value


def option_flag(attribute: str) -> str:
    """The flag of the option that argparse stores in *attribute*: ``--keep-last``."""
    return f"--{attribute.replace('_', '-')}"


def without_effect(command: str, option: str, value: Any, condition: str) -> RecipeError:
    """Return the error of an *option* that was given although it has no effect, such as ``without --keep-best``."""
    what = f"this option has no effect {condition}"
    # A flag has no value.
    return RecipeError(what, f"ckpt {command} {option}", "" if value is True else value)


def number_at_least(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Return the type of an argument that is an integer from *least* to *most*."""

    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text} is not a whole number") from error
        if number < least:
            raise ArgumentTypeError(f"{number} is less than {least}")
        if number > most:
            raise ArgumentTypeError(f"{number} is more than {most}")
        return number

    return whole_number
