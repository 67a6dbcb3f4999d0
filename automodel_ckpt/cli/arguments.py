"""Arguments that several commands of ``ckpt`` have."""

from __future__ import annotations

import argparse
from collections.abc import Callable

WHERE = "a run directory, a checkpoint, or a pointer such as checkpoints/LATEST"


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


def number_at_least(least: int) -> Callable[[str], int]:
    """Return the type of an argument that is an integer of *least* or more."""

    # argparse names the function in the message for text that is not a number
    def whole_number(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
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
