"""The numbers in a torch optimizer's state become names by the order that fits the shapes, or are rejected."""

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
from automodel_ckpt.errors import CheckpointUnusable, RecipeError


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
    by_trainer: bool = False,
) -> OptimizerState:
    torch.save(value, path)
    archive = read_archive(path)
    return optimizer_state(
        archive.value,
        archive,
        parameters or parameters_of(model),
        root=path.parent,
        file=path.name,
        by_trainer=by_trainer,
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


def error_of(path: Path, value: Any, model: nn.Module, *, by_trainer: bool = False) -> str:
    with pytest.raises(CheckpointUnusable) as raised:
        read(path, value, model, by_trainer=by_trainer)
    return str(raised.value)


@pytest.mark.parametrize("grouping", [lambda model: model.parameters(), two_groups])
def test_both_usual_orders_are_found_by_the_shapes(tmp_path: Path, grouping: Any) -> None:
    model = Model()
    optimizer = trained(model, grouping(model))
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert_same(state, optimizer, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group, expected in zip(state.groups, optimizer.param_groups, strict=True):
        assert group.parameters == tuple(names[id(p)] for p in expected["params"])
        assert group.options["weight_decay"] == expected["weight_decay"]
        assert group.options["betas"] == (0.9, 0.999) and "params" not in group.options


def test_frozen_parameters_are_absent_if_only_one_choice_fits(tmp_path: Path) -> None:
    model = Model()
    model.embed.weight.requires_grad_(False)
    optimizer = trained(model, two_groups(model))
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert_same(state, optimizer, model)
    assert "embed.weight" not in state.tensors


def test_it_is_an_error_if_the_frozen_parameters_can_be_others(tmp_path: Path) -> None:
    model = Model()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    optimizer = trained(model, two_groups(model))
    text = error_of(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert "in several ways" in text and "param_names" in text
    assert "frozen: 5 parameters, unknown which" in text
    assert "1 with the shape [6, 4] may be blocks.0.up.weight or blocks.1.up.weight" in text


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
    assert "embed.weight" in error_of(tmp_path / "twice.pt", by_name, model)


def test_a_model_of_other_shapes_is_an_error_that_names_all_orders(tmp_path: Path) -> None:
    model, other = Model(), Model()
    other.blocks[1]["up"] = nn.Linear(4, 5)
    optimizer = trained(model, two_groups(model))
    text = error_of(tmp_path / "o.pt", optimizer.state_dict(), other)
    for order in ("named_parameters()", "with decay first, then without", "matrices first"):
        assert order in text
    assert "blocks.1.up.weight [5, 4]" in text and "[6, 4]" in text


class Vectors(nn.Module):
    """Two parameters of one shape, of which the Trainer decays the second."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.bias * self.scale).sum()


def test_a_parameter_for_each_expert_is_an_error_that_says_so(tmp_path: Path) -> None:
    """As transformers 4 had them."""
    model = Model()
    state = trained(model, model.parameters()).state_dict()
    fused = nn.ParameterList([torch.zeros(2, 6, 4), torch.zeros(7, 4)])
    with pytest.raises(CheckpointUnusable) as caught:
        read(tmp_path / "optimizer.pt", state, fused)
    assert "for each expert" in caught.value.problems[0].hint


def test_two_groups_that_can_be_exchanged_are_an_error(tmp_path: Path) -> None:
    model = Vectors()
    optimizer = trained(model, two_groups(model))
    text = error_of(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert "the groups that begin with 0 and 1 have the same shapes" in text


def test_the_rule_of_the_trainer_decides_only_in_its_own_files(tmp_path: Path) -> None:
    model = Vectors()
    optimizer = trained(model, two_groups(model))
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model, by_trainer=True)
    assert_same(state, optimizer, model)
    assert state.groups[0].parameters == ("scale",) and "the Trainer's groups" in state.names_from
    # Another script replaced the Trainer's groups by those of LoRA+ or of layers.
    others = optimizer.state_dict()
    others["param_groups"][1]["lr"] = 0.2
    assert "in several ways" in error_of(tmp_path / "l.pt", others, model, by_trainer=True)
    others = optimizer.state_dict()
    others["param_groups"][1]["weight_decay"] = 0.1
    assert "in several ways" in error_of(tmp_path / "w.pt", others, model, by_trainer=True)


def test_groups_of_layers_in_another_order_are_not_taken_for_that_of_the_model(
    tmp_path: Path,
) -> None:
    model = Model()
    model.embed.weight.requires_grad_(False)
    groups = [{"params": list(block.parameters())} for block in reversed(model.blocks)]
    optimizer = trained(model, groups)
    text = error_of(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert "the groups that begin with 0 and 5 have the same shapes" in text


def test_groups_of_other_programs_are_found_if_only_one_division_fits(tmp_path: Path) -> None:
    model = Model()
    norms = [value for name, value in model.named_parameters() if "norm" in name]
    ups = [block["up"].weight for block in model.blocks]
    others = [
        value for name, value in model.named_parameters() if "down" in name or "embed" in name
    ]
    biases = [block["up"].bias for block in model.blocks]
    groups = [
        {"params": biases, "lr": 0.3},
        {"params": []},
        {"params": others},
        {"params": norms, "lr": 0.2},
        {"params": ups},
    ]
    optimizer = trained(model, groups)
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert_same(state, optimizer, model)
    assert [len(group.parameters) for group in state.groups] == [2, 0, 3, 4, 2]
    assert state.groups[0].parameters == ("blocks.0.up.bias", "blocks.1.up.bias")
    assert "each group in the order of named_parameters()" in state.names_from


def test_names_can_be_added_to_a_file_that_has_only_numbers(tmp_path: Path) -> None:
    model = Vectors()
    optimizer = trained(model, two_groups(model))
    value = optimizer.state_dict()
    for group, names in zip(value["param_groups"], (["scale"], ["bias"]), strict=True):
        group["param_names"] = names
    assert_same(read(tmp_path / "o.pt", value, model), optimizer, model)


def test_state_of_other_shapes_than_the_parameters_is_an_error(tmp_path: Path) -> None:
    model = Model()
    optimizer = trained(model, list(model.parameters()), torch.optim.Adafactor)
    text = error_of(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert "row_var" in text and "not supported" in text


def test_an_optimizer_without_moments_has_groups_only_if_their_options_are_equal(
    tmp_path: Path,
) -> None:
    model = Model()
    equal = [{**group, "weight_decay": 0.1} for group in two_groups(model)]
    optimizer = trained(model, equal, torch.optim.SGD)
    state = read(tmp_path / "o.pt", optimizer.state_dict(), model)
    assert not any(state.tensors.values()) and len(state.groups) == 2
    # Which parameters have decay is not in the file.
    optimizer = trained(model, two_groups(model), torch.optim.SGD)
    assert "in several ways" in error_of(tmp_path / "d.pt", optimizer.state_dict(), model)
    state = read(tmp_path / "t.pt", optimizer.state_dict(), model, by_trainer=True)
    assert all(decays(name) for name in state.groups[0].parameters)


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


def test_an_error_about_the_model_is_not_reported_as_damage_of_the_file(tmp_path: Path) -> None:
    def fail() -> Sequence[ModelParameter]:
        raise RecipeError("no config.json", where="x", value="y", hint="z")

    path = tmp_path / "o.pt"
    torch.save({}, path)
    archive = read_archive(path)
    with pytest.raises(RecipeError):
        optimizer_state(archive.value, archive, fail, root=tmp_path, file="o.pt")
