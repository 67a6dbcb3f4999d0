"""FSDP2 on one rank casts parameters and gradients with one copy each: the same values, and less memory traffic."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_ckpt.distributed import one_rank
from automodel_ckpt.distributed import parallelize as module
from automodel_ckpt.distributed.parallelize import Parallelism, parallelize
from automodel_ckpt.models.float32_parts import float32_names
from tests.distributed import test_float32_parts
from tests.support import ranks
from tests.support.parallel import layout_here, model_of, train_steps

COPIES = ("aten::copy_", "aten::_to_copy")


class Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements that are copied from one tensor to another."""

    num_elements = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = operator(*args, **(kwargs or {}))
        is_same = len(args) > 1 and args[0] is args[1]
        if operator.name().partition(".")[0] in COPIES and not is_same:
            self.num_elements += output.numel()
        return output


def trained(
    build: Any, how: Parallelism, with_copies: bool
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], int]:
    """(losses and norms of two steps, the weights after them, the number of copied elements)."""
    patch = mock.patch.object(module, "cast_without_copies")
    layout, model = layout_here(), build()
    if with_copies:
        with patch:
            model = parallelize(model, layout, how)
    else:
        model = parallelize(model, layout, how)
    with Copied() as copied:
        steps = train_steps(model, layout)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        weights[name] = parameter.to_local().detach()
    return steps, weights, copied.num_elements


def plain_model() -> nn.Module:
    return model_of("llama")


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    # Gradients of two micro-batches are added.
    "one type": (plain_model, {}),
    "reduced per step": (plain_model, {"defer_gradient_sync": True}),
    "gathered once": (plain_model, {"reshard_after_forward": False}),
    "with parts in float32": (
        test_float32_parts.model_of,
        {"float32_names": float32_names(test_float32_parts.model_of(), torch.bfloat16)},
    ),
    "not cast": (plain_model, {"compute_dtype": None}),
}


@pytest.mark.parametrize(
    "name",
    [
        "one type",
        "reduced per step",
        "with parts in float32",
        pytest.param("gathered once", marks=pytest.mark.further),
        pytest.param("not cast", marks=pytest.mark.further),
    ],
)
def test_values_are_the_same_and_less_is_copied(name: str) -> None:
    build, settings = CASES[name]
    how = Parallelism("fsdp2", **{"compute_dtype": torch.bfloat16, **settings})

    def both() -> Any:
        return [trained(build, how, with_copies) for with_copies in (False, True)]

    [((steps, weights, num_copied), (expected_steps, expected, num_before))] = ranks.run(both, 1)
    assert steps == expected_steps
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert num_copied < 0.8 * num_before


def test_a_reduction_after_a_failed_one_gets_memory_for_itself() -> None:
    reduction = one_rank._InPlace()

    def allocated() -> torch.Tensor:
        return reduction.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))

    # Its output is never allocated.
    failed = allocated()
    del failed
    for _ in range(2):
        given = allocated()
        assert allocated() is given
        kept = given
        given = allocated()
        assert given is not kept and allocated() is given
