"""Which tests reach which lines: one run of the tests under coverage.py, with each test as a context.

The ranks of a distributed test are forked from the test's process and are counted as part of the test. Commands that a
test starts through ``exec`` are not: their lines are reached by the tests that call the same functions directly.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

# A pytest plugin, loaded by `-p`. A forked rank starts with a new context, so it has to be named again there.
_PLUGIN = """
import os
import pathlib

import coverage
import pytest

FAILED = pathlib.Path(os.environ["MUTANTS_FAILED"])


def enter(test):
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.switch_context(test)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    enter(item.nodeid)


def pytest_runtest_logreport(report):
    if report.failed or report.skipped:
        with FAILED.open("a") as file:
            print(report.nodeid, file=file)


os.register_at_fork(after_in_child=lambda: enter(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]))
"""
_SETTINGS = """
[run]
source = {sources}
parallel = true
data_file = {directory}/.coverage
patch = fork, _exit
"""

Reached = Mapping[str, Mapping[int, Sequence[str]]]
"""Path of a file below the repository -> line -> the ids of the tests that execute it."""


def record(root: Path, sources: Sequence[Path], tests: Sequence[str]) -> Reached:
    """Run *tests* once below *root* and return which of them execute which lines of *sources*.

    Tests that fail or are skipped without any mutation are left out. Raises RuntimeError if coverage.py is not
    installed or pytest cannot run.
    """
    if importlib.util.find_spec("coverage") is None:
        # Found out now rather than after the minutes that the tests take.
        raise RuntimeError(
            "coverage.py is not installed: pip install -c constraints.txt -e '.[mutants]'"
        )
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        directory = Path(name)
        (directory / "mutants_contexts.py").write_text(_PLUGIN)
        settings = directory / "coveragerc"
        named = ",".join(str(source) for source in sources)
        settings.write_text(_SETTINGS.format(sources=named, directory=directory))
        command = [
            *(sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"),
            *("-m", "pytest", "-q", "-p", "mutants_contexts", "-p", "no:cacheprovider", *tests),
        ]
        failed = directory / "failed"
        failed.touch()
        path = os.pathsep.join([str(root), name])
        environment = {**os.environ, "PYTHONPATH": path, "MUTANTS_FAILED": str(failed)}
        done = subprocess.run(command, cwd=root, env=environment, check=False)
        if done.returncode > 1:
            raise RuntimeError(f"pytest ended with {done.returncode}")
        return _read(root, directory, frozenset(failed.read_text().splitlines()))


def _read(root: Path, directory: Path, failed: frozenset[str]) -> Reached:
    coverage = importlib.import_module("coverage")  # an extra: type checkers may not have it
    measured = coverage.Coverage(data_file=directory / ".coverage")
    measured.combine([str(directory)])
    data = measured.get_data()
    reached: dict[str, dict[int, Sequence[str]]] = {}
    for file in data.measured_files():
        lines: dict[int, Sequence[str]] = defaultdict(list)
        for line, contexts in data.contexts_by_lineno(file).items():
            lines[line] = sorted({*contexts} - failed - {""})
        reached[str(Path(file).resolve().relative_to(root.resolve()))] = lines
    return reached


def without_removed_tests(root: Path, reached: Reached) -> tuple[Reached, frozenset[str]]:
    """Return a recording without the tests that no longer exist below *root*, and the ids of those tests.

    pytest runs no test at all if one of the ids that it is given does not exist. Raises RuntimeError if pytest cannot
    list the tests.
    """
    recorded = {test for lines in reached.values() for tests in lines.values() for test in tests}
    files = sorted({test.partition("::")[0] for test in recorded})
    files = [file for file in files if (root / file).is_file()]
    existing: set[str] = set()
    if files:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        listing = subprocess.run(
            [*command, *files], cwd=root, capture_output=True, text=True, check=False
        )
        if listing.returncode != 0:
            raise RuntimeError(f"pytest cannot list the recorded tests: {listing.stdout[-2000:]}")
        existing.update(listing.stdout.splitlines())
    remaining: dict[str, dict[int, Sequence[str]]] = {}
    for file, lines in reached.items():
        remaining[file] = {
            line: [test for test in tests if test in existing] for line, tests in lines.items()
        }
    return remaining, frozenset(recorded - existing)


def dump(reached: Reached, path: Path) -> None:
    """Write a recording as JSON, each test's id once."""
    tests = sorted(
        {test for lines in reached.values() for found in lines.values() for test in found}
    )
    number_of = {test: number for number, test in enumerate(tests)}
    files = {}
    for file, lines in reached.items():
        files[file] = {line: [number_of[test] for test in found] for line, found in lines.items()}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"tests": tests, "files": files}))


def load(path: Path) -> Reached:
    """Read what :func:`dump` wrote. Raises OSError if there is no such file."""
    content = json.loads(path.read_text())
    tests = content["tests"]
    reached: dict[str, dict[int, Sequence[str]]] = {}
    for file, lines in content["files"].items():
        reached[file] = {
            int(line): [tests[number] for number in found] for line, found in lines.items()
        }
    return reached
