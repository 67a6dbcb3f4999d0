"""Arguments that several commands of ``ckpt`` have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.cli.common.paths import check_working_directory
from automodel_ckpt.errors import RecipeError

WHERE = "a run directory, a checkpoint, or a pointer such as checkpoints/LATEST"

PATHS = frozenset(
    {
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
    }
)
"""The arguments of all commands whose value is a path, or a list of paths."""


def resolve_paths(arguments: argparse.Namespace) -> None:
    """Check each path, and replace ``~/`` at its beginning by the home directory of the user.

    Shells do this for ``-o ~/model``, but not for ``--output=~/model``. Raises :class:`RecipeError` for an empty path,
    and for a relative one if the working directory was removed.
    """
    for name, value in vars(arguments).items():
        if name not in PATHS:
            continue
        # Path("") is the current directory: `ckpt prune "$RUN"` must not prune it if the variable is not set.
        if value == "" or (isinstance(value, list) and "" in value):
            raise RecipeError(
                "a path is empty",
                where=f"ckpt {arguments.command}",
                value="''",
                hint="check the variable that it comes from; . is the current directory",
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
    return RecipeError(
        f"this option has no effect {condition}",
        where=f"ckpt {command} {option}",
        # A flag has no value.
        value="" if value is True else value,
        hint=f"remove {option}",
    )


def add_path(command: argparse.ArgumentParser) -> None:
    """Add the optional PATH argument, which defaults to the current directory."""
    command.add_argument(
        "path", nargs="?", default=".", metavar="PATH", help=f"{WHERE} (default: current directory)"
    )


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the optional RUN argument, which defaults to the current directory."""
    command.add_argument(
        "path",
        nargs="?",
        default=".",
        metavar="RUN",
        help="a run directory, or a path inside it (default: current directory)",
    )


def number_at_least(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Return the type of an argument that is an integer from *least* to *most*."""

    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number") from error
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        if number > most:
            raise argparse.ArgumentTypeError(f"{number} is more than {most}")
        return number

    return whole_number


def add_checkpoint_name(command: argparse.ArgumentParser, default: str) -> None:
    """Add ``--step`` and ``--epoch`` of the checkpoint that is written; *default* describes their default."""
    command.add_argument(
        "--step",
        type=number_at_least(0),
        metavar="S",
        help=f"step in the checkpoint's name (default: {default})",
    )
    command.add_argument(
        "--epoch",
        type=number_at_least(0),
        metavar="E",
        help=f"epoch in the checkpoint's name (default: {default})",
    )
