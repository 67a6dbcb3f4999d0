"""Matching the attributes of a recipe to those of a checkpoint, and choosing the file of this rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.state.param_groups import other_kind
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


def test_schedules_are_told_apart_by_the_settings_of_their_classes() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    class Own(torch.optim.lr_scheduler.StepLR):
        """With a setting that an earlier version of it did not have."""

        added = 1

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"added": 1}

    state = schedule.state_dict()
    position = {"last_epoch": 3, "base_lrs": [0.1], "_step_count": 4, "verbose": False}
    assert other_kind(state, schedule) is None and other_kind(position, schedule) is None
    assert other_kind(state, Own(optimizer, 2)) is None
    assert "saved with removed" in str(other_kind(position | {"removed": 1}, Own(optimizer, 2)))
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), schedule]
    sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
    assert other_kind(sequence.state_dict(), sequence) is None
    assert other_kind(sequence.state_dict(), schedule) is not None
    assert other_kind(state, sequence) is not None
