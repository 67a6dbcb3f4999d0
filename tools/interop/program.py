"""What a module of this package defines: a program, its environment, and the checks of both directions."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.clients.environments import Environment, own_variables

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
