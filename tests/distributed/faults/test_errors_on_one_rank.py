"""An error on one of two ranks, before a collective that the other one is in: both raise it, and none waits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from automodel_ckpt.errors import AutomodelError
from tests.support import ranks

_HANG_SECONDS = 6


class Case:
    """One case in one rank process: a separate directory, and a group with a short timeout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rank = dist.get_rank()
        timeout = timedelta(seconds=_HANG_SECONDS)
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.open: list[Checkpointer] = []

    def checkpointer(self, **options: Any) -> Checkpointer:
        made = Checkpointer(self.root, group=self.group, options=CheckpointOptions(**options))
        self.open.append(made)
        return made


STATE = {"model": nn.Linear(2, 2)}


def what_follows_a_save(case: Case) -> None:
    saver = case.checkpointer()
    for step in (1, 2):  # The second save reuses the plan of the first.
        with pytest.raises(AutomodelError, match=r"reporting epoch_0_step_\d \(the checkpoint"):
            saver.save(STATE, step=step, epoch=0, on_saved=lambda report: 1 // 0)
    assert (case.root / "LATEST").resolve().name == "epoch_0_step_2"
    saver.save(STATE, step=3, epoch=0, on_saved=lambda report: 1 // 0)


class FailsOnOneRank:
    """State that rank 1 cannot give or take."""

    def __init__(self) -> None:
        self.fails_at_load = False

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1 and not self.fails_at_load:
            raise ValueError("odd state")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("odd state")


def state_that_one_rank_cannot_give(case: Case) -> None:
    case.checkpointer().save({**STATE, "odd": FailsOnOneRank()}, step=1, epoch=0)


def state_that_one_rank_cannot_give_to_an_asynchronous_save(case: Case) -> None:
    case.checkpointer(is_async=True).save({**STATE, "odd": FailsOnOneRank()}, step=1, epoch=0)


def state_that_one_rank_cannot_take(case: Case) -> None:
    odd = FailsOnOneRank()
    odd.fails_at_load = True
    saver = case.checkpointer()
    saver.save({**STATE, "odd": odd}, step=1, epoch=0)
    saver.load({**STATE, "odd": odd})


def a_checkpoint_whose_file_is_damaged(case: Case) -> None:
    saver = case.checkpointer(restore_from="epoch_0_step_1")
    saver.save(STATE, step=1, epoch=0)
    if case.rank == 0:
        (shard, *_) = (case.root / "epoch_0_step_1" / "model").glob("shard-*")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    dist.barrier(case.group)
    saver.load(STATE)


def with_parameter(value: torch.Tensor) -> dict[str, Any]:
    module = nn.Module()
    module.weight = nn.Parameter(value)
    return {"model": module}


def partial_sums(placement: Placement) -> torch.Tensor:
    mesh = DeviceMesh("cpu", [0, 1])
    return DTensor.from_local(torch.ones(2, 2), mesh, [placement])


def a_model_with_partial_sums(case: Case) -> None:
    case.checkpointer().save(with_parameter(partial_sums(Partial())), step=1, epoch=0)


def an_optimizer_with_partial_sums(case: Case) -> None:
    weight = partial_sums(Replicate())
    model = with_parameter(weight)["model"]
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["sum"] = partial_sums(Partial())
    case.checkpointer().save({"model": model, "optimizer": optimizer}, step=1, epoch=0)


def a_load_into_partial_sums(case: Case) -> None:
    saver = case.checkpointer()
    saver.save(with_parameter(partial_sums(Replicate())), step=1, epoch=0)
    saver.load(with_parameter(partial_sums(Partial())))


def a_mesh_with_ranks_in_reverse_order(case: Case) -> None:
    mesh = DeviceMesh("cpu", [1, 0])
    state = with_parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))
    case.checkpointer().save(state, step=1, epoch=0)


