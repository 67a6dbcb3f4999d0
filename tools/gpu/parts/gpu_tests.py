"""tests/gpu and the tests of Triton kernels with pytest, in a few processes that share the GPU."""

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
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
_OF_DRY_RUN = ("tests/gpu/test_losses.py", "-k", "cpu-packed")
_PROCESSES = 14
"""A test mostly waits for its host."""
_ENDED = re.compile(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED) (tests/.+)$", re.MULTILINE)
"""A line that pytest-xdist prints when a test ends."""
_ENDED_ALONE = re.compile(r"^(tests/.+) (PASSED|FAILED|ERROR|SKIPPED) ", re.MULTILINE)
"""The same without pytest-xdist."""


def run(part: PartRun) -> None:
    """Run the tests until the part's time is over. Texts of failures are in the log of the session."""
    printed = part.session.scratch / "tests.log"
    part.measure("tests", _tests, printed, part.session.is_dry_run, limit=part.seconds_left)
    # The process may have been stopped: what it printed until then counts.
    text = printed.read_text(errors="replace") if printed.is_file() else ""
    alone = [(outcome, test) for test, outcome in _ENDED_ALONE.findall(text)]
    ended = _ENDED.findall(text) + alone
    part.add("outcomes", Counter(outcome.lower() for outcome, _ in ended))
    for outcome, test in ended:
        if outcome in ("FAILED", "ERROR"):
            part.fail(test, "see gpu.log")
            print(f"    FAILED {test}")


def _tests(printed: Path, is_dry_run: bool) -> Figures:
    chosen = shlex.split(os.environ.get("GPU_TESTS", "")) or (_OF_DRY_RUN if is_dry_run else PATHS)
    # make test treats warnings as errors; warnings of other libraries and of CUDA are no failure here.
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-W", "ignore", *chosen]
    if version_of("pytest-xdist") and not is_dry_run:
        command += ["-n", str(_PROCESSES)]
    paths = [str(ROOT), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with open(printed, "w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    print(printed.read_text(errors="replace"))
    # 1: tests failed; 5: none was selected.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}")
    yield "tests", {"exit_code": done.returncode}
