"""What a target of ``ckpt export`` defines: its options, and the function that exports."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.terminal import print_path, printable, size_text

if TYPE_CHECKING:
    from automodel_ckpt.convert.targets.flow import ExportReport


@dataclass(frozen=True, slots=True)
class Option:
    """An option of ``ckpt export`` that some targets use: its flag, its help, and more arguments of argparse.

    Targets that use the same option share one object. *argument* is the keyword argument of the functions that export,
    by default the attribute of the parsed arguments.
    """

    flag: str
    help: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    argument: str = ""

    @property
    def keyword(self) -> str:
        """The keyword argument of the functions that export."""
        return self.argument or self.attribute

    @property
    def attribute(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> object:
        """The value of an option that was not given."""
        if self.arguments.get("action") == "store_true":
            return False
        return self.arguments.get("default")


@dataclass(frozen=True, slots=True)
class Target:
    """A value of ``--to``.

    *summary* describes it in ``--help``, as does *output*, the default of ``--output``. *run* exports the checkpoint in
    a path, prints the path of the export, and returns the document of ``--json``. An option that is not in *options* is
    an error when it is given. *resumes* states whether the other program continues the run, with its optimizer state.
    """

    name: str
    summary: str
    output: str
    run: Callable[[argparse.Namespace, Path], dict[str, Any]]
    options: tuple[Option, ...]
    resumes: bool = False


CAST_DTYPE = Option(
    "--cast-dtype",
    "cast floating-point tensors to bf16, fp16, fp32 or fp64 (gguf and compressed-tensors: not fp64)",
    {"metavar": "T"},
)
NUM_THREADS = Option(
    "--num-threads", "threads per process (default: 5)", {"type": int, "default": 5, "metavar": "N"}
)
FORCE = Option("--force", "overwrite an existing file", {"action": "store_true"}, "overwrite")
PREFIX = Option(
    "--prefix",
    "prefix of all names in the state dict (default for lightning: model.)",
    {"metavar": "P"},
)


def log(text: str) -> None:
    """Log a line on standard error, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {printable(text)}", file=sys.stderr, flush=True)


def finish(
    arguments: argparse.Namespace, report: ExportReport, details: str = ""
) -> dict[str, Any]:
    """Log a finished export, with *details* of its target, print its path, and return the document of ``--json``."""
    digests = "digests checked" if report.checked else "source unchecked"
    size = size_text(report.nbytes)
    text = (
        f"wrote {counted(report.num_tensors, 'tensor')}, {size}, {report.seconds:.1f} s ({digests})"
    )
    if details:
        text += f": {details}"
    log(text)
    if not arguments.json:
        print_path(report.output)
    document: dict[str, Any] = {}
    for name, value in {**asdict(report), **report.details}.items():
        if name == "details":
            continue
        document[name] = str(value) if isinstance(value, Path) else value
    return document
