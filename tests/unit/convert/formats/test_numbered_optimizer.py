"""The numbers in a torch optimizer's state become names by the usual orders, or are rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


def error_of(path: Path, value: Any, model: nn.Module) -> str:
    with pytest.raises(CheckpointUnusable) as raised:
        read(path, value, model)
    return str(raised.value)


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


def test_state_of_other_shapes_than_the_parameters_is_an_error(tmp_path: Path) -> None:
    model = Model()
    optimizer = trained(model, list(model.parameters()), torch.optim.Adafactor)
    text = error_of(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert "row_var" in text and "not supported" in text


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
