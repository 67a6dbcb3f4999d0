"""Matching the attributes of a recipe to those of a checkpoint, and choosing the file of this rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny


def test_what_is_on_one_side_only_or_of_another_kind_is_listed(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.recipe(gone=tiny.Counter(1), kind=torch.nn.Linear(1, 1)))
    other = tiny.recipe(1, new=tiny.Counter(), kind=tiny.Counter())
    with pytest.raises(
        CheckpointUnusable, match=r"allow_missing_state '\[gone, kind, new\]'"
    ) as caught:
        tiny.load(tmp_path, other)
    for line in (
        "+ new: here, but not saved",
        "~ kind: saved as module, here object",
        "- gone: saved, but not here",
    ):
        assert line in str(caught.value)
    assert tiny.load(tmp_path, other, allow_missing_state=["gone", "kind", "new"]) is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    ],
    ids=["StepLR", "ExponentialLR", "LambdaLR", "OneCycleLR"],
)
def test_a_schedule_of_another_kind_is_an_error_or_keeps_its_own_state(
    tmp_path: Path, make: Any
) -> None:
    saved = tiny.recipe()
    tiny.train(saved)
    tiny.save(tmp_path, saved)
    other = tiny.recipe(1)
    other.lr_scheduler = make(other.optimizer)
    before = other.lr_scheduler.state_dict()
    with pytest.raises(
        CheckpointUnusable, match=r"another kind[\s\S]*saved with gamma, milestones; "
    ):
        tiny.load(tmp_path, other)
    resumed = tiny.load(tmp_path, other, allow_missing_state=["lr_scheduler"])
    assert resumed is not None and resumed.loaded == {"model", "optimizer"}
    assert other.lr_scheduler.state_dict() == before
    assert torch.equal(other.model.embed, saved.model.embed)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_schedule_on_one_side_only_is_an_error_or_left_out(
    tmp_path: Path, is_saved: bool
) -> None:
    saved, other = tiny.recipe(), tiny.recipe(1)
    tiny.train(saved)
    without = other if is_saved else saved
    del without.lr_scheduler
    # The schedule has added it.
    del without.optimizer.param_groups[0]["initial_lr"]
    tiny.save(tmp_path, saved)
    with pytest.raises(CheckpointUnusable, match=r"allow_missing_state '\[lr_scheduler\]'"):
        tiny.load(tmp_path, other)
    resumed = tiny.load(tmp_path, other, allow_missing_state=["lr_scheduler"])
    assert resumed is not None and resumed.loaded >= {"model", "optimizer"}
    moments, loaded = tiny.tensors_of(saved), tiny.tensors_of(other)
    assert all(torch.equal(loaded[name], moments[name]) for name in moments)
