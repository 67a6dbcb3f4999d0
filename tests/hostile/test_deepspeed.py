"""Ranks' files of DeepSpeed that an attacker wrote: nothing in them is executed, and reading stays cheap."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import bombs, sandbox

from .test_torch_files import NAMES, content

FIXTURE = Path(__file__).parents[1] / "fixtures" / "deepspeed" / "stage2-float32"
TAG = "global_step3"
# HOSTILE=all (make hostile) runs every file; else every eighth.
CHOSEN = NAMES if bombs.EVERY else NAMES[2::8]


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize(
    "file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
def test_a_hostile_file_of_a_rank_is_an_error_and_does_no_harm(
    name: str, file: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    source = shutil.copytree(FIXTURE, run / "source")
    marker = tmp_path / "executed"
    (source / TAG / file).write_bytes(content(name, marker))
    outcome = sandbox.run(lambda: ckpt.main(["import", str(source), str(run / "imported")]), run)
    report = f"{outcome.text[-2000:]}\n{outcome}"[:3000]
    assert not outcome.violations and not marker.exists(), report
    assert os.listdir(tmp_path) == ["run"]
    assert outcome.code == 3 and "Traceback" not in outcome.text, report
    assert "this is a bug" not in outcome.text, report
    assert outcome.seconds < sandbox.SECONDS and outcome.extra_bytes < sandbox.EXTRA_BYTES, report


def test_hostile_objects_beside_the_weights_are_not_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch '{tmp_path / 'executed'}'",)

    tag = tmp_path / "tag"
    tag.mkdir()
    model = {
        "module": {"a": torch.ones(2)},
        "param_shapes": [{"a": torch.Size([2])}],
        "shared_params": {},
        "buffer_names": [],
        "lr_scheduler": Hostile(),
        "ds_version": "0",
    }
    optimizer = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.ones(2)],
        "loss_scaler": Hostile(),
    }
    for name, value in (
        ("mp_rank_00_model_states.pt", model),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": optimizer}),
    ):
        torch.save(value, tag / name, pickle_module=pickle)
    assert ckpt.main(["import", str(tag), str(tmp_path / "run")]) == 0
    assert not (tmp_path / "executed").exists()
