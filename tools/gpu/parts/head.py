"""The loss head: its time beside its three matrix products, and its memory beside that of full logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tools.gpu.parts.ceilings import seconds_of
from tools.gpu.session import Figures, PartRun


def run(part: PartRun) -> None:
    """4,096 and 8,192 tokens of an 8B model, all with labels, and a tenth of them."""
    is_small = part.session.is_dry_run
    vocabulary, hidden = (512, 64) if is_small else (128_256, 4096)
    for tokens in (64, 128) if is_small else (4096, 8192):
        for labelled in (1.0, 0.1):
            name = f"{tokens} tokens, {labelled:.0%} labels"
            part.measure(
                name, _head, name, part.session.device, vocabulary, hidden, tokens, labelled,
                limit=60,
            )  # fmt: skip


def _head(
    name: str, device: str, vocabulary: int, hidden: int, tokens: int, labelled: float
) -> Figures:
    """Forward and backward of our head, of full logits, and the three products alone, in bfloat16."""
    import torch

    from automodel_ckpt.models.loss_head import LossHead
    from automodel_ckpt.training.loss import labelled_positions, next_token_loss

    torch.manual_seed(0)
    dtype = torch.bfloat16
    head = LossHead(hidden, vocabulary, bias=False).to(device, dtype)
    states = torch.randn(1, tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens), device=device)
    labels[:, : int(tokens * (1 - labelled))] = -100

    def ours() -> None:
        head.weight.grad = states.grad = None
        with head.computing_loss(*labelled_positions(labels)) as loss_pass:
            loss = loss_pass.loss_in(head(states))
        torch.autograd.backward(loss)

    def full_logits() -> None:
        head.weight.grad = states.grad = None
        torch.autograd.backward(next_token_loss(head(states), labels))

    weight = head.weight.detach()
    flat = states.detach()[0, : max(int(tokens * labelled), 1)]
    products = partial(_products, flat, weight, torch.randn_like(flat @ weight.T))
    product_seconds = seconds_of(products, device, 5)
    # It holds a gradient as large as the logits.
    del products
    figures: dict[str, Any] = {"products_seconds": product_seconds}
    for kind, function in (("ours", ours), ("full_logits", full_logits)):
        head.weight.grad = states.grad = None
        figures[f"{kind}_bytes"] = _extra_bytes(function, device)
        figures[f"{kind}_seconds"] = seconds_of(function, device, 5)
    figures["time_in_products"] = figures["ours_seconds"] / product_seconds
    figures["memory_in_full_logits"] = figures["ours_bytes"] / max(figures["full_logits_bytes"], 1)
    yield name, figures


def _products(states: Any, weight: Any, gradient: Any) -> None:
    """The products of a linear layer: forward, gradient of the input, gradient of the weight."""
    _ = states @ weight.T
    _ = gradient @ weight
    _ = gradient.T @ states


def _extra_bytes(function: Callable[[], None], device: str) -> int:
    """The peak of the device's memory in a call, beyond what was allocated before it; 0 on a CPU."""
    import torch

    if device != "cuda":
        function()
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
