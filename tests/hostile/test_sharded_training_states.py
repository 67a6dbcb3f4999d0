"""Optimizer and counter files beside sharded models that an attacker wrote: nothing in them is executed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import bombs, sandbox

from .test_torch_files import NAMES, content

FIXTURES = Path(__file__).parents[1] / "fixtures"
# The checkpoint, and a file of torch.save in it that only --training-state reads. Numbered optimizers also need the
# model, which imports transformers: test_training_import.py has damaged ones.
FILES = (("automodel/run/epoch_0_step_4", "step_scheduler.pt"),)
# HOSTILE=all (make hostile) runs every file; else every twelfth.
CHOSEN = NAMES if bombs.EVERY else NAMES[1::12]


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize(("fixture", "file"), FILES)
def test_a_hostile_file_of_a_training_state_does_no_harm(
    name: str, fixture: str, file: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    source = shutil.copytree(FIXTURES / fixture, run / "source")
    marker = tmp_path / "executed"
    (source / file).write_bytes(content(name, marker))
    # Reads everything, and writes nothing.
    command = ["import", str(source), str(run / "imported"), "--training-state", "--dry-run"]
    outcome = sandbox.run(lambda: ckpt.main(command), run)
    report = f"{outcome.text[-2000:]}\n{outcome}"[:3000]
    assert not outcome.violations and not marker.exists(), report
    assert os.listdir(tmp_path) == ["run"]
    # A mapping of other values is no error: what it has is left out.
    assert outcome.code in (0, 3) and "Traceback" not in outcome.text, report
    assert "this is a bug" not in outcome.text, report
    assert outcome.seconds < sandbox.SECONDS and outcome.extra_bytes < sandbox.EXTRA_BYTES, report
