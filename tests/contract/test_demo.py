"""`make demo` and `make demo-vlm` do what they say: the scripts check their own claims, and end with an error when one
does not hold."""

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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_with_images_reads_digits_after_a_few_steps_already(tmp_path: Path) -> None:
    short = ["--nproc-per-node=1", "--step_scheduler.max_steps=120", "--step_scheduler.ckpt_every_steps=null"]
    command = [sys.executable, str(ROOT / "tools" / "demo_vlm.py"), *short, "--validation_dataset=null"]
    environment = {**os.environ, "DEMO_DIRECTORY": str(tmp_path / "demo"), "DEMO_WANTED": "0.25"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 300 scans that it never saw are named rightly" in done.stdout
