"""Ranks' files of DeepSpeed that an attacker wrote: nothing in them is executed, and reading stays cheap."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch

from automodel_ckpt.cli import ckpt


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
