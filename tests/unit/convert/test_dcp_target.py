"""``ckpt export --to dcp``: a directory that torch.distributed.checkpoint reads."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from automodel_ckpt.checkpoint.dtypes import CODES, TORCH_NAMES
from automodel_ckpt.checkpoint.files.torch_archive_writing import ArchiveTensor
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.targets.dcp_files import DcpWriter
from tests.support.external_tensors import values
from tests.support.llamas import llama_checkpoint

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
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()


def test_an_occupied_or_missing_directory_is_an_error_before_reading(
    tmp_path: Path, capsys: Capture
) -> None:
    llama_checkpoint(tmp_path / "c")
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy/mine").touch()
    for target in ("busy", "none/out"):
        command = ["export", str(tmp_path / "c"), "--to", "dcp", "-o", str(tmp_path / target)]
        assert main(command) == 4
        assert str(tmp_path / target) in capsys.readouterr().err
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
