"""`make demo` and `make demo-vlm` do what they say: the scripts check their own claims, and end with an error when one
does not hold."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.runs.training import EXPORT, train
from tests.support.servers.command_server import CommandServer, Starting
from tools import demo_vlm

ROOT = Path(__file__).parents[3]


@pytest.mark.further
@pytest.mark.timeout(300)
def test_the_demo_runs_to_its_end(
    tmp_path: Path,
    commands: CommandServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("DEMO_STEPS", "30")
    monkeypatch.chdir("/")
    monkeypatch.delitem(sys.modules, "tools.demo", raising=False)
    demo: Any = importlib.import_module("tools.demo")
    monkeypatch.setattr(demo, "subprocess", Starting(commands))
    demo.main()
    said = capfd.readouterr().out
    assert "all 30 steps agree in epoch, loss, grad_norm" in said
    assert "the exported weights are the same bytes" in said
    assert "transformers loaded the export" in said
    assert re.search(r"in this shell: source \S+/bin/activate\n", said)


@pytest.mark.further
@pytest.mark.timeout(300)
def test_the_demo_with_images_reads_digits_after_a_few_steps_already(
    tmp_path: Path, commands: CommandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_vlm, "RUNS", tmp_path)
    monkeypatch.setattr(demo_vlm, "subprocess", Starting(commands))
    short = [
        "--step_scheduler.max_steps=60",
        "--step_scheduler.ckpt_every_steps=null",
        "--validation_dataset=null",
        EXPORT,
    ]
    # First: a tokenizer is trained by threads, which do not survive the fork below.
    paths, expected = demo_vlm.write_scans(tmp_path / "scans")
    recipe = ROOT / demo_vlm.RECIPE
    training = partial(train, recipe, f"--checkpoint.checkpoint_dir={tmp_path}/run", *short)
    ranks.run(training, 1, init=False, timeout=250)
    answers = demo_vlm.ask((tmp_path / "run/LATEST/model/consolidated").resolve(), paths[:100])
    assert sum(answer == digit for answer, digit in zip(answers, expected[:100], strict=True)) >= 50
