"""What a module of this package defines: a program, its environment, and the checks of both directions."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from automodel_ckpt.cli import ckpt
from tools.interop.environments import Environment, own_variables

_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Check:
    """A row of the table: what was compared, what was found, and whether that is right."""

    what: str
    found: str
    good: bool


@dataclass(frozen=True)
class Workplace:
    """Where the checks of a program run: *python* is the interpreter of its environment, *directory* is empty.

    The output of the programs goes to the file *log*.
    """

    python: Path
    directory: Path
    log: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, command: Sequence[str | Path]) -> None:
        """Run a command in *directory*. Raises subprocess.SubprocessError if it fails or takes half an hour."""
        environment = own_variables() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with open(self.log, "a") as output:
            subprocess.run(
                [str(part) for part in command],
                check=True,
                env=environment | self.variables,
                cwd=self.directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_SECONDS,
            )

    def run_script(self, script: Path, *arguments: str | Path) -> None:
        """Run a Python script with the program's interpreter, as :meth:`run`."""
        self.run([self.python, script, *arguments])

    def ckpt(self, *arguments: str | Path) -> None:
        """Run ``ckpt`` in this process, with its output in the log. Raises RuntimeError if it fails."""
        with open(self.log, "a") as log, contextlib.redirect_stdout(log):
            code = ckpt.main([str(argument) for argument in arguments])
        if code != 0:
            raise RuntimeError(f"ckpt {' '.join(map(str, arguments))} ended with code {code}")


@dataclass(frozen=True)
class Program:
    """A program that writes or reads checkpoints.

    *name* is its name in the table, and *packages* are the distributions whose versions the table shows. *checks*
    yields the checks. An exception in it becomes a failed check. *variables* are added to the environment of its
    processes.
    """

    name: str
    environment: Environment
    packages: tuple[str, ...]
    checks: Callable[[Workplace], Iterator[Check]]
    variables: dict[str, str] = field(default_factory=dict)
