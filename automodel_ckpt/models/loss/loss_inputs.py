"""What the losses of a loss head are computed from: labeled hidden states, and the layer that makes logits of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_ckpt.base.kernel_trial import has_triton, succeeds

_NO_COLUMN = 2**62
"""Greater than any index of a token."""
KERNELS = {"cuda": ("triton", "torch"), "cpu": ("torch",)}
"""What computes them, by type of device. The first that is installed is used.

tools/bench/loss_kernels.py compares them on a device.
"""


class TokenHits:
    """Counts the positions where the label has the highest logit; it does not wait for the device before the end.

    Of several equal logits, the first one counts as the highest, as in ``torch.argmax``.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, labels: Tensor, part: VocabularyPart | None = None) -> None:
        """Count the positions of *logits* [N, V] where one of *labels* [N] has the highest logit; label -100 is
        ignored.

        A positive scale and a cap by tanh do not change which logit is the highest, so they can be left out. With
        *part*, the columns are this rank's. This is collective, and all ranks get the same count.
        """
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        largest, predicted = logits.detach().max(dim=1)
        if part is not None:
            overall = largest.clone()
            part.largest(overall)
            is_here = largest == overall
            predicted = torch.where(is_here, predicted + part.first, _NO_COLUMN)
            part.smallest(predicted)
        self._count += (predicted == labels).sum()

    @property
    def count(self) -> Tensor:
        """The count so far, 0-dim on the device."""
        return self._count

    def read(self) -> int:
        """Wait for the device, and return the count."""
        return int(self._count.item())


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's rows of the output layer, from row *first*. Each rank of *group* has at most *most* rows."""

    group: dist.ProcessGroup
    first: int
    most: int

    def largest(self, values: Tensor) -> None:
        """Replace *values* by their maximum over all ranks."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def smallest(self, values: Tensor) -> None:
        """Replace *values* by their minimum over all ranks."""
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)

    def sum(self, values: Tensor) -> None:
        """Replace *values* by their sum over all ranks."""
        dist.all_reduce(values, group=self.group)

    def gather(self, columns: Tensor) -> Tensor:
        """The *columns* [n, most] of all ranks in their order, [n, most * ranks]."""
        columns = columns.contiguous()
        found = [torch.empty_like(columns) for _ in range(self.group.size())]
        dist.all_gather(found, columns, group=self.group)
        return torch.cat(found, dim=1)


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the output of its last layer: multiply it by *scale*, then cap it at *cap* with tanh.

    The logits are ``cap * tanh(scale * output / cap)``; without a cap, ``scale * output``.
    """

    scale: float = 1.0
    cap: float | None = None

    @property
    def is_identity(self) -> bool:
        """Whether the logits are the output itself."""
        return self.scale == 1 and self.cap is None

    def __call__(self, output: Tensor) -> Tensor:
        """The logits for the *output* of the layer; the same tensor if nothing changes."""
        logits = output if self.scale == 1 else output * self.scale
        if self.cap is None:
            return logits
        return torch.tanh(logits / self.cap) * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of *logits* with respect to the output of the layer."""
        if self.cap is None:
            return self.scale
        return (logits / self.cap).square_().neg_().add_(1).mul_(self.scale)


IDENTITY = LogitTransform()


class Labeled(NamedTuple):
    """Hidden states at labeled positions, and what their loss depends on beside the layer."""

    hidden: Tensor
    """[N, H]."""
    labels: Tensor
    """The tokens [N] that they predict."""
    transform: LogitTransform = IDENTITY
    hits: TokenHits | None = None
    """Counts the labels with the highest logit, in passes without gradients."""
    part: VocabularyPart | None = None
    """The rows of the layer that this rank has; the loss is then collective. None: all of them."""


def kernel_for(device_type: str, logits_dtype: torch.dtype) -> str:
    """The entry of :data:`KERNELS` that computes losses of chunks: ``triton`` or ``torch``."""
    for name in KERNELS.get(device_type, KERNELS["cpu"]):
        if name != "triton":
            return name
        # The kernels compute in float32.
        if logits_dtype != torch.float32:
            continue
        if device_type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            # The forecast of a GPU elsewhere, by PyTorch for CPUs. PyTorch for CUDA depends on Triton.
            return name
        # Not tried before this process uses a GPU.
        if has_triton() and (not torch.cuda.is_initialized() or try_kernels()):  # type: ignore[no-untyped-call]
            return name
    return "torch"


@functools.cache
def try_kernels() -> bool:
    """Run a kernel once on the GPU. Logs the reason, and returns False, if it fails."""

    def trial() -> None:
        from automodel_ckpt.models.loss import loss_kernels

        logits = torch.zeros(1, 2, device="cuda")
        labels = torch.zeros(1, dtype=torch.int64, device="cuda")
        loss_kernels.losses_and_errors(logits, labels, 1.0, None, torch.float32, True)

    return succeeds(trial, "the loss is computed")
