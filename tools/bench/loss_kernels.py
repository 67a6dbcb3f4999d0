"""Compare implementations of the output layer's cross-entropy on a device: time, memory and error of the gradients.

Rows: the three matrix products of a linear layer alone, full logits, this project's chunks with each entry of KERNELS
(models/loss/head_gradients.py), PyTorch's linear_cross_entropy, Liger and cut-cross-entropy where they are installed.
The layer trains or is frozen. Errors are relative to a computation in float32. The part ``head`` of ``make gpu`` runs
it. After a measurement on a GPU, put the fastest that is as exact first in KERNELS.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_ckpt.models.loss.fused_cross_entropy import linear_cross_entropy
from automodel_ckpt.models.loss.head_gradients import KERNELS, kernel_for

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``loss(hidden [N, H], weight [V, H], targets [N])`` -> summed cross-entropy, 0-dim."""
Figures = dict[str, Any]
FULL = "full logits"
PRODUCTS = "matrix products"


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits in the dtype of the layer, and the loss in float32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """This project's chunks, with the first entry of KERNELS."""
    return linear_cross_entropy(hidden, weight, None, targets)


def by_pytorch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's own chunks, in torch 2.13 and later."""
    function: Any = F.linear_cross_entropy
    loss: Tensor = function(hidden, weight, targets, reduction="sum")
    return loss


def by_liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger's chunks, with the weight's gradient accumulated in float32."""
    from liger_kernel.transformers import functional

    loss: Tensor = functional.liger_fused_linear_cross_entropy(
        hidden, weight, targets, reduction="sum", accum_dtype=torch.float32
    )
    return loss


def by_cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Apple's kernels, which store no logits. All gradients are computed, also small ones."""
    import cut_cross_entropy

    loss: Tensor = cut_cross_entropy.linear_cross_entropy(
        hidden, weight, targets, reduction="sum", filter_eps=None
    )
    return loss


def implementations(device: str) -> dict[str, Loss]:
    """What can run on *device*, by name."""
    found: dict[str, Loss] = {FULL: full_logits}
    for kernel in KERNELS[device]:
        with preferring(device, kernel):
            if kernel_for(device, torch.float32) == kernel:
                found[f"ours, {kernel}"] = ours
    if hasattr(F, "linear_cross_entropy"):
        found["PyTorch"] = by_pytorch
    if device == "cuda" and find_spec("liger_kernel"):
        found["Liger"] = by_liger
    if device == "cuda" and find_spec("cut_cross_entropy"):
        found["cut-cross-entropy"] = by_cut_cross_entropy
    return found


@contextmanager
def preferring(device: str, kernel: str) -> Iterator[None]:
    """Let this project's function use *kernel* on *device*."""
    before = KERNELS[device]
    KERNELS[device] = (kernel,)
    try:
        yield
    finally:
        KERNELS[device] = before


def compare(
    device: str, vocabulary: int, hidden_size: int, num_tokens: int, *, trains: bool, rounds: int
) -> dict[str, Figures]:
    """Measure each implementation with random values in bfloat16. Returns its figures by name.

    An implementation that fails has the figure ``error``.
    """
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"device": device, "generator": generator, "dtype": torch.bfloat16}
    hidden = torch.randn(num_tokens, hidden_size, **options)
    weight = torch.randn(vocabulary, hidden_size, **options).mul_(hidden_size**-0.5)
    targets = torch.randint(0, vocabulary, (num_tokens,), device=device, generator=generator)
    product_seconds = median_seconds(_products(hidden, weight, trains), device, rounds)
    figures: dict[str, Figures] = {PRODUCTS: {"seconds": product_seconds}}
    exact = _gradients(ours, hidden.float(), weight.float(), targets, trains)
    for name, loss in implementations(device).items():
        kernel = name.removeprefix("ours, ")
        preferred = KERNELS[device] if kernel == name else (kernel,)
        with preferring(device, preferred[0]):
            try:
                figures[name] = _measure(loss, hidden, weight, targets, trains, exact, rounds)
            except Exception as error:
                figures[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
        figures[name]["time_in_products"] = figures[name]["seconds"] / product_seconds
        of_full = figures[FULL].get("bytes")
        if of_full and "bytes" in figures[name]:
            figures[name]["memory_in_full_logits"] = figures[name]["bytes"] / of_full
    return figures


def _measure(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    trains: bool,
    exact: list[Tensor],
    rounds: int,
) -> Figures:
    device = hidden.device.type

    def step() -> None:
        _gradients(loss, hidden, weight, targets, trains)

    figures: Figures = {"seconds": median_seconds(step, device, rounds)}
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        figures["bytes"] = torch.cuda.max_memory_allocated() - before
    gradients = _gradients(loss, hidden, weight, targets, trains)
    for name, gradient, reference in zip(("hidden", "weight"), gradients, exact, strict=False):
        difference = (gradient.float() - reference).norm() / reference.norm()
        figures[f"error_{name}"] = difference.item()
    return figures


def _gradients(
    loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor, trains: bool
) -> list[Tensor]:
    inputs = [hidden.detach().requires_grad_()]
    layer = weight.detach()
    if trains:
        inputs.append(layer.requires_grad_())
    mean = loss(inputs[0], layer, targets) / len(targets)
    return list(torch.autograd.grad(mean, inputs))


def _products(hidden: Tensor, weight: Tensor, trains: bool) -> Callable[[], None]:
    """The matrix products of a linear layer forward and backward: two, or three if it trains."""
    errors = torch.randn(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)

    def products() -> None:
        torch.mm(hidden, weight.t(), out=errors)
        _ = errors @ weight
        if trains:
            _ = errors.t() @ hidden

    return products


def median_seconds(function: Callable[[], None], device: str, rounds: int) -> float:
    """The median of *rounds* calls after two that do not count."""
    measured = []
    for number in range(rounds + 2):
        started = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            measured.append(time.perf_counter() - started)
    return statistics.median(measured)
