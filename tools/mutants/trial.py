"""Run tests against one mutation: in a forked child, on a copy of the repository made of hard links.

The parent imports the slow libraries once and nothing of this repository, so a trial costs only its tests.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tools.mutants.operators import Mutation

Outcome = Literal["killed", "timed out", "survived", "not reached", "undecided"]
"""A mutation is noticed if it is *killed* (a test fails) or *timed out* (the tests do not end within the limit).

It is *undecided* if the test that failed fails with unchanged code too.
"""

_SLOW_LIBRARIES = ("torch", "transformers", "datasets", "peft", "numpy", "pytest")
# Only at the top of the repository: tests/golden/runs is needed.
_NOT_COPIED = {
    ".git",
    ".venv",
    ".venv-oldest",
    ".clients",
    ".mypy_cache",
    ".ruff_cache",
    "runs",
    "build",
    "dist",
}
_POLL_SECONDS = 0.1
# pytest's exit code for a wrong command line. A conftest.py that cannot be imported has it too.
_NO_SUCH_TEST = 4


@dataclass(frozen=True)
class Trial:
    """A mutation of the file *path* (relative to the repository) and the ids of the tests that may notice it."""

    path: str
    mutation: Mutation
    tests: Sequence[str]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.mutation.line}"


@dataclass(frozen=True)
class Result:
    """The outcome of a trial, and the id of the test that failed, if one did."""

    outcome: Outcome
    failed_test: str | None = None


def import_slow_libraries() -> None:
    """Import once what every trial needs."""
    for name in _SLOW_LIBRARIES:
        importlib.import_module(name)


def run(root: Path, trial: Trial, timeout_seconds: float) -> Result:
    """Run the tests of a trial with its mutation, for at most *timeout_seconds*.

    Raises LookupError if one of the tests does not exist, because pytest then runs none of them.
    """
    if not trial.tests:
        return Result("not reached")
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name) / "r"
        shutil.copytree(
            root,
            copy,
            symlinks=True,
            copy_function=os.link,
            ignore=_ignored_in(root),
        )
        target = copy / trial.path
        source = target.read_bytes()
        target.unlink()  # it is a hard link to the original
        target.write_bytes(trial.mutation.apply(source))
        child = os.fork()
        if child == 0:
            _run_tests(copy, Path(name), trial.tests)
        code = _wait(child, timeout_seconds)
        output = (Path(name) / "output").read_text(errors="replace")
        failed = Path(name) / "failed"
        failed_tests = failed.read_text().splitlines() if failed.exists() else []
    if code is None:
        return Result("timed out")
    if code == _NO_SUCH_TEST and "ERROR: not found:" in output:
        raise LookupError(f"recorded tests do not exist: {output[-2000:]}")
    if code == 0:
        return Result("survived")
    return Result("killed", failed_tests[0] if failed_tests else None)


def _ignored_in(root: Path) -> Callable[[str, list[str]], set[str]]:
    """Return shutil.copytree's argument *ignore* for a copy of the repository *root*."""

    def ignored(directory: str, names: list[str]) -> set[str]:
        is_root = Path(directory) == root
        return _NOT_COPIED & {*names} if is_root else set()

    return ignored


def _run_tests(copy: Path, scratch: Path, tests: Sequence[str]) -> None:
    """End this process with pytest's exit code."""
    code = 1
    try:
        # An object that the parent has not collected yet may belong to a thread that does not exist here: its
        # destructor can end this process.
        gc.freeze()
        os.setsid()  # so that a trial that hangs is killed with its ranks and commands
        output = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        for module in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
            del sys.modules[module]  # the copy's tools are imported where a test needs them
        tempfile.tempdir = None
        os.environ.update(
            PYTHONPATH=str(copy), TMPDIR=str(scratch), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"
        )
        import pytest

        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        code = int(pytest.main(arguments, [_FailedTests(scratch / "failed")]))
    finally:
        os._exit(code)


class _FailedTests:
    """A pytest plugin that writes the ids of the tests that fail to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with self._path.open("a") as file:
                print(report.nodeid, file=file)


def _wait(child: int, timeout_seconds: float) -> int | None:
    """Return the exit code of *child*, or None after killing it at the end of the time."""
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _kill_group(child)  # ranks and commands that a failed test left
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_SECONDS)
    _kill_group(child)
    os.waitpid(child, 0)
    return None


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
