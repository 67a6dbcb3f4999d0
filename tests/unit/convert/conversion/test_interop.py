"""Checkpoints of PyTorch's and NeMo AutoModel's own writers are read here, and ours by PyTorch's readers.

What AutoModel wrote lies in tests/fixtures/automodel, with the script that made it. Its readers, and other clients that
need a separate environment, are `make interop`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import (
    FileSystemReader,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.models import tiny
from tests.support.models.shards import bits

FIXTURES = Path(__file__).parents[3] / "fixtures" / "automodel"


def exported(output: Path) -> dict[str, torch.Tensor]:
    return {fqn: t for file in output.glob("*.safetensors") for fqn, t in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    different = [
        name for name in want if bits(found[name]).tobytes() != bits(want[name].detach()).tobytes()
    ]
    assert not different


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("form", ["safetensors", "torch_save"])
@pytest.mark.parametrize("inner", [".", "model"])
def test_what_automodel_saved_is_exported_as_it_was(
    tmp_path: Path, form: str, inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FIXTURES / form / "epoch_0_step_1" / inner
    assert main(["export", str(source), "-o", str(tmp_path / "out")]) == 0
    assert "unchecked" in capsys.readouterr().err
    assert_same(exported(tmp_path / "out"), load_file(FIXTURES / "expected.safetensors"))


def shards_by_torch(directory: Path) -> dict[str, torch.Tensor]:
    """What PyTorch's writer makes of two ranks' rows; returns the whole tensors."""
    whole = {
        "a": torch.arange(35.0).reshape(5, 7),
        "b": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    }

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = {
            name: distribute_tensor(tensor.clone(), mesh, [Shard(0)])
            for name, tensor in whole.items()
        }
        with quietly():
            writer = HuggingFaceStorageWriter(
                str(directory), dict.fromkeys(state, 1), save_distributed=True
            )
            dcp.save(state, storage_writer=writer)

    ranks.run(on_rank, 2)
    return whole


def test_what_pytorchs_hf_writer_saved_is_exported_as_it_was(tmp_path: Path) -> None:
    whole = shards_by_torch(tmp_path / "torch")
    assert main(["export", str(tmp_path / "torch"), "-o", str(tmp_path / "out")]) == 0
    assert_same(exported(tmp_path / "out"), whole)


@pytest.mark.parametrize("form", ["safetensors", "torch_save"])
def test_pytorchs_readers_load_what_two_ranks_saved_here(tmp_path: Path, form: str) -> None:
    def on_rank() -> dict[str, torch.Tensor]:
        made = tiny.recipe(3)
        mesh = init_device_mesh("cpu", (2,))
        for name in ("embed", "frozen", "one_row"):
            parameter = getattr(made.model, name)
            cut = torch.nn.Parameter(
                distribute_tensor(parameter.data, mesh, [Shard(0)]), parameter.requires_grad
            )
            setattr(made.model, name, cut)
        made.model.head = made.model.embed
        made.optimizer = torch.optim.AdamW([p for p in made.model.parameters() if p.requires_grad])
        del made.lr_scheduler
        tiny.save(tmp_path, made, model_save_format=form, save_consolidated=False)
        state = made.model.state_dict()
        return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}

    want = ranks.run(on_rank, 2)[0]
    want.pop("head")
    model = tmp_path / "epoch_0_step_20" / "model"
    reader = (
        HuggingFaceStorageReader(str(model)) if form == "safetensors" else FileSystemReader(model)
    )
    found = {name: torch.full_like(tensor, 1) for name, tensor in want.items()}
    with quietly():
        dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same(found, want)
