"""FSDP2 on one rank casts parameters and gradients with one copy each: the same values, and less memory traffic."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from automodel_ckpt.parallel import fsdp_groups
from tests.support import ranks


class Layers(nn.Module):
    """A frozen layer, one that only some inputs use, and one that is used twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.sometimes = nn.Linear(6, 6, bias=False, dtype=dtype)
        self.twice = nn.Linear(6, 6, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.twice(self.frozen(inputs))
        if inputs.shape[0] > 2:
            hidden = self.sometimes(hidden)
        result: torch.Tensor = self.twice(hidden)
        return result


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gradients_of(
    prepare: Callable[[FSDPModule], object],
    with_copies: bool,
    dtype: torch.dtype = torch.float32,
    policy: MixedPrecisionPolicy = BFLOAT16,
    is_reduced: Sequence[bool] = (True, True, True),
    device: str = "cpu",
    offload: OffloadPolicy | None = None,
) -> list[dict[str, torch.Tensor | None]]:
    """The gradients after each of a few micro-batches, of which some are not reduced."""
    model = Layers(dtype)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": policy,
        "offload_policy": offload or OffloadPolicy(),
    }
    for layer in (model.frozen, model.sometimes, model.twice):
        fully_shard(layer, **options)
    sharded: Any = fully_shard(model, **options)
    if not with_copies:
        fsdp_groups.cast_without_copies(sharded)
    prepare(sharded)
    if offload is None:
        sharded.to(device)
    found: list[dict[str, torch.Tensor | None]] = []
    generator = torch.Generator().manual_seed(0)
    for number, is_last in enumerate(is_reduced):
        sharded.set_requires_gradient_sync(is_last)
        inputs = torch.randn(2 + number % 2, 6, generator=generator)
        outputs = sharded(inputs.to(device, policy.param_dtype or dtype))
        outputs.square().sum().backward()
        of_parameters: dict[str, torch.Tensor | None] = {}
        for name, parameter in sharded.named_parameters():
            gradient = parameter.grad
            of_parameters[name] = None if gradient is None else gradient.to_local().cpu().clone()
        found.append(of_parameters)
    return found


def nothing(_model: FSDPModule) -> None:
    pass


def divide(model: FSDPModule) -> None:
    module: Any = model
    for part in module.modules():
        part.set_gradient_divide_factor(3.0)


ROUNDED_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
SETTINGS: dict[str, tuple[Callable[[FSDPModule], object], dict[str, Any]]] = {
    "by default": (nothing, {}),
    "some not reduced": (nothing, {"is_reduced": (True, False, False, True, True)}),
    "in one type": (nothing, {"policy": MixedPrecisionPolicy()}),
    "weights in bfloat16": (nothing, {"dtype": torch.bfloat16}),
    # Sums in float32 are rounded, and then added.
    "weights in bfloat16, some not reduced": (
        nothing,
        {"dtype": torch.bfloat16, "is_reduced": (True, False, False, True, True)},
    ),
    "reduced in bfloat16": (nothing, {"policy": ROUNDED_SUMS}),
    "divided": (divide, {}),
}


ON_THE_HOST: dict[str, tuple[Callable[[FSDPModule], object], dict[str, Any]]] = {
    "on the host": (nothing, {"offload": CPUOffloadPolicy()}),
    "on the host, in one type": (
        nothing,
        {"offload": CPUOffloadPolicy(), "policy": MixedPrecisionPolicy()},
    ),
}
"""Settings that need an accelerator."""


def all_gradients(names: Sequence[str], device: str) -> dict[str, Any]:
    """The gradients with each setting that this version of torch has, and those of fsdp2."""
    found: dict[str, Any] = {}
    for name in names:
        prepare, arguments = (SETTINGS | ON_THE_HOST)[name]
        try:
            found[name] = [
                gradients_of(prepare, each, device=device, **arguments) for each in (False, True)
            ]
        except pytest.skip.Exception:
            continue
    return found


def check_equal(found: dict[str, Any]) -> None:
    """Compare what :func:`all_gradients` returns."""
    assert "divided" in found
    for name, (given, expected) in found.items():
        assert [each.keys() for each in given] == [each.keys() for each in expected]
        for gradients, those_of_fsdp2 in zip(given, expected, strict=True):
            for key, gradient in those_of_fsdp2.items():
                assert (gradient is None) == (gradients[key] is None), (name, key)
                if gradient is not None:
                    assert torch.equal(gradients[key], gradient), (name, key)


def test_gradients_are_those_of_fsdp2_with_all_settings() -> None:
    [found] = ranks.run(all_gradients, 1, list(SETTINGS), "cpu")
    check_equal(found)


def test_gradients_are_not_in_memory_that_the_next_step_overwrites() -> None:
    def kept() -> bool:
        mesh = init_device_mesh("cpu", (1,))
        model: Any = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
        fsdp_groups.cast_without_copies(model)
        # As the output of a CUDA graph: autograd does not see that its memory has another owner.
        memory = torch.empty(4, 4)
        model.unshard()
        model.weight.register_hook(lambda gradient: memory.copy_(gradient).detach())
        model(torch.ones(2, 4)).sum().backward()
        gradient = model.weight.grad.to_local()
        before = gradient.clone()
        memory.zero_()
        return bool(before.all()) and torch.equal(gradient, before)

    assert ranks.run(kept, 1) == [True]
