"""`make demo` does what it says: the script checks its own claims, and ends with an error when one does not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_runs_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "demo.py")]
    environment = {**os.environ, "DEMO_DIRECTORY": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 60 steps agree in epoch, loss, grad_norm" in done.stdout
    assert "the exported weights are the same bytes" in done.stdout
    assert "transformers loaded the export" in done.stdout
