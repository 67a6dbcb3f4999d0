"""Every external format is one entry in a list, and the first that recognizes a path opens it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.convert.open import open_source, open_weights
from automodel_ckpt.convert.sources.registry import DCP, FORMATS, detect, formats_in
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.shards import checkpoint_in

AUTOMODEL = Path(__file__).parents[2] / "fixtures" / "automodel"


def saved(directory: Path, name: str, metadata: dict[str, str] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({"w": torch.ones(2)}, directory / name, metadata)
    return directory


def test_each_format_has_a_name_of_its_own() -> None:
    names = [known.name for known in FORMATS]
    assert len(set(names)) == len(names) and all(names)


def test_the_first_format_in_the_list_that_recognizes_a_path_is_taken(tmp_path: Path) -> None:
    checkpoint = AUTOMODEL / "safetensors" / "epoch_0_step_1"
    whole = saved(tmp_path / "hf", "model.safetensors")
    megatron = saved(tmp_path / "megatron", "x.safetensors")
    (megatron / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (megatron / ".metadata").touch()
    archive = tmp_path / "archive.safetensors"
    torch.save({"w": torch.ones(2)}, archive)
    for path, name in (
        (checkpoint / "model", "safetensors shards"),
        (checkpoint / "optim", "PyTorch DCP"),
        (whole, "Hugging Face files"),
        (saved(tmp_path / "adapter", "adapter_model.safetensors"), "PEFT adapter"),
        (megatron, "a distributed checkpoint of Megatron-Core"),
        (whole / "model.safetensors", "a safetensors file"),
        (archive, "a file of torch.save"),
    ):
        known = detect(path)
        assert known is not None and known.name == name, path
    archive.unlink()
    assert detect(tmp_path) is None
    (tmp_path / "ranks" / "mp_rank_00").mkdir(parents=True)
    assert detect(tmp_path / "ranks") is not None
    assert detect(tmp_path / "ranks", readable_only=True) is None


def test_formats_are_found_in_a_directory_and_right_below_it(tmp_path: Path) -> None:
    checkpoint = AUTOMODEL / "safetensors" / "epoch_0_step_1"
    found = {name: known.name for name, known in formats_in(checkpoint).items()}
    assert found == {"model": "safetensors shards", "optim": "PyTorch DCP"}
    saved(tmp_path / "real", "model.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert list(formats_in(tmp_path)) == ["real"]


@pytest.mark.parametrize("form", ["safetensors", "torch_save"])
def test_a_model_is_described_alike_by_both_ways_to_open_it(form: str) -> None:
    checkpoint = AUTOMODEL / form / "epoch_0_step_1"
    source = open_source(checkpoint)
    module = open_weights(checkpoint).modules["model"]
    assert source.tensors == module.tensors and source.notes and not source.has_digests


def test_an_inventory_needs_the_metadata_only() -> None:
    optimizer = AUTOMODEL / "safetensors" / "epoch_0_step_1" / "optim"
    assert not list(optimizer.glob("*.distcp"))
    inventory = DCP.inventory(optimizer)
    assert inventory.tensors and inventory.num_values > 10


def test_data_files_without_their_metadata_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    for open_it in (open_source, open_weights):
        with pytest.raises(CheckpointUnusable, match=r"no \.metadata"):
            open_it(tmp_path)


def test_complete_files_of_another_program_need_no_consolidation(tmp_path: Path) -> None:
    whole = saved(tmp_path / "hf", "model.safetensors")
    with pytest.raises(CheckpointUnusable, match="need no consolidation"):
        consolidate(whole, tmp_path / "out", opener=open_source)


def test_a_checkpoint_without_its_manifest_is_opened_as_shards(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    described = open_source(checkpoint)
    (checkpoint / "MANIFEST.json").unlink()
    bare = open_source(checkpoint)
    assert bare.tensors.keys() == described.tensors.keys()
    assert described.has_digests and not bare.has_digests
    with pytest.raises(CheckpointUnusable, match="not a checkpoint"):
        consolidate(checkpoint)
