"""Writing the files of an export: every way of writing gives the same bytes, and they are durable."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automodel_ckpt.checkpoint import Manifest, discover
from automodel_ckpt.checkpoint.export import output
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.export.publish import check_target, staged
from automodel_ckpt.checkpoint.files.direct import SECTOR_BYTES, block_of
from automodel_ckpt.checkpoint.tensors.box_reader import boxes
from automodel_ckpt.convert.publishing import published_directory
from automodel_ckpt.errors import RecipeError, SaveFailed
from tests.support.models import tiny
from tests.support.models.shards import cut, write_checkpoint

Patch = pytest.MonkeyPatch
HEADER = b"header"


def memory_of(data: bytes, at: int) -> memoryview:
    """*data* in memory at the same offset within a sector as byte *at* of a file."""
    skip = at % SECTOR_BYTES
    block = block_of(skip + len(data) or 1)
    block[skip : skip + len(data)] = data
    return block[skip : skip + len(data)]


@pytest.mark.parametrize("at", [0, 1, SECTOR_BYTES - 1, SECTOR_BYTES, 3 * SECTOR_BYTES + 7])
@pytest.mark.parametrize("nbytes", [0, 1, SECTOR_BYTES - 1, SECTOR_BYTES, 5 * SECTOR_BYTES + 100])
@pytest.mark.parametrize("way", ["direct", "rejected", "short", "cached"])
def test_bytes_are_written_where_they_belong_whichever_way_they_take(
    tmp_path: Path, monkeypatch: Patch, at: int, nbytes: int, way: str
) -> None:
    monkeypatch.setattr(output, "DIRECT_FROM_BYTES", 1 if way != "cached" else 1 << 40)
    size = 16 * SECTOR_BYTES
    descriptor = output.create_output(tmp_path / "file", HEADER, size)
    data = random.Random(at + nbytes).randbytes(nbytes)
    file = output.Output(tmp_path / "file")
    if way in ("rejected", "short"):
        pwrite = os.pwrite

        def limited(target: int, part: Any, where: int) -> int:
            if target == file._direct and way == "rejected":
                raise OSError(errno.EINVAL, "Invalid argument")
            if target == file._direct:
                return pwrite(target, part[:SECTOR_BYTES], where)
            return pwrite(target, part[:1000], where)

        monkeypatch.setattr(os, "pwrite", limited)
    file.write(memory_of(data, at), at)
    file.close()
    os.close(descriptor)
    expected = bytearray(size)
    expected[: len(HEADER)] = HEADER
    expected[at : at + nbytes] = data
    assert (tmp_path / "file").read_bytes() == expected


def test_the_space_of_a_file_is_reserved_before_anything_is_copied(tmp_path: Path) -> None:
    descriptor = output.create_output(tmp_path / "file", HEADER, 1 << 20)
    os.close(descriptor)
    status = (tmp_path / "file").stat()
    assert status.st_size == 1 << 20 and status.st_blocks * 512 >= 1 << 20
    with pytest.raises(FileExistsError):
        output.create_output(tmp_path / "file", HEADER, 1 << 20)


def test_every_file_of_an_export_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    tensors = {"a": torch.randn(6, 4), "b": torch.ones(3)}
    pieces = [piece for name, value in tensors.items() for piece in cut(name, value, 2)]
    write_checkpoint(tmp_path / "c", tensors, pieces)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Any, target: Any, **more: Any) -> None:
        if Path(target).name == "consolidated":
            events.append("renamed")
        rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    report = consolidate(tmp_path / "c")
    before = {*events[: events.index("renamed")]}
    written = {path.name for path in report.output.iterdir() if path.is_file()}
    assert any(name.endswith(".safetensors") for name in written)
    assert written <= before
    assert report.output.parent.name in events[events.index("renamed") :]


def test_a_model_that_needs_no_export_is_reported_with_its_numbers(tmp_path: Path) -> None:
    saver = tiny.checkpointer(tmp_path, model_layout="hf")
    saver.save(discover(tiny.recipe()), step=1, epoch=0)
    saver.close()
    checkpoint = tmp_path / "epoch_0_step_1"
    lines: list[str] = []
    started = time.monotonic()
    report = consolidate(checkpoint, log=lines.append)
    assert 0 <= report.seconds <= time.monotonic() - started
    tensors = Manifest.read(checkpoint).trees["model"].tensors
    assert report.num_tensors == len(tensors) > 1
    assert report.num_files == len({tensor.slices[0].file for tensor in tensors.values()})
    assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values()) > 0
    assert report.output == checkpoint / "model" and report.checked
    assert "nothing to do" in lines[-1] and not (report.output / "consolidated").exists()


@pytest.mark.parametrize(
    "shape",
    [(), (0,), (5,), (3, 0, 4), (300_000,), (2, 3, 4), (3, 262_144), (2, 300_001), (7, 5, 70_000)],
)
def test_boxes_tile_a_tensor_in_row_major_order_and_are_not_larger_than_a_block(
    shape: tuple[int, ...],
) -> None:
    found = list(boxes(shape))
    assert all(box.numel <= 256 << 10 for box in found)
    assert sum(box.numel for box in found) == math.prod(shape)
    if math.prod(shape) > 1:
        numbers = np.arange(math.prod(shape)).reshape(shape)
        parts = [numbers[box.within(whole_box(shape))].reshape(-1) for box in found]
        assert np.array_equal(np.concatenate(parts), numbers.reshape(-1))
    # Neighbors that fit into one block together are one box, unless a row ends between them.
    for one, other in itertools.pairwise(found):
        assert one.offsets != other.offsets


def whole_box(shape: tuple[int, ...]) -> Any:
    from automodel_ckpt.checkpoint.parts.slices import Box

    return Box((0,) * len(shape), shape)


def test_a_target_with_many_files_is_refused_without_listing_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the root of a file system."""
    for number in range(7):
        (tmp_path / f"file_{number}").touch()
    (tmp_path / "directory").mkdir()
    visited = []
    walk = os.walk

    def counting(directory: Path, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(directory, **options):
            visited.append(found[0])
            yield found

    monkeypatch.setattr(os, "walk", counting)
    with pytest.raises(SaveFailed, match="no export made") as failed:
        check_target(tmp_path)
    assert "'file_4'" in str(failed.value) and "'file_5'" not in str(failed.value)
    assert visited == [str(tmp_path)]


def test_a_directory_without_permission_is_no_full_disk(tmp_path: Path) -> None:
    target = tmp_path / "export"
    for publishing in (
        lambda: staged(target, print),
        lambda: published_directory(target, print, what="the model"),
    ):
        for code, hint in ((errno.EACCES, "permissions"), (errno.ENOSPC, "free space")):
            with pytest.raises(SaveFailed) as caught, publishing():
                raise OSError(code, os.strerror(code), str(target))
            (problem,) = caught.value.problems
            other = {"permissions", "free space"} - {hint}
            assert hint in problem.hint and other.pop() not in problem.hint


@pytest.mark.parametrize("number", [0, -1, 10**8])
def test_numbers_of_workers_have_limits(number: int) -> None:
    for name in ("num_procs", "num_threads"):
        with pytest.raises(RecipeError, match="from 1 to 1024"):
            consolidate("missing", **{name: number})
