"""Matching the attributes of a recipe to those of a checkpoint, and choosing the file of this rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.files.digests import FileRecord
from automodel_ckpt.checkpoint.files.layout import DataParallelRanks
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.parts.manifest import NOT_SAVED, Manifest, StateRecord
from automodel_ckpt.checkpoint.saving.save import SaveReport, json_values
from automodel_ckpt.checkpoint.state.loading import Loader
from automodel_ckpt.checkpoint.state.param_groups import other_kind
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny


def manifest_of(
    state: dict[str, StateRecord], files: dict[str, str] | None = None, **changed: Any
) -> Manifest:
    records = {path: FileRecord(1, digest) for path, digest in (files or {}).items()}
    manifest = Manifest(
        step=7,
        epoch=0,
        created=1.0,
        world_size=2,
        dp_size=2,
        progress={},
        losses={},
        validated=False,
        environment={},
        lineage={},
        state=state,
        trees={},
        files=records,
    )
    return dataclasses.replace(manifest, **changed)


def loader_of(
    manifest: Manifest, *, rank: int = 0, world_size: int = 2, allowed: tuple[str, ...] = ()
) -> Loader:
    ranks = DataParallelRanks(rank, world_size)
    return Loader(Path("checkpoint"), manifest, ranks, frozenset(allowed))


def test_what_is_on_one_side_only_or_of_another_kind_is_listed() -> None:
    saved = {
        "model": StateRecord("module", "replicated", "model/"),
        "gone": StateRecord("object", "replicated", "gone", ("gone.pt",)),
        "kind": StateRecord("module", "replicated", "kind/"),
        "optimizer": StateRecord("optimizer", NOT_SAVED, "optim/"),
        "old name": StateRecord("object", "replicated", "old", ("old.pt",), ("renamed",)),
    }
    items = classify(
        {
            "model": torch.nn.Linear(1, 1),
            "new": tiny.Counter(),
            "kind": tiny.Counter(),
            "renamed": tiny.Counter(),
        }
    )
    matched, lines = loader_of(manifest_of(saved))._matched(items)
    assert {name: saved_name for name, (saved_name, _) in matched.items()} == {
        "model": "model",
        "renamed": "old name",
    }
    assert lines == [
        "+ new: here, but not saved",
        "~ kind: saved as module, here object",
        "- gone: saved, but not here",
    ]
    with pytest.raises(CheckpointUnusable, match=r"allow_missing_state '\[gone, kind, new\]'"):
        loader_of(manifest_of(saved))._match(items)
    allowing = loader_of(manifest_of(saved), allowed=("new", "kind", "gone"))
    assert allowing._match(items).keys() == matched.keys()
    assert allowing._absent == {
        "gone": "object",
        "kind": "object",
        "new": "object",
        "optimizer": "optimizer",
    }


FILES = {"x/x_dp_rank_0.pt": "a", "x/x_dp_rank_1.pt": "b"}


@pytest.mark.parametrize(
    ("scope", "files", "rank", "world_size", "expected"),
    [
        ("dp_rank", FILES, 0, 2, "x/x_dp_rank_0.pt"),
        ("dp_rank", FILES, 1, 2, "x/x_dp_rank_1.pt"),
        # Another number of ranks: only state that all ranks share can be taken.
        ("dp_rank", FILES, 0, 1, None),
        ("dp_rank", dict.fromkeys(FILES, "a"), 0, 1, "x/x_dp_rank_0.pt"),
        ("rank_rng", dict.fromkeys(FILES, "a"), 0, 1, None),
        ("rank_rng", FILES, 1, 2, "x/x_dp_rank_1.pt"),
        ("dp_rank", {"x/x_dp_rank_0.pt": "a"}, 1, 2, None),
        ("replicated", {"x.pt": "a"}, 1, 2, "x.pt"),
        ("replicated", {"x.pt": "a"}, 3, 4, "x.pt"),
    ],
)
def test_the_file_of_a_rank_is_its_own_or_one_that_all_ranks_share(
    scope: str, files: dict[str, str], rank: int, world_size: int, expected: str | None
) -> None:
    record = StateRecord("object", scope, "x", tuple(files))
    loader = loader_of(manifest_of({"x": record}, files), rank=rank, world_size=world_size)
    assert loader._name_of(record, files) == expected


def test_another_data_parallel_size_is_another_number_of_ranks() -> None:
    record = StateRecord("object", "dp_rank", "x", tuple(FILES))
    manifest = manifest_of({"x": record}, FILES, dp_size=1)
    assert loader_of(manifest)._name_of(record, FILES) is None


def test_state_of_each_rank_is_recomputed_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Derived(tiny.Counter):
        def derive(self, step: int) -> None:
            self.value = ("derived", step)

    record = StateRecord("object", "dp_rank", "x", tuple(FILES))
    for world_size, said in (
        (1, "The number of ranks changed"),
        (2, "The data-parallel size changed"),
    ):
        caplog.clear()
        manifest = manifest_of({"x": record}, FILES, dp_size=1)
        derived = Derived()
        (item,) = classify({"x": derived})
        loader_of(manifest, world_size=world_size)._load_object(item, record)
        assert derived.value == ("derived", 7) and said in caplog.text
    caplog.clear()
    loader_of(manifest, rank=1)._load_object(item, record)
    assert caplog.text == ""
    plain = tiny.Counter("kept")
    (item,) = classify({"x": plain})
    with pytest.raises(CheckpointUnusable, match="saved by 2 ranks, each with its own state"):
        loader_of(manifest)._load_object(item, record)
    loader_of(manifest, allowed=("x",))._load_object(item, record)
    assert plain.value == "kept"


def test_speed_and_values_of_a_report_can_be_written_as_json() -> None:
    report = SaveReport(Path("x"), 1, 0.5, total_seconds=2.0, nbytes=10)
    assert report.bytes_per_second == 5
    assert dataclasses.replace(report, total_seconds=0.0).bytes_per_second == 0
    values = {"nan": float("nan"), "inf": float("inf"), "one": 1.0, "text": "nan", "count": 3}
    assert json_values(values) == {
        "nan": "nan",
        "inf": "inf",
        "one": 1.0,
        "text": "nan",
        "count": 3,
    }


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