def a_tensor_of_other_dtypes(case: Case) -> None:
    state = with_parameter(torch.ones(2, 2, dtype=(torch.float32, torch.bfloat16)[case.rank]))
    case.checkpointer().save(state, step=1, epoch=0)


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return torch.ones(2) if dist.get_rank() == 1 else "text"


def a_tensor_on_one_rank_and_a_value_on_the_other(case: Case) -> None:
    case.checkpointer().save({"model": Extra()}, step=1, epoch=0)


class OwnScale(torch.optim.SGD):
    """Keeps a number per parameter that is stored once, for all ranks."""

    def set(self, scale: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["scale"] = torch.tensor(scale)


def optimizer_state_that_differs_under_a_kept_plan(case: Case) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    model = with_parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))["model"]
    optimizer = OwnScale(model.parameters())
    saver = case.checkpointer(is_async=True)
    for step, scale in ((1, 1.0), (2, 2.0), (3, 3.0 + case.rank)):
        optimizer.set(scale)
        saver.save({"model": model, "optimizer": optimizer}, step=step, epoch=0)


CASES: dict[Callable[[Case], None], tuple[int | None, str]] = {
    what_follows_a_save: (0, "reporting epoch_0_step_3 (the checkpoint itself is safe) failed"),
    state_that_one_rank_cannot_give: (1, "odd state"),
    state_that_one_rank_cannot_give_to_an_asynchronous_save: (1, "odd state"),
    state_that_one_rank_cannot_take: (1, "odd state"),
    a_checkpoint_whose_file_is_damaged: (None, "a file of the checkpoint is not what was saved"),
    a_model_with_partial_sums: (
        None,
        "attribute 'model', weight; the placement Partial(sum): no rank",
    ),
    an_optimizer_with_partial_sums: (
        None,
        "'optimizer', optimizer.state.model.weight.sum; the placement Partial(sum): no rank has",
    ),
    a_load_into_partial_sums: (
        None,
        "weight: saved as F32 [2, 2], here F32 [2, 2] with the placement Partial(sum)",
    ),
    a_mesh_with_ranks_in_reverse_order: (
        None,
        "a tensor is divided among the ranks of a mesh in an order that a checkpoint cannot store",
    ),
    a_tensor_of_other_dtypes: (
        None,
        "model: weight; F32 [2, 2] on rank 0, BF16 [2, 2] on rank 1; state that differs",
    ),
    optimizer_state_that_differs_under_a_kept_plan: (
        None,
        "different state on each rank for sharded parameters: optimizer.state.*.scale",
    ),
    a_tensor_on_one_rank_and_a_value_on_the_other: (
        None,
        "model: _extra_state; a tensor on rank 1, another value on rank 0",
    ),
}
"""Each case, the rank that fails (None: all find it together), and the beginning of what all ranks raise."""


def outcomes_of_all(root: Path) -> dict[str, str]:
    """What each case raised on this rank, in one line."""
    found: dict[str, str] = {}
    for function in CASES:
        case = Case(root / function.__name__)
        try:
            function(case)
            found[function.__name__] = "nothing was raised"
        except AutomodelError as error:
            problem = error.problems[0]
            found[function.__name__] = (
                f"{problem.what}: {problem.where}; {problem.value}; {problem.hint}"
            )
        # Raised on this rank only; RuntimeError is that of a collective in which it waited.
        except Exception as error:
            found[function.__name__] = f"{type(error).__name__}: {error}"
        for each in case.open:
            each.close()
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[dict[str, str]]]:
    with tempfile.TemporaryDirectory() as directory:
        yield ranks.run(outcomes_of_all, 2, Path(directory), timeout=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_all_ranks_raise_it(outcomes: list[dict[str, str]], case: Callable[[Case], None]) -> None:
    rank, expected = CASES[case]
    for found in outcomes:
        first = "" if rank is None else f"rank {rank}: "
        assert found[case.__name__].startswith(first)
        assert expected in found[case.__name__]
