"""What is left to load after the values of a module were read into its own tensors."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny


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
