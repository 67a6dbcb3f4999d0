"""tests/gpu and the tests of Triton kernels with pytest, in a few processes that share the GPU."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tools.gpu.machine import version_of
from tools.gpu.session import Figures, PartRun
from tools.support import ROOT

PATHS = (
    "tests/gpu",
    "tests/unit/models/loss/test_loss_kernels.py",
    "tests/unit/models/layers/test_gate_kernels.py",
    "tests/unit/models/layers/test_rotary_kernels.py",
    "tests/unit/training/optim/test_adamw_kernel.py",
    "tests/unit/training/optim/test_adam8bit_kernel.py",
)
_OF_DRY_RUN = ("tests/gpu/test_losses.py",)
_PROCESSES = 14
"""Most of a test's time is that of its host."""
_SHOWN = 3000
"""Characters of a failure's text, from its beginning and from its end."""


def run(part: PartRun) -> None:
    """Run the tests until the part's time is over. Each test's result is recorded when it ends."""
    selection = ["-k", "cpu-packed"] if part.session.is_dry_run else []
    records = part.session.scratch / "tests.jsonl"
    part.measure("tests", _tests, records, selection, limit=part.seconds_left)
    # The process may have been stopped: what it recorded until then counts.
    outcomes = _outcomes(records)
    part.add("outcomes", {name: len(found) for name, found in outcomes.items()})
    passed = sorted(test for test, _ in outcomes.get("passed", []))
    part.add("passed", {"names": passed})
    for test, text in outcomes.get("failed", []):
        part.fail(test, _shortened(text))
        print(f"    FAILED {test}")


def _shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= 2 * _SHOWN:
        return text
    return f"{text[:_SHOWN]}\n...\n{text[-_SHOWN:]}"


def _outcomes(records: Path) -> dict[str, list[tuple[str, str]]]:
    """(test, text of its failure) of each outcome in a file of records."""
    found: dict[str, list[tuple[str, str]]] = {}
    if not records.is_file():
        return found
    for line in records.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["outcome"], []).append((record["test"], record["text"]))
    return found


def _tests(records: Path, selection: list[str]) -> Figures:
    paths = shlex.split(os.environ.get("GPU_TESTS", "")) or (_OF_DRY_RUN if selection else PATHS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.gpu.pytest_records", *paths]
    # make test treats warnings as errors; those of other libraries and of CUDA are no failure here.
    command += ["-W", "ignore"]
    if version_of("pytest-xdist") and not selection:
        command += ["-n", str(_PROCESSES)]
    environment = os.environ | {
        "GPU_TEST_RECORDS": str(records),
        "PYTHONPATH": os.pathsep.join(path for path in [str(ROOT), *sys.path] if path),
    }
    done = subprocess.run([*command, *selection], cwd=ROOT, env=environment)
    # 1: tests failed, which the records name; 5: none was selected.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}")
    yield "tests", {"exit_code": done.returncode}
