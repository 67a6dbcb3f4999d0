"""Small functions that readers and writers of checkpoints share, at their boundaries."""

import dataclasses
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.export.export_manifest import DigestedRange, ExportManifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.sources.source import open_checkpoint
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models.shards import cut, write_checkpoint

# ---------------------------------------------------------------- exports and slices


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


def test_a_link_in_an_export_is_damage_except_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("aa")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "a").symlink_to(tmp_path / "blobs" / "1")
    files = {"a": (DigestedRange(0, 2, digest_of(b"aa")),)}
    assert ExportManifest(tmp_path / "export", files, follow_links=True).problems() == []
    (problem,) = ExportManifest(tmp_path / "export", files).problems()
    assert "not a regular file" in problem.what and problem.where == str(tmp_path / "export" / "a")
    (tmp_path / "blobs" / "1").write_text("ab")
    (problem,) = ExportManifest(tmp_path / "export", files, follow_links=True).problems()
    assert "its digest does not match" in problem.what
