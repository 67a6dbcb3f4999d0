"""Exports that other processes, damaged disks and killed runs interfere with, and the division into files."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from automodel_ckpt.base.durable_io import owned
from automodel_ckpt.checkpoint.export import consolidate as export_output
from automodel_ckpt.checkpoint.export import files as export_publish
from automodel_ckpt.checkpoint.export import plan as export_plan
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.files import clear_leftovers
from automodel_ckpt.checkpoint.files.layout import LOCK_FILE
from automodel_ckpt.checkpoint.jobs.writer import Export, SharedMemory
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.sources.source import BaseMaps
from automodel_ckpt.errors import CheckpointUnusable, LeaseLost, SaveFailed
from tests.support.models.shards import write_checkpoint
from tests.unit.checkpoint.export.test_consolidate import consolidated_once, loaded, pieces_of

GB = 10**9


def test_without_a_base_files_are_split_by_size() -> None:
    tensors = {
        name: Tensor(name, "U8", (n,), (Slice(name, "U8", (0,), (n,), "f", 0, n),))
        for name, n in (("a", 3 * GB), ("b", 2 * GB), ("c", 1), ("d", 25 * GB), ("e", 1))
    }
    plan = export_plan.make_plan(tensors, {}, BaseMaps())
    assert [[t.fqn for t in file.tensors] for file in plan.files] == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
    ]
    assert plan.files[0].name == "model-00001-of-00004.safetensors"


@pytest.mark.parametrize("exchange", [True, False])
def test_an_earlier_export_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    output = consolidated_once(tmp_path)
    if not exchange:
        monkeypatch.setattr(export_publish.commit, "exchange", lambda *_: False)
    said: list[str] = []
    inode = output.stat().st_ino
    report = consolidate(tmp_path / "c", log=said.append)
    assert report.output == output and 0 < report.seconds < 100
    assert output.stat().st_ino != inode and len(loaded(output)) == 1
    assert any("for a moment" in line for line in said) is not exchange
    assert not [path for path in output.parent.iterdir() if path.name.startswith(".consolidated")]


def test_what_killed_exports_left_is_cleared_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    output = consolidated_once(tmp_path)
    left, used = (output.parent / f".consolidated.staging-{digit * 32}" for digit in "ab")
    left.mkdir()
    (left / "model-00001-of-00001.safetensors").write_bytes(b"half")
    used.mkdir()
    os.rename(output, output.parent / f".consolidated.previous-{'c' * 32}")
    with owned(used):
        consolidate(tmp_path / "c", log=lambda _: None)
        assert used.exists() and not left.exists()
    assert len(loaded(output)) == 1
    assert sorted(p.name for p in output.parent.iterdir() if p.name.startswith(".")) == [used.name]


def test_an_export_that_starts_while_another_one_is_replacing_its_target_leaves_both_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = consolidated_once(tmp_path)
    inode = output.stat().st_ino
    age_all(output, 3600)
    seen: list[bool] = []
    rename = os.rename

    def renamed(source: Path, target: Path) -> None:
        if Path(target) == output:
            # What another process does first, between the two renames of this one.
            clear_leftovers(output, lambda _: None)
            seen.append(output.exists())
        rename(source, target)

    monkeypatch.setattr(export_publish.commit, "exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", renamed)
    consolidate(tmp_path / "c", log=lambda _: None)
    assert seen == [False]
    assert output.stat().st_ino != inode and len(loaded(output)) == 1
    assert [path.name for path in output.parent.iterdir() if path.name.startswith(".con")] == []


def test_an_export_that_another_node_is_replacing_is_restored_when_it_took_over_a_minute(
    tmp_path: Path,
) -> None:
    output = consolidated_once(tmp_path)
    # The digits of another boot and process namespace; the 13th digit marks them as such.
    aside = output.parent / f".consolidated.previous-012345670123f567{'0' * 16}"
    os.rename(output, aside)
    clear_leftovers(output, lambda _: None)
    assert aside.is_dir() and not output.exists()
    age_all(aside, 61)
    clear_leftovers(output, lambda _: None)
    assert not aside.exists() and len(loaded(output)) == 1


def age_all(directory: Path, seconds: float) -> None:
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_that_lost_its_lease_publishes_no_export(tmp_path: Path) -> None:
    output = consolidated_once(tmp_path)
    before = output.stat().st_ino
    record = {"host": "h", "boot_id": "b", "pid": 1, "command": "c", "beat": 1, "token": "theirs"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(record))
    with pytest.raises(LeaseLost, match="another run has taken over"):
        Export([str(tmp_path / "c")], (tmp_path / LOCK_FILE, "ours")).run(SharedMemory(-1))
    assert output.stat().st_ino == before
    assert [
        path.name for path in output.parent.iterdir() if path.name.startswith(".consolidated")
    ] == []
    with pytest.raises(LeaseLost, match="was removed"):
        Export([str(tmp_path / "c")], (tmp_path / "gone", "ours")).run(SharedMemory(-1))
    Export([str(tmp_path / "c")], (tmp_path / LOCK_FILE, "theirs")).run(SharedMemory(-1))
    assert output.stat().st_ino != before


def test_a_failure_while_writing_leaves_nothing_and_names_path_and_errno(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = consolidated_once(tmp_path)
    before = output.stat().st_ino

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_output.Output, "_put_cached", full)
    with pytest.raises(SaveFailed, match="ENOSPC") as caught:
        consolidate(tmp_path / "c")
    assert caught.value.problems[0].where.endswith("/model-00001-of-00001.safetensors")
    assert output.stat().st_ino == before
    assert not [path for path in output.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_slice_that_changes_under_the_copy_is_named_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """The file is sound when it is looked at again: what counts is what was read."""
    preadv = os.preadv

    def flips(descriptor: int, buffers: list[memoryview], start: int, *flags: int) -> int:
        count = preadv(descriptor, buffers, start, *flags)
        if start > 3_000_000 and count > 5:
            buffers[0][5] ^= 1
        return count

    tensors = {"w": torch.randn(1_000_000)}
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors, 1))
    monkeypatch.setattr(os, "preadv", flips)
    monkeypatch.setattr("automodel_ckpt.checkpoint.export.consolidate.verify", lambda *_, **__: [])
    with pytest.raises(CheckpointUnusable, match="changed while it was read"):
        consolidate(tmp_path / "c", num_threads=num_threads)
    assert [path.name for path in (tmp_path / "c/model").iterdir()] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]
