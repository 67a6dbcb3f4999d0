"""8-bit moments, and bfloat16 weights with further bits, on a GPU: both kinds of updates beside that of the CPU."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.optim import adam8bit
from automodel_ckpt.optim.adam8bit import AdamW8bit, joined
from tests.support.gpu import DEVICE, HAS_GPU, needs_gpu

RATE = 1e-3
NUM_STEPS = 5
HAS_KERNEL = HAS_GPU and importlib.util.find_spec("triton") is not None
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="the kernel needs a GPU and Triton")
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of elements that the kernel updates; it has to run on a GPU where Triton is installed."""
    sizes: list[int] = []
    if not HAS_KERNEL:
        return sizes
    kernel = adam8bit._row_kernel(torch.device("cuda", torch.cuda.current_device()))
    assert kernel is not None
    update = kernel.update

    def counted(rows: list[torch.Tensor], *others: Any) -> None:
        sizes.append(rows[0].numel())
        update(rows, *others)

    monkeypatch.setattr(kernel, "update", counted)
    return sizes


def after_steps(
    device: torch.device | str, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A parameter [...] of *dtype*, its float32 weights and its state after some steps, on the CPU."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(shape, generator=generator).bfloat16()
    parameter = nn.Parameter(start.to(device, dtype))
    optimizer = AdamW8bit([parameter], lr=RATE, min_elements=1024, float32_weights=True)
    for _ in range(NUM_STEPS):
        gradient = torch.randn(shape, generator=generator).bfloat16()
        parameter.grad = gradient.to(device, dtype)
        optimizer.step()
    state = {name: value.cpu() for name, value in optimizer.state[parameter].items()}
    values, bits = parameter.detach().cpu(), state.get("further_bits")
    return values, values if bits is None else joined(values, bits), state


@needs_gpu
@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "compiled"])
@pytest.mark.parametrize("shape", [(48, 1024), (52, 96), (300,)], ids=["matrix", "short", "vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weights_are_those_of_the_cpu(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    has_kernel: bool,
    updated: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernel:
        if os.environ.get("TRITON_INTERPRET") == "1":
            pytest.skip("the interpreter needs minutes for a search")
        monkeypatch.setattr(adam8bit, "_row_kernel", lambda device: None)
    _, expected, expected_state = after_steps("cpu", dtype, shape)
    values, found, state = after_steps(DEVICE, dtype, shape)
    if HAS_KERNEL:
        is_matrix = len(shape) > 1
        num_updates = NUM_STEPS if has_kernel and is_matrix else 0
        assert updated == [values.numel()] * num_updates
    # A moment between two codes can get the other one, and its weight a part of an update.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2 * RATE)
    assert (found - expected).abs().mean() < 0.002 * RATE
    # The middle between two bfloat16 values is rounded away from 0.
    is_rounded = values == found.to(dtype)
    assert is_rounded.float().mean() > 0.999
    for moment in MOMENTS:
        if f"{moment}_codes" not in state:
            continue
        # Of the moments of the last step, some differ by a code, and with them those of later steps.
        codes, others = (each[f"{moment}_codes"].int() for each in (state, expected_state))
        assert (codes != others).float().mean() < 0.002
        scales, others = (each[f"{moment}_scales"] for each in (state, expected_state))
        torch.testing.assert_close(scales, others, rtol=0.01, atol=0)
        assert ((scales - others).abs() > 1e-5 * others).float().mean() < 0.02


@needs_kernel
def test_other_settings_do_not_compile_again_and_no_step_waits(updated: list[int]) -> None:
    from automodel_ckpt.optim import adam8bit_kernel

    def num_compiled() -> int:
        caches = getattr(adam8bit_kernel._update, "device_caches", {})
        return sum(len(cache[0]) for cache in caches.values())

    parameter = nn.Parameter(torch.randn(64, 1024, device="cuda"))
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamW8bit([parameter], lr=RATE)
    optimizer.step()
    before = num_compiled()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            # Moments with betas below 1/2 have a kernel compiled for them.
            betas = (0.6 + 0.1 * number, 0.9)
            changes = {"lr": 1e-4 * number, "betas": betas, "eps": 10.0**-number}
            optimizer.param_groups[0].update(changes)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert num_compiled() == before
    assert len(updated) == 4


@needs_kernel
def test_elements_beyond_numbers_of_32_bits_are_updated(updated: list[int]) -> None:
    num_rows = 2**31 // 2**14 + 3
    # Weights, gradients and codes, and the codes of the optimizer's beginning.
    if torch.cuda.mem_get_info()[0] < 10 * num_rows * 2**14:
        pytest.skip("too little memory of the GPU is free")
    parameter = nn.Parameter(torch.ones(num_rows, 2**14, dtype=torch.bfloat16, device="cuda"))
    parameter.grad = torch.zeros_like(parameter)
    last = parameter.grad[-2:]
    last.copy_(torch.randn(last.shape))
    small = nn.Parameter(parameter.detach()[-2:].clone())
    small.grad = last.clone()
    optimizer = AdamW8bit([parameter, small], lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert updated == [parameter.numel(), small.numel()]
    assert torch.equal(parameter[-2:], small)
    states = [optimizer.state[each] for each in (parameter, small)]
    for name in ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales"):
        assert torch.equal(states[0][name][-2:], states[1][name])
    decayed = torch.full((), 0.99, device="cuda").bfloat16()
    assert (parameter[:-2] == decayed).all()
