"""``ckpt export --to dcp``: a directory that torch.distributed.checkpoint reads."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.checkpoint.files.dtypes import CODES, TORCH_NAMES
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import ArchiveTensor
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.targets.dcp_files import DcpWriter
from tests.support.external_tensors import values
from tests.support.models.llamas import llama_checkpoint

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def loaded(directory: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Load with torch into zeros."""
    state = {name: torch.full_like(tensor, 7) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("tied", [True, False])
def test_torch_loads_every_tensor_bit_equal(tmp_path: Path, capsys: Capture, tied: bool) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=tied, dtype=torch.bfloat16)
    assert main(["export", str(tmp_path / "c"), "--to", "dcp"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/c-dcp\n"
    assert_equal(loaded(tmp_path / "c-dcp", model.state_dict()), model.state_dict())
    assert {path.name for path in (tmp_path / "c-dcp").iterdir()} == {".metadata", "__0_0.distcp"}


def test_torchs_own_converter_makes_the_nested_state_dict(tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=False)
    target = tmp_path / "out"
    options = ["-o", str(target), "--prefix", "model.", "--cast-dtype", "bf16"]
    assert main(["export", str(tmp_path / "c"), "--to", "dcp", *options]) == 0
    dcp_to_torch_save(target, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert state.keys() == {"model"}
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert_equal(state["model"], expected)


def test_the_export_is_read_here_under_the_names_of_the_model(tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=False)
    target = tmp_path / "out"
    options = ["-o", str(target), "--prefix", "model"]
    assert main(["export", str(tmp_path / "c"), "--to", "dcp", *options]) == 0
    assert_equal(values(target), model.state_dict())


def test_every_dtype_and_shape_and_plain_values_are_read_by_torch(tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    with DcpWriter(tmp_path) as writer:
        for code in sorted(CODES.values()):
            for shape in ((), (0,), (3,), (2, 0, 3), (2, 3)):
                dtype = getattr(torch, TORCH_NAMES[code])
                tensor = torch.arange(1, 7).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
                data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
                name = f"{code}.{len(expected)}"
                writer.add_tensor(("group", name), ArchiveTensor(code, shape, lambda d=data: [d]))
                expected[f"group.{name}"] = tensor
        writer.add_value(("step",), {"step": 3, "lrs": [0.5, None]})
        with pytest.raises(ValueError, match=r"group\.F32"):
            writer.add_value(("group", sorted(n for n in expected if "F32" in n)[0][6:]), 1)
        writer.finish()
    state: dict[str, Any] = {name: torch.full_like(t, 7) for name, t in expected.items()}
    state["step"] = None
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state.pop("step") == {"step": 3, "lrs": [0.5, None]}
    for name, value in expected.items():
        assert (
            torch.equal(state[name].view(torch.uint8), value.view(torch.uint8))
            if value.ndim
            else (state[name] == value)
        ), name


def test_metadata_is_equal_to_that_of_torch(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    dcp.save({"model": {"a": tensor}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    (tmp_path / "ours").mkdir()
    with DcpWriter(tmp_path / "ours") as writer:
        data = tensor.numpy().tobytes()
        writer.add_tensor(("model", "a"), ArchiveTensor("F32", (2, 3), lambda: [data]))
        writer.finish()
    theirs = pickle.loads((tmp_path / "theirs/.metadata").read_bytes())
    ours = pickle.loads((tmp_path / "ours/.metadata").read_bytes())
    for described in theirs.state_dict_metadata.values():
        if hasattr(described.properties, "strides"):
            # Of the tensor in memory, since torch 2.15. Nothing that reads a checkpoint needs them.
            described.properties.strides = None
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()


def test_an_occupied_directory_is_an_error_before_reading(tmp_path: Path, capsys: Capture) -> None:
    llama_checkpoint(tmp_path / "c")
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy/mine").touch()
    command = ["export", str(tmp_path / "c"), "--to", "dcp", "-o", str(tmp_path / "busy")]
    assert main(command) == 4
    assert str(tmp_path / "busy") in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "busy").iterdir()] == ["mine"]


def test_a_damaged_checkpoint_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    llama_checkpoint(tmp_path / "c")
    shard = next((tmp_path / "c/model").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["export", str(tmp_path / "c"), "--to", "dcp"]) == 3
    assert "digest" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


TRAINER = Path(__file__).parents[3] / "fixtures" / "trainer" / "checkpoint-5"


def imported_run(directory: Path, capsys: Capture) -> str:
    """Import the run of transformers' Trainer, and return the path of the checkpoint."""
    assert main(["import", str(TRAINER), str(directory / "run"), "--training-state"]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the Trainer's model with zeros, and an optimizer with its two groups."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TRAINER))
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        torch.nn.init.zeros_(parameter)
        groups["norm" not in name].append(parameter)
    parameters = [{"params": groups[True], "weight_decay": 0.5}, {"params": groups[False]}]
    return model, torch.optim.AdamW(parameters, lr=0.5)


@pytest.mark.parametrize("layout", ["nested", "flattened"])
def test_torch_loads_the_optimizer_by_the_names_of_get_state_dict(
    tmp_path: Path, capsys: Capture, layout: str
) -> None:
    checkpoint, target = imported_run(tmp_path, capsys), tmp_path / "dcp"
    command = ["export", checkpoint, "--to", "dcp", "-o", str(target), "--optimizer", layout]
    assert main(command) == 0
    model, optimizer = model_and_optimizer()
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optimizer": moments, "step": 0, "epoch": 0}
    state["lr_scheduler"] = {"last_epoch": 0, "base_lrs": []}
    # Also the output layer, which is tied: the Trainer's files have only the embedding.
    dcp.load(state, checkpoint_id=target, no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    assert (state["step"], state["epoch"]) == (5, 1)
    assert state["lr_scheduler"] == {"last_epoch": 5, "base_lrs": [0.01, 0.01]}
    original = load_file(TRAINER / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, original[name]), name
    theirs = torch.load(TRAINER / "optimizer.pt", weights_only=True)
    ours = optimizer.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entry in theirs["state"].items():
        for key, value in entry.items():
            assert torch.equal(ours["state"][number][key], value), (number, key)
    for found, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert found["weight_decay"] == group["weight_decay"] and found["lr"] == group["lr"]


def test_an_export_with_the_optimizer_is_a_run_to_continue_here(
    tmp_path: Path, capsys: Capture
) -> None:
    checkpoint, target = imported_run(tmp_path, capsys), tmp_path / "dcp"
    command = ["export", checkpoint, "--to", "dcp", "-o", str(target), "--optimizer", "nested"]
    assert main(command) == 0
    again = ["import", str(target), str(tmp_path / "again"), "--training-state"]
    assert main([*again, "--config", str(TRAINER)]) == 0
    found = capsys.readouterr().out
    assert "optimizer (20 parameters: exp_avg, exp_avg_sq), learning-rate schedule" in found
    first, second = (
        Manifest.read(Path(checkpoint)),
        Manifest.read(tmp_path / "again/epoch_1_step_5"),
    )
    for name in ("model", "optimizer"):
        digests = [digests_of(manifest.trees[name]) for manifest in (first, second)]
        assert digests[0] == digests[1]


def digests_of(tree: Tree) -> dict[str, str | None]:
    return {name: tensor.slices[0].digest for name, tensor in tree.tensors.items()}


def test_an_optimizer_that_cannot_be_exported_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    llama_checkpoint(tmp_path / "weights")
    nested = ["--to", "dcp", "--optimizer", "nested"]
    checkpoint = imported_run(tmp_path, capsys)
    for source, more, reason in (
        (str(tmp_path / "weights"), [], "weights only"),
        (str(TRAINER), [], "not a checkpoint of a run"),
        (checkpoint, ["--names", "torchtitan"], "--names torchtitan"),
    ):
        assert main(["export", source, *nested, *more]) == 3
        text = capsys.readouterr().err
        assert reason in text and "without --optimizer" in text
