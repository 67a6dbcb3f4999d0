"""Whatever an optimizer keeps comes back as it was, whenever it makes it; what could not is refused by name."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from automodel_ckpt.checkpoint import discover
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from tests.support import ranks
from tests.support.models import tiny

Entry = dict[Any, Any]


class Keeping(torch.optim.Optimizer):
    """Moves against the gradient, and from the third step on keeps what *make* makes for each parameter."""

    def __init__(self, params: Any, make: Callable[[torch.Tensor], Entry], **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.make, self.steps = make, 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])
                if self.steps >= 3:
                    self.state[parameter] = self.make(parameter)


def keeping(
    make: Callable[[torch.Tensor], Entry], seed: int = 0, **options: Any
) -> SimpleNamespace:
    made = tiny.recipe(seed)
    made.optimizer = Keeping(made.optimizer.param_groups[0]["params"], make, **options)
    del made.lr_scheduler
    return made


def step(made: SimpleNamespace) -> None:
    for parameter in made.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 0.25)
    made.optimizer.step()


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


KEPT: dict[str, Callable[[torch.Tensor], Entry]] = {
    "late tensors": lambda p: {
        "mean": p.detach() * 2,
        "count": torch.tensor(7),
        "row": torch.ones(3),
    },
    "wider than the parameter": lambda p: {
        "mean": p.detach().double() / 3,
        "seen": torch.tensor([2**40]),
    },
    "text and arrays": lambda p: {
        "phase": "warm",
        "raw": b"x",
        "rows": np.arange(3.0),
        "rate": np.float32(0.5),
    },
    "whole": lambda p: {"pair": (torch.ones(2), {3: "x"}), "maybe": None, "flag": True},
}


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_state_that_is_made_late_comes_back_as_it_was_again_and_again(
    tmp_path: Path, make: Callable[[torch.Tensor], Entry]
) -> None:
    made = keeping(make)
    made.optimizer.steps = 1
    for number in range(2, 5):
        step(made)
        tiny.save(tmp_path, made, step=number)
        again = keeping(make, seed=9)
        tiny.load(tmp_path, again)
        mine, theirs = (
            [
                one.optimizer.state[p]
                for p in one.optimizer.param_groups[0]["params"]
                if p in one.optimizer.state
            ]
            for one in (made, again)
        )
        assert alike(mine, theirs) and bool(mine) == (number >= 3), f"step {number}"
        again.optimizer.steps = number
        made = again


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_recipe_with_another_momentum_goes_on_as_saved(tmp_path: Path, momentum: float) -> None:
    def sgd(seed: int, value: float) -> SimpleNamespace:
        made = tiny.recipe(seed)
        made.optimizer = torch.optim.SGD(
            made.optimizer.param_groups[0]["params"], lr=0.1, momentum=value
        )
        del made.lr_scheduler
        return made

    made, again = sgd(0, 0.9), sgd(1, momentum)
    step(made)
    tiny.save(tmp_path, made)
    tiny.load(tmp_path, again)
    for one in (made, again):
        step(one)
    assert (
        torch.equal(made.model.one_row, again.model.one_row)
        and again.optimizer.param_groups[0]["momentum"] == 0.9
    )


def test_an_optimizer_that_loads_in_its_own_way_is_given_all_of_it(tmp_path: Path) -> None:
    class Own(Keeping):
        def load_state_dict(self, state_dict: Any) -> None:
            self.given = state_dict

    made, again = (
        keeping(lambda p: {"phase": "warm", "rows": np.ones(1)}, seed) for seed in (0, 1)
    )
    again.optimizer.__class__ = Own
    made.optimizer.steps = 2
    step(made)
    tiny.save(tmp_path, made)
    tiny.load(tmp_path, again)
    assert alike(
        again.optimizer.given["state"]["model.embed"], {"phase": "warm", "rows": np.ones(1)}
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda p: {"history": {"a": p.detach()}},
        lambda p: {"old": [p.detach()]},
        lambda p: {0: p.detach()},
        lambda p: {"a.b": 1},
    ],
    ids=["mapping", "list of tensors", "number as a key", "dots"],
)
def test_containers_in_the_state_are_refused_at_the_save(
    tmp_path: Path, make: Callable[[torch.Tensor], Entry]
) -> None:
    made = keeping(make)
    made.optimizer.steps = 2
    step(made)
    with pytest.raises(RecipeError, match=r"not flat(.|\n)*optimizer\.state\.model\."):
        tiny.save(tmp_path, made)


class WithHistory(torch.optim.SGD):
    """Has a list of tensors for each parameter after the first step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"old": [parameter.detach()]}


