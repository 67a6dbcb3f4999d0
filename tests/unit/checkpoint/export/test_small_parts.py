"""Small functions that readers and writers of checkpoints share, at their boundaries."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.export.export_manifest import (
    DigestedRange,
    ExportManifest,
    ListedFile,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import digest_of
from automodel_ckpt.checkpoint.jobs import reuse
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.sources.source import open_checkpoint
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models.shards import cut, write_checkpoint

# ---------------------------------------------------------------- records and indexes


# ---------------------------------------------------------------- exports and slices


def ranged(*sizes: int) -> ExportManifest:
    """An export of one file whose digests are those of ranges of so many bytes."""
    ranges = []
    start = 0
    for size in sizes:
        ranges.append(DigestedRange(start, size, digest_of(b"")))
        start += size
    return ExportManifest(Path("export"), {"m": ListedFile(start, tuple(ranges))})


def tensor_at(start: int, nbytes: int) -> Tensor:
    piece = Slice("w", "U8", (0,), (nbytes,), "m", start, nbytes, None)
    return Tensor("w", "U8", (nbytes,), (piece,))


def test_a_tensor_is_divided_at_the_byte_ranges_that_have_digests() -> None:
    divided = ranged(8, 4, 0, 6, 2).with_digests("m", tensor_at(8, 10))
    assert [(piece.start, piece.nbytes) for piece in divided.slices] == [(8, 4), (12, 6)]
    assert [piece.offsets for piece in divided.slices] == [(0,), (4,)]
    empty = tensor_at(8, 0)
    assert ranged(8, 4).with_digests("m", empty) == empty


@pytest.mark.parametrize(("start", "nbytes"), [(8, 9), (8, 11), (9, 9), (8, 3), (16, 10)])
def test_byte_ranges_that_do_not_end_where_a_tensor_ends_are_rejected(
    start: int, nbytes: int
) -> None:
    with pytest.raises(CheckpointUnusable):
        ranged(8, 4, 6, 2).with_digests("m", tensor_at(start, nbytes))


def test_every_file_of_an_export_that_is_missing_or_of_another_size_is_reported(
    tmp_path: Path,
) -> None:
    for name, text in (("a", "aa"), ("b", "bbb"), ("c", "c")):
        (tmp_path / name).write_text(text)
    record = {name: ListedFile(2, (DigestedRange(0, 2, digest_of(b"aa")),)) for name in "abcd"}
    problems = ExportManifest(tmp_path, record).problems(level="size")
    assert [Path(problem.where).name for problem in problems] == ["b", "c", "d"]
    only = ExportManifest(tmp_path, record).problems(level="size", only={"a", "c"})
    assert [Path(problem.where).name for problem in only] == ["c"]
    assert ExportManifest(tmp_path, record).problems(level="none") == []
    assert ExportManifest(tmp_path, record).problems(only={"a"}) == []


def test_a_link_in_an_export_is_damage_except_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("aa")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "a").symlink_to(tmp_path / "blobs" / "1")
    files = {"a": ListedFile(2, (DigestedRange(0, 2, digest_of(b"aa")),))}
    assert ExportManifest(tmp_path / "export", files, follow_links=True).problems() == []
    (problem,) = ExportManifest(tmp_path / "export", files).problems()
    assert "not a regular file" in problem.what and problem.where == str(tmp_path / "export" / "a")
    (tmp_path / "blobs" / "1").write_text("ab")
    (problem,) = ExportManifest(tmp_path / "export", files, follow_links=True).problems()
    assert "its digest does not match" in problem.what


# ---------------------------------------------------------------- checkpoints that changed


def checkpoint_in(directory: Path, value: float = 1.0) -> Path:
    tensors = {"w": torch.full((6, 10), value)}
    write_checkpoint(directory, tensors, cut("w", tensors["w"], 3), step=20)
    return directory


def test_a_directory_of_a_checkpoint_that_is_no_model_is_named_with_the_models(
    tmp_path: Path,
) -> None:
    path = checkpoint_in(tmp_path / "epoch_0_step_20")
    assert set(open_checkpoint(path).tensors) == {"w"}
    (path / "optim").mkdir()
    with pytest.raises(CheckpointUnusable, match="has no such model") as caught:
        open_checkpoint(path / "optim")
    assert "its modules: ['model']" in str(caught.value)


def test_an_adapter_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path / "epoch_0_step_20")
    manifest = Manifest.read(path)
    some_file = next(iter(manifest.files.values()))
    files = {**manifest.files, f"model/{layout.ADAPTER_CONFIG}": some_file}
    changed = dataclasses.replace(manifest, files=files)
    (path / layout.MANIFEST).write_bytes(changed.to_bytes())
    with pytest.raises(CheckpointUnusable, match="are not a complete model"):
        open_checkpoint(path)


def test_a_file_of_a_previous_checkpoint_with_another_slice_is_not_shared(tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path / "epoch_0_step_20")
    reusable = reuse.ReusableFiles.open(reuse.Previous(str(path)))
    assert reusable is not None
    (tensor,) = Manifest.read(path).trees["model"].tensors.values()
    piece = tensor.slices[0]
    changed = dataclasses.replace(piece, digest=digest_of(b"other"))
    record = reusable.record(piece.file)
    header = (path / piece.file).read_bytes()[: piece.start]
    assert reusable.same_file(piece.file, header, [piece]) == record
    assert reusable.same_file(piece.file, header[:-1] + b"x", [piece]) is None
    assert reusable.same_file(piece.file, header + b" ", [piece]) is None
    for slices in ([], [changed]):
        assert reusable.same_file(piece.file, header, slices) is None


def test_a_file_of_the_future_or_of_the_avoided_checkpoint_is_not_shared(tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path / "epoch_0_step_20")
    file = next(name for name in Manifest.read(path).files if name.endswith(".safetensors"))
    twin = tmp_path / "epoch_0_step_10"
    (twin / "model").mkdir(parents=True)
    os.link(path / file, twin / file)

    def record(avoid: Path | None) -> Any:
        previous = reuse.Previous(str(path), None if avoid is None else str(avoid))
        reusable = reuse.ReusableFiles.open(previous)
        assert reusable is not None
        return reusable.record(file)

    assert record(None) is not None and record(tmp_path / "elsewhere") is not None
    assert record(twin) is None
    status = (path / file).stat()
    for seconds, is_shared in ((3600, False), (-3600, True), (-90_000, False)):
        os.utime(path / file, (status.st_mtime + seconds,) * 2)
        assert (record(None) is not None) is is_shared
