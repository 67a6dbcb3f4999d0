"""Every external format is one entry in a list, and the first that recognizes a path opens it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.open import open_source, open_weights
from automodel_ckpt.convert.sources.registry import DCP, FORMATS, detect, formats_in
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.external_tensors import no_parameters
from tests.support.shards import checkpoint_in, cut, write_checkpoint

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


def test_an_adapter_of_another_program_is_imported_before_it_is_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = str(saved(tmp_path / "adapter", "adapter_model.safetensors"))
    for options in ([], ["--merge"], ["--to", "torch"]):
        assert main(["export", adapter, "-o", str(tmp_path / "out"), *options]) == 3
        message = capsys.readouterr().err
        assert "adapter" in message.splitlines()[0]
        assert "ckpt import DIR RUN" in message
    assert not (tmp_path / "out").exists()


def test_a_model_beside_an_adapter_is_reported_as_not_imported(tmp_path: Path) -> None:
    """torchtune saves the merged model and the adapter in one directory."""
    saved(tmp_path, "adapter_model.safetensors")
    assert open_weights(tmp_path).omitted == ()
    saved(tmp_path, "model.safetensors")
    (text,) = open_weights(tmp_path).omitted
    assert "model.safetensors" in text


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_prefixes_of_wrappers_are_removed_from_all_names(tmp_path: Path, name: str) -> None:
    """accelerate and torch.compile save ``_orig_mod.`` before each name, DistributedDataParallel ``module.``."""
    tensors = {f"module._orig_mod.{key}": torch.full((2,), float(key)) for key in "12"}
    save_file(tensors, tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        found = open_weights(path).modules["model"].tensors
        assert sorted(found) == ["1", "2"]
        assert [stored.fqn for stored in found["1"].slices] == ["1"]
    # Part of the names: they are the model's.
    save_file({**tensors, "module.head": torch.ones(1)}, tmp_path / name)
    assert "_orig_mod.1" in open_weights(tmp_path / name).modules["model"].tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("key", ["", "model"])
def test_prefixes_of_wrappers_are_removed_from_the_names_in_a_dcp_directory(
    tmp_path: Path, key: str
) -> None:
    """Scripts save ``model.state_dict()`` of a model that torch.compile or DistributedDataParallel wraps."""
    model = torch.nn.Linear(2, 3)
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    names = list(wrapped)
    optimizer = {
        "state": {name: {"exp_avg": torch.ones_like(wrapped[name])} for name in names},
        "param_groups": [{"params": names, "lr": 0.5}],
    }
    directory = tmp_path / "saved"
    state = {key: wrapped, "optimizer": optimizer} if key else wrapped
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    found = open_weights(directory).modules["model"].tensors
    assert sorted(found) == ["bias", "weight"]
    if key:
        training = detect(directory).training_state(directory, no_parameters)
        assert training is not None and training.optimizer is not None
        assert sorted(training.optimizer.tensors) == ["bias", "weight"]


def test_an_export_of_a_model_that_wraps_another_one_keeps_its_names(tmp_path: Path) -> None:
    """The user's model may store another one in an attribute that is called like a wrapper's."""
    tensors = {"module.w": torch.ones(4, 3)}
    checkpoint = tmp_path / "epoch_0_step_20"
    write_checkpoint(checkpoint, tensors, cut("module.w", tensors["module.w"], 2), step=20)
    consolidate(checkpoint)
    found = open_weights(checkpoint / "model" / "consolidated").modules["model"].tensors
    assert sorted(found) == ["module.w"]


def test_a_checkpoint_without_its_manifest_is_opened_as_shards(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    described = open_source(checkpoint)
    (checkpoint / "MANIFEST.json").unlink()
    bare = open_source(checkpoint)
    assert bare.tensors.keys() == described.tensors.keys()
    assert described.has_digests and not bare.has_digests
    with pytest.raises(CheckpointUnusable, match="not a checkpoint"):
        consolidate(checkpoint)
