"""``ckpt export --to torch``: one state dict that torch.load reads without running code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.cli.ckpt import main
from tests.support.models.llamas import llama_checkpoint

Capture = pytest.CaptureFixture[str]


def loaded(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return state


def assert_model_equals(model: Any, state: dict[str, torch.Tensor]) -> None:
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_state_dict_loads_strictly_and_is_bit_equal(
    tmp_path: Path, capsys: Capture, tied: bool
) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=tied, dtype=torch.bfloat16)
    assert main(["export", str(tmp_path / "c"), "--to", "torch"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/c.pt\n"
    state = loaded(tmp_path / "c.pt")
    assert_model_equals(model, state)
    embedding, head = state["model.embed_tokens.weight"], state["lm_head.weight"]
    assert (embedding.data_ptr() == head.data_ptr()) == tied


def test_a_prefix_and_a_cast_are_applied(tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=False)
    target = tmp_path / "m.pt"
    options = ["-o", str(target), "--prefix", "net.", "--cast-dtype", "bf16"]
    assert main(["export", str(tmp_path / "c"), "--to", "torch", *options]) == 0
    state = {name.removeprefix("net."): value for name, value in loaded(target).items()}
    assert_model_equals(model.bfloat16(), state)


def test_hugging_face_files_are_exported(tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=False)
    files = tmp_path / "hf"
    assert main(["consolidate", str(tmp_path / "c"), "--output", str(files)]) == 0
    assert main(["export", str(files), "--to", "torch", "-o", str(tmp_path / "m.pt")]) == 0
    assert_model_equals(model, loaded(tmp_path / "m.pt"))
