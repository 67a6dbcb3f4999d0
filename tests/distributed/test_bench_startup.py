"""The start-up bench runs, and its rows are in the order that their work implies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_bench_measures_the_first_step_of_the_main_example() -> None:
    command = [sys.executable, "tools/bench_startup.py", "--runs", "0", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    seconds = {name: runs[0] for name, runs in json.loads(done.stdout).items()}
    assert list(seconds)[-1] == "first step, 2 processes"
    assert 0 < seconds["python"] < seconds["first step, 2 processes"] < 60
