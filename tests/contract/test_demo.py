"""`make demo` and `make demo-vlm` do what they say: the scripts check their own claims, and end with an error when one
does not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.recipes.vlm_finetune import VLMFinetune
from tests.support import ranks
from tests.support.training import train
from tools import demo_vlm

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_runs_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "demo.py")]
    environment = {**os.environ, "DEMO_DIRECTORY": str(tmp_path), "DEMO_STEPS": "30"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 30 steps agree in epoch, loss, grad_norm" in done.stdout
    assert "the exported weights are the same bytes" in done.stdout
    assert "transformers loaded the export" in done.stdout


@pytest.mark.timeout(300)
def test_the_demo_with_images_reads_digits_after_a_few_steps_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_vlm, "RUNS", tmp_path)
    short = ["--step_scheduler.max_steps=100", "--step_scheduler.ckpt_every_steps=null", "--validation_dataset=null"]
    # First: a tokenizer is trained by threads, which do not survive the fork below.
    paths, expected = demo_vlm.write_scans(tmp_path / "scans")
    recipe = ROOT / demo_vlm.RECIPE
    training = partial(train, recipe, f"--checkpoint.checkpoint_dir={tmp_path}/run", *short, recipe_class=VLMFinetune)
    ranks.run(training, 1, init=False, timeout=250)
    answers = demo_vlm.ask((tmp_path / "run/LATEST/model/consolidated").resolve(), paths[:100])
    assert sum(answer == digit for answer, digit in zip(answers, expected[:100], strict=True)) >= 50