def test_containers_in_the_state_are_refused_before_the_first_step(tmp_path: Path) -> None:
    made = tiny.recipe()
    made.optimizer = WithHistory(made.optimizer.param_groups[0]["params"], lr=0.1)
    del made.lr_scheduler
    with pytest.raises(RecipeError, match=r"not flat(.|\n)*optimizer\.state\.\*\.old"):
        tiny.checkpointer(tmp_path).check_disk_space(discover(made))


def test_counters_of_a_fused_step_are_loaded_as_torch_loads_them(tmp_path: Path) -> None:
    """torch's fused kernels on a GPU cannot read counters in the memory of the host."""
    made, again = (keeping(lambda p: {"step": torch.tensor(3)}, fused=True) for _ in range(2))
    made.optimizer.steps = again.optimizer.steps = 2
    step(made)
    tiny.save(tmp_path, made)
    tiny.load(tmp_path, again)
    steps = [entry["step"] for entry in again.optimizer.state.values()]
    assert steps and all(each.dtype == torch.float32 and each == 3 for each in steps)


def with_adafactor(*, is_sharded: bool) -> SimpleNamespace:
    made = tiny.recipe()
    made.model = torch.nn.Linear(4, 4)
    if is_sharded:
        fully_shard(made.model)
    made.optimizer = torch.optim.Adafactor(made.model.parameters(), lr=0.1)
    del made.lr_scheduler
    return made


def test_state_that_cannot_be_sharded_names_the_strategy_that_shards_nothing(
    tmp_path: Path,
) -> None:
    made = with_adafactor(is_sharded=False)
    step(made)
    tiny.save(tmp_path, made, 1)

    def load() -> None:
        expected = r"weight.row_var[\s\S]*strategy to ddp[\s\S]*Adafactor"
        with pytest.raises(CheckpointUnusable, match=expected):
            tiny.load(tmp_path, with_adafactor(is_sharded=True))

    ranks.run(load, 1)


def test_a_group_without_parameters_comes_back_with_its_options(tmp_path: Path) -> None:
    def with_empty_group(rate: float) -> SimpleNamespace:
        made = tiny.recipe(1)
        del made.lr_scheduler
        made.optimizer.add_param_group({"params": [], "lr": rate})
        return made

    made, other = with_empty_group(0.25), with_empty_group(0.5)
    tiny.save(tmp_path, made)
    tiny.load(tmp_path, other)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.25]


def test_containers_in_an_option_are_refused_before_training(tmp_path: Path) -> None:
    made = keeping(dict, plan={"a": 0})
    with pytest.raises(RecipeError, match=r"not flat(.|\n)*param_groups\.0\.plan"):
        tiny.checkpointer(tmp_path).check(discover(made))


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    made, again = (
        keeping(lambda p: {"mean": p.detach()}),
        keeping(lambda p: {"other": p.detach()}, seed=1),
    )
    made.optimizer.steps = again.optimizer.steps = 2
    step(made)
    tiny.save(tmp_path, made)
    with pytest.raises(
        CheckpointUnusable, match=r"\+ optimizer\.state\..*\.other: here, but not saved"
    ):
        tiny.load(tmp_path, again)
