"""Every external format is one entry in a list, and the first that recognizes a path opens it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from automodel_ckpt.cli.ckpt import main
from tests.support.external_tensors import described, error_of, training_state_of, values
from tests.support.models.shards import checkpoint_in

AUTOMODEL = Path(__file__).parents[3] / "fixtures" / "automodel"


def saved(directory: Path, name: str, metadata: dict[str, str] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({"w": torch.ones(2)}, directory / name, metadata)
    return directory


def test_formats_are_found_in_a_directory_and_right_below_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def formats_in(directory: Path) -> dict[str, str]:
        assert main(["show", str(directory), "--json"]) == 0
        trees = json.loads(capsys.readouterr().out)["trees"]
        return {name: tree["format"] for name, tree in trees.items()}

    checkpoint = AUTOMODEL / "safetensors" / "epoch_0_step_1"
    assert formats_in(checkpoint) == {"model": "safetensors shards", "optim": "PyTorch DCP"}
    saved(tmp_path / "real", "model.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert list(formats_in(tmp_path)) == ["real"]


def test_data_files_without_their_metadata_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    assert ".metadata cannot be read" in error_of(tmp_path)


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
    assert described(tmp_path).omitted == ()
    saved(tmp_path, "model.safetensors")
    (text,) = described(tmp_path).omitted
    assert "model.safetensors" in text


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_prefixes_of_wrappers_are_removed_from_all_names(tmp_path: Path, name: str) -> None:
    """accelerate and torch.compile save ``_orig_mod.`` before each name, DistributedDataParallel ``module.``."""
    tensors = {f"module._orig_mod.{key}": torch.full((2,), float(key)) for key in "12"}
    save_file(tensors, tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        found = described(path).tensors
        assert sorted(found) == ["1", "2"]
        assert [stored.fqn for stored in found["1"].slices] == ["1"]
    # A model can have an attribute with the name of one wrapper, and none with those of PyTorch's others.
    save_file({**tensors, "head": torch.ones(1)}, tmp_path / name)
    found = described(tmp_path / name).tensors
    assert sorted(found) == ["head", "module.1", "module.2"]
    # Any number of them, in a hostile file.
    save_file({f"{'module.' * 5000}w": torch.ones(1)}, tmp_path / name)
    assert sorted(described(tmp_path / name).tensors) == ["w"]
    # Both names of one tensor would be the same.
    save_file({"_orig_mod.w": torch.ones(1), "w": torch.ones(1)}, tmp_path / name)
    assert sorted(described(tmp_path / name).tensors) == ["_orig_mod.w", "w"]


Nested = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
NESTED: dict[str, Nested] = {
    "app": lambda model, optimizer: {"app": {"model": model, "optim": optimizer}},
    "state.model": lambda model, optimizer: {"state": {"model": model, "optimizer": optimizer}},
    "model_state": lambda model, optimizer: {"model_state": model, "optimizer_state": optimizer},
    "model.state_dict": lambda model, optimizer: {
        "model": {"state_dict": model},
        "optimizer": optimizer,
    },
    "net": lambda model, optimizer: {"net": model, "optimizer": optimizer, "epoch": 3},
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", NESTED)
@pytest.mark.parametrize("is_dcp", [True, False])
def test_a_model_is_found_below_any_keys_and_between_wrappers(
    tmp_path: Path, layout: str, is_dcp: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers that were compiled one by one have ``_orig_mod`` in the middle of their names."""
    names = ["layers.0.weight", "layers.0.bias", "norm.weight"]
    wrapped = [name.replace("0.", "0._orig_mod._checkpoint_wrapped_module.") for name in names]
    model = {name: torch.full((2, 3), float(place)) for place, name in enumerate(wrapped)}
    optimizer = {
        "state": {name: {"exp_avg": torch.ones(2, 3), "step": 5} for name in wrapped},
        "param_groups": [{"params": wrapped, "lr": 0.5}],
    }
    path = tmp_path / "saved"
    state = NESTED[layout](model, optimizer)
    if is_dcp:
        dcp.save(state, checkpoint_id=path, no_dist=True)
    else:
        path = path.with_suffix(".pt")
        torch.save(state, path)
    found = values(path)
    assert list(found) == names
    assert found["norm.weight"].tolist() == [[2.0] * 3] * 2
    if is_dcp:
        assert sorted(training_state_of(path).optimizer.tensors) == sorted(names)
    else:
        assert main(["import", str(path), str(tmp_path / "run"), "--training-state"]) == 3
        assert "training state" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("key", ["", "policy"])
@pytest.mark.parametrize("is_dcp", [True, False])
def test_what_is_saved_with_several_models_is_never_taken_for_the_only_one(
    tmp_path: Path, key: str, is_dcp: bool
) -> None:
    """One of two models would be used without a word, or the state of an optimizer would be a weight."""
    policy = {"model": {"weight": torch.ones(2, 3)}}
    state = {
        **(policy if not key else {key: policy}),
        "value": {"head": torch.ones(2)},
        "optimizer": {
            "state": {"weight": {"exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"params": ["weight"], "lr": 0.5}],
        },
        "dataloader": {"order": torch.arange(3)},
        "lr_scheduler": {"last": torch.ones(())},
    }
    if is_dcp:
        path = tmp_path / "saved"
        dcp.save(state, checkpoint_id=path, no_dist=True)
    else:
        path = tmp_path / "saved.pt"
        torch.save({name: state[name] for name in state if name[:2] not in ("da", "lr")}, path)
    found = sorted(described(path).tensors)
    assert found == (["policy.model.weight", "value.head"] if key else ["weight"])


def test_a_file_that_the_numbers_of_the_others_imply_must_be_there(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file(
            {f"w{number}": torch.ones(1)}, tmp_path / f"model-0000{number}-of-00003.safetensors"
        )
    text = error_of(tmp_path)
    assert "a file of weights is missing" in text and "model-00002-of-00003.safetensors" in text
    save_file({"w2": torch.ones(1)}, tmp_path / "model-00002-of-00003.safetensors")
    assert sorted(described(tmp_path).tensors) == ["w1", "w2", "w3"]


def test_tensors_that_only_the_index_has_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index may list a tied name, which has no tensor, so that this is no error."""
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(("w", "v"), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["import", str(tmp_path), str(tmp_path / "run"), "--dry-run", "--json"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["left_out"]
    assert text == "tensors that the index lists and no file has: v"


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
    assert sorted(described(directory).tensors) == ["bias", "weight"]
    if key:
        assert sorted(training_state_of(directory).optimizer.tensors) == ["bias", "weight"]


def test_a_checkpoint_without_its_manifest_is_opened_as_shards(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path, 20)
    complete = described(checkpoint)
    (checkpoint / "MANIFEST.json").unlink()
    bare = described(checkpoint)
    assert bare.tensors.keys() == complete.tensors.keys()
    assert complete.has_digests and not bare.has_digests
