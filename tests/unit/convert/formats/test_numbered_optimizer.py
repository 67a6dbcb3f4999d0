"""The numbers in a torch optimizer's state become names by the usual orders, or are rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.convert.formats.torch.numbered_optimizer import optimizer_state
from automodel_ckpt.convert.formats.torch.torch_files import read_archive
from automodel_ckpt.convert.formats.torch.training_state import (
    ModelParameter,
    OptimizerState,
    Parameters,
)
from automodel_ckpt.errors import CheckpointUnusable


class Model(nn.Module):
    """Two blocks with norms and biases, and an output layer that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 6)})
            block["down"] = nn.Linear(6, 4, bias=False)
            self.blocks.append(block)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block["down"](block["up"](block["norm"](hidden)))
        return self.head(hidden).square().mean()


def decays(name: str) -> bool:
    return "norm" not in name and "bias" not in name


def parameters_of(model: nn.Module) -> Callable[[], Sequence[ModelParameter]]:
    found = []
    for name, parameter in model.named_parameters():
        found.append(ModelParameter(name, tuple(parameter.shape), decays(name)))
    return lambda: found


def trained(model: nn.Module, groups: Any, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = kind(groups, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(7)).backward()
        optimizer.step()
    return optimizer  # type: ignore[no-any-return]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    with_decay, without = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (with_decay if decays(name) else without).append(parameter)
    return [{"params": with_decay, "weight_decay": 0.5}, {"params": without, "weight_decay": 0.0}]


def read(
    path: Path,
    value: Any,
    model: nn.Module,
    *,
    parameters: Parameters | None = None,
) -> OptimizerState:
    torch.save(value, path)
    archive = read_archive(path)
    return optimizer_state(
        archive.value,
        archive,
        parameters or parameters_of(model),
        root=path.parent,
        file=path.name,
    )


def assert_same(state: OptimizerState, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Compare the described moments and steps with those of the optimizer, bit for bit."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {names[id(parameter)]: entry for parameter, entry in optimizer.state.items()}
    assert state.tensors.keys() == expected.keys()
    for name, entry in expected.items():
        for key, value in entry.items():
            if key == "step":
                assert state.values[name][key] == value.item()
                continue
            stored = whole(state.root, state.tensors[name][key])
            assert stored.tobytes() == value.detach().numpy().tobytes(), f"{name}.{key}"


def error_of(path: Path, value: Any, model: nn.Module) -> str:
    with pytest.raises(CheckpointUnusable) as raised:
        read(path, value, model)
    return str(raised.value)


@pytest.mark.parametrize("grouping", [lambda model: model.parameters(), two_groups])
def test_both_usual_orders_are_read(tmp_path: Path, grouping: Any) -> None:
    model = Model()
    optimizer = trained(model, grouping(model))
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert_same(state, optimizer, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group, expected in zip(state.groups, optimizer.param_groups, strict=True):
        assert group.parameters == tuple(names[id(p)] for p in expected["params"])
        assert group.options["weight_decay"] == expected["weight_decay"]
        assert group.options["betas"] == (0.9, 0.999) and "params" not in group.options


def frozen(model: Model) -> Any:
    model.embed.weight.requires_grad_(False)
    return two_groups(model)


def by_block(model: Model) -> Any:
    model.embed.weight.requires_grad_(False)
    return [{"params": list(block.parameters())} for block in reversed(model.blocks)]


def reverse(model: Model) -> Any:
    return list(model.parameters())[::-1]


@pytest.mark.parametrize("grouping", [frozen, by_block, reverse])
def test_other_orders_of_numbered_parameters_are_errors(tmp_path: Path, grouping: Any) -> None:
    model = Model()
    optimizer = trained(model, grouping(model))
    error_of(tmp_path / "o.pt", optimizer.state_dict(), model)


def test_a_parameter_without_state_and_without_updates_keeps_its_group(tmp_path: Path) -> None:
    model = Model()
    model.add_module("unused", nn.Linear(2, 2, bias=False))
    optimizer = trained(model, two_groups(model))
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert_same(state, optimizer, model)
    assert "unused.weight" in state.groups[0].parameters
    assert "unused.weight" not in state.tensors


def test_names_that_the_file_states_are_used_and_validated(tmp_path: Path) -> None:
    model = Model()
    reverse = list(model.named_parameters())[::-1]
    optimizer = trained(model, reverse)
    assert_same(read(tmp_path / "o.pt", optimizer.state_dict(), model), optimizer, model)
    by_name = {
        "state": {f"module.{name}": optimizer.state[value] for name, value in reverse},
        "param_groups": [{"lr": 0.1, "params": [f"module.{name}" for name, _ in reverse]}],
    }
    assert_same(read(tmp_path / "n.pt", by_name, model), optimizer, model)
    by_name["param_groups"][0]["params"][0] = "module.embed.weight"  # type: ignore[index]
    assert "optimizer" in error_of(tmp_path / "twice.pt", by_name, model)


def test_state_of_other_shapes_than_the_parameters_is_an_error(tmp_path: Path) -> None:
    model = Model()
    optimizer = trained(model, list(model.parameters()), torch.optim.Adafactor)
    text = error_of(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert "row_var" in text and "not supported" in text


def momentum(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr, momentum=0.9)


@pytest.mark.parametrize("kind", [momentum, torch.optim.NAdam, torch.optim.RMSprop])
def test_other_optimizers_with_moments_are_read(tmp_path: Path, kind: Any) -> None:
    model = Model()
    optimizer = trained(model, two_groups(model), kind)
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert len(state.groups) == 2
    if kind is torch.optim.NAdam:
        assert 0 < state.values["embed.weight"]["mu_product"] < 1


def test_damaged_state_dicts_are_errors(tmp_path: Path) -> None:
    model = Model()
    good = trained(model, two_groups(model)).state_dict()
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 2)}
    damaged: list[Any] = [
        [],
        {"state": {}},
        {**good, "param_groups": [{"params": [True]}]},
        {**good, "param_groups": [{"params": 3}]},
        {**good, "param_groups": [{"params": list(range(9)) * 2}]},
        {**good, "state": {99: {}}},
        {**good, "state": {0: torch.ones(2)}},
        {**good, "state": {**good["state"], 0: {"exp_avg": object}}},
        {**good, "state": {**good["state"], 0: {"exp.avg": torch.zeros(7, 4)}}},
        {**good, "state": {**good["state"], 0: {**moments, "exp_avg": torch.zeros(10**4)}}},
        {**good, "state": {**good["state"], 0: {"step": torch.ones(5)}}},
    ]
    for number, value in enumerate(damaged):
        assert "optimizer" in error_of(tmp_path / f"{number}.pt", value, model), number
