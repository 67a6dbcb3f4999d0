"""Attention within documents, and the loss of a large vocabulary: kernels against definitions in float32."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from automodel_ckpt.models.attention.documents import Documents, document_kernel
from automodel_ckpt.models.loss.fused_cross_entropy import (
    IDENTITY,
    LogitTransform,
    linear_cross_entropy,
)
from automodel_ckpt.models.loss.head_gradients import KERNELS
from tests.support.gpu import HAS_GPU, both_devices, only_gpu
from tools.bench.loss_kernels import preferring

RUNS = ((70, 2), (1, 3), (129, 1), (40, 1))
ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 32},
    "scale": {"scaling": 0.25},
}


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether the relative error, over all elements, is below a tolerance; not a number never is."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return bool(error < tolerance)


@pytest.mark.parametrize("heads_of_keys", [4, 2])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("device", both_devices())
def test_the_kernel_computes_attention_within_documents_and_its_gradients(
    device: Any, name: str, heads_of_keys: int
) -> None:
    torch.manual_seed(0)
    options = dict(ATTENTION[name])
    window = options.pop("window", None)
    num_tokens = sum(length * count for length, count in RUNS)
    shapes = [(1, 4, num_tokens, 64), *[(1, heads_of_keys, num_tokens, 64)] * 2]
    inputs = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    documents = Documents(RUNS, window, torch.device(device))
    exact_inputs = [each.detach().float().requires_grad_() for each in inputs]
    exact = F.scaled_dot_product_attention(
        *exact_inputs, documents.mask, scale=options.get("scaling"), enable_gqa=True
    ).transpose(1, 2)
    cotangent = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, exact_inputs, cotangent)
    kernel = document_kernel(device)
    if kernel is None:
        pytest.skip("torch 2.10: the mask")
    assert not kernel.unsupported(inputs[0], inputs[2], options)
    output = kernel.attend(*inputs, kernel.prepare(documents), options)
    found = torch.autograd.grad(output, inputs, cotangent.bfloat16())
    assert close(output, exact, 2e-2)
    for gradient, reference in zip(found, expected, strict=True):
        assert close(gradient, reference, 2e-2)


TRANSFORMS = {
    "plain": IDENTITY,
    "scaled": LogitTransform(scale=0.5),
    "capped": LogitTransform(cap=8.0),
}


TRAINED = {
    "frozen": None,
    # Gradients of logits are stored up to twice the size of a hidden state: beside the weight's gradient, and in more
    # memory than it has.
    "trained, few": 0.7,
    "trained, more": 1.7,
    "trained, summed": 3.0,
}
"""Tokens per element of a hidden state."""


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("device", both_devices())
def test_each_kernel_of_the_loss_has_the_gradients_of_full_logits_in_float32(
    device: Any, transform: str, trained: str
) -> None:
    torch.manual_seed(0)
    tokens_per_element = TRAINED[trained]
    trains = tokens_per_element is not None
    vocabulary, hidden_size = (128_256, 1024) if HAS_GPU else (3000, 32)
    num_tokens = int(hidden_size * (tokens_per_element or 3))
    change = TRANSFORMS[transform]
    hidden = torch.randn(num_tokens, hidden_size, device=device).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, device=device).mul_(hidden_size**-0.5).bfloat16()
    targets = torch.randint(0, vocabulary, (num_tokens,), device=device)
    targets[::7] = -100
    inputs = [hidden, weight.requires_grad_()] if trains else [hidden]
    logits = change(hidden.float() @ weight.float().T)
    exact = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    expected = torch.autograd.grad(exact, inputs)
    del logits
    for kernel in KERNELS[device]:
        with preferring(device, kernel):
            loss = linear_cross_entropy(hidden, weight, None, targets, transform=change)
            found = torch.autograd.grad(loss, inputs)
        assert close(loss, exact, 1e-3), kernel
        for gradient, reference in zip(found, expected, strict=True):
            assert close(gradient, reference, 2e-2), kernel


@only_gpu
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kernel", KERNELS["cuda"])
@pytest.mark.parametrize("hidden_size", [64, 2048], ids=["summed", "stored"])
def test_the_loss_of_several_chunks_does_not_wait_for_the_device(
    hidden_size: int, kernel: str, transform: str
) -> None:
    hidden = torch.randn(4096, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(128_256, hidden_size, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(0, len(weight), (4096,), device="cuda")
    change = TRANSFORMS[transform]
    with preferring("cuda", kernel):
        # Compiles the kernels, which can wait.
        linear_cross_entropy(hidden, weight, None, targets, transform=change).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_cross_entropy(hidden, weight, None, targets, transform=change).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
