"""``ckpt export --to dcp``: a directory that torch.distributed.checkpoint reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from automodel_ckpt.cli.ckpt import main
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
