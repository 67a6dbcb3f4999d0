"""What is left to load after the values of a module were read into its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.state import module_tensors, optimizer_names
from automodel_ckpt.checkpoint.state.fill_modules import set_module_state
from automodel_ckpt.checkpoint.state.module_tensors import module_state
from automodel_ckpt.checkpoint.state.optimizer_names import Owners
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny


def tied_list() -> nn.Module:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    model[2].weight = model[0].weight
    model.register_buffer("mask", torch.ones(2), persistent=False)
    model.register_buffer("scale", torch.ones(2))
    return model


def read(module: nn.Module) -> None:
    """Fill the tensors of the state with twos, and load it."""
    state, tied = module_state(module)
    for value in state.values():
        value.fill_(2)
    set_module_state(module, state, tied, strict=True)


def test_a_state_that_lacks_a_tensor_is_an_error() -> None:
    model = tied_list()
    state, tied = module_state(model)
    del state["1.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        set_module_state(model, state, tied, strict=True)


def bare(model: nn.Module) -> nn.Module:
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])  # type: ignore[index,operator]
    return model


@pytest.mark.parametrize("wrap", [bare, checkpointed])
def test_names_are_those_of_pytorch(
    wrap: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    root = nn.Module()
    root.model = model
    expected = get_model_state_dict(model)
    of_optimizer = get_optimizer_state_dict(root, optimizer)
    if wrap is bare:

        def walk(*_: Any) -> None:
            raise AssertionError("PyTorch visits the modules several times for each name")

        monkeypatch.setattr(module_tensors, "get_model_state_dict", walk)
        monkeypatch.setattr(optimizer_names, "get_optimizer_state_dict", walk)
    items = classify({"model": model, "optimizer": optimizer})
    state, _ = module_state(model)
    assert list(state) == list(expected)
    assert all(state[name].data_ptr() == expected[name].data_ptr() for name in state)
    found = Owners(items).optimizer_state(items[1])
    assert found["param_groups"] == of_optimizer["param_groups"]
    assert list(found["state"]) == list(of_optimizer["state"])
    for fqn, entry in found["state"].items():
        assert all(entry[key] is value for key, value in of_optimizer["state"][fqn].items())


def sharing(how: str, seed: int) -> SimpleNamespace:
    """An embedding and an output layer, which share memory as *how* states, after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    if how == "data":
        model[1].weight.data = model[0].weight.data
    elif how == "part":
        model[1].weight.data = model[0].weight.data[2:6]
    made = SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    train(made)
    return made


def train(made: SimpleNamespace) -> None:
    made.model(torch.arange(4)).square().sum().backward()
    made.optimizer.step()
    made.optimizer.zero_grad()


@pytest.mark.parametrize("how", ["data", "part", "separate"])
def test_parameters_with_the_same_memory_are_saved_once_and_share_it_after_a_load(
    tmp_path: Path, how: str
) -> None:
    saved, loaded = sharing(how, 0), sharing(how, 1)
    tree = Manifest.read(tiny.save(tmp_path, saved).path).trees["model"]
    names = ["0.weight"] if how == "data" else ["0.weight", "1.weight"]
    assert list(tree.tensors) == names
    assert tree.tied == ({"1.weight": "0.weight"} if how == "data" else {})
    tiny.load(tmp_path, loaded)
    for _ in range(2):
        one, other = (made.model.state_dict() for made in (saved, loaded))
        assert all(torch.equal(one[name], other[name]) for name in one)
        train(saved)
        train(loaded)


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared, then not", "then shared"])
def test_parameters_that_share_memory_on_one_side_only_are_loaded_if_they_are_equal(
    tmp_path: Path, is_shared: bool
) -> None:
    """Sharding, or a copy to a device, separates them; earlier revisions saved both."""
    saved = sharing("data" if is_shared else "separate", 0)
    loaded = sharing("separate" if is_shared else "data", 1)
    if not is_shared:
        tiny.save(tmp_path / "different", saved)
        with pytest.raises(CheckpointUnusable, match=r"1\.weight: saved, but not here"):
            tiny.load(tmp_path / "different", sharing("data", 1))
        with torch.no_grad():
            saved.model[1].weight.copy_(saved.model[0].weight)
    tiny.save(tmp_path, saved)
    tiny.load(tmp_path, loaded)
    one, other = (made.model.state_dict() for made in (saved, loaded))
    assert all(torch.equal(one[name], other[name]) for name in one)
