"""The output layer's product and the cross-entropy in one function, computed in chunks of logits, and its inputs.

For each chunk: the logits, their loss, and their gradients. From these, the gradients of the layer and of the hidden
states are computed (``head_gradients``). Afterwards the chunk is overwritten. A CPU uses torch's operations. A CUDA
device writes the logits in float32 from the matrix product, and computes loss and gradient of a chunk in a Triton
kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from automodel_ckpt.base.labels import IGNORE_INDEX
from automodel_ckpt.models.inspect.interface import autocast_dtype
from automodel_ckpt.models.loss.head_gradients import (
    CHUNK_ELEMENTS,
    WIDE_PRODUCTS,
    ErrorPlace,
    GradientSums,
    StoredErrors,
    chunk_rows,
    kernel_for,
    stores_errors,
)

_NO_COLUMN = 2**62
"""Greater than any index of a token."""


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
    """Hidden states at labeled positions, and what their loss depends on other than the layer."""

    hidden: Tensor
    """[N, H]."""
    labels: Tensor
    """The tokens [N] that they predict."""
    transform: LogitTransform = IDENTITY
    hits: TokenHits | None = None
    """Counts the labels with the highest logit, in passes without gradients."""
    part: VocabularyPart | None = None
    """The rows of the layer that this rank has; the loss is then collective. None: all of them."""


class ZLoss:
    """Adds ``coefficient * logsumexp(logits) ** 2`` to the loss of each label. Source: arXiv:2204.02311, section 5.

    The value without gradient is summed until :meth:`take`; this does not wait for the device.
    """

    def __init__(self, coefficient: float, device: torch.device) -> None:
        self.coefficient = coefficient
        self._sum = torch.zeros((), device=device)

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The z-loss of *logits* [N, V], summed over *labels* [N] other than -100; 0-dim, with a gradient."""
        return self.of_logs(torch.logsumexp(logits, dim=1), labels).sum()

    def of_logs(self, logs: Tensor, labels: Tensor) -> Tensor:
        """The z-loss [N] of each position by its logsumexp in *logs* [N]; 0 where *labels* [N] are -100."""
        return (logs.square() * self.coefficient).masked_fill(labels == IGNORE_INDEX, 0)

    def factors(self, logs: Tensor) -> Tensor:
        """What the softmax in the gradient of the cross-entropy is multiplied by for both losses: [N] for *logs* [N].

        The gradient of logsumexp is the softmax, so the gradient of its scaled square is ``2 * coefficient * logs``
        times it.
        """
        return logs.mul(2 * self.coefficient).add_(1)

    def note(self, value: Tensor) -> None:
        """Add *value*, 0-dim, to what :meth:`take` returns."""
        self._sum = self._sum + value.detach()

    def take(self) -> Tensor:
        """Return the sum of the values noted since the last call, 0-dim, and begin again."""
        value, self._sum = self._sum, torch.zeros_like(self._sum)
        return value


_FEW = 8
"""On a CPU, torch's own functions are used up to an eighth of a chunk. They have less overhead in Python."""


def widened(logits: Tensor) -> Tensor:
    """Logits in the dtype of the loss: float64 if they have it, otherwise float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    part: VocabularyPart | None = None,
    transform: LogitTransform = IDENTITY,
    hits: TokenHits | None = None,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Summed cross-entropy of ``transform(hidden [N, H] @ weight [V, H].T + bias [V])`` for targets [N]; 0-dim, at
    least float32. Rows with target -100 are ignored.

    With *part*, *weight* and *bias* are this rank's rows, and the loss covers all rows. This is collective.
    *hits* counts the positions where the target has the highest logit; only evaluation passes give it. *z_loss* is
    added, and noted there.

    Equal to ``F.cross_entropy(transform(F.linear(hidden, weight, bias).float()), targets, reduction="sum")`` except
    for the order of additions, with at most one chunk of logits in memory. With autocast, the product is computed in
    its dtype. Does not wait for the device.
    """
    device_type = hidden.device.type
    hidden, weight, bias = in_autocast_dtype(hidden, weight, bias)
    num_logits = targets.shape[0] * weight.shape[0]
    if part is None and device_type != "cuda" and _FEW * num_logits <= CHUNK_ELEMENTS["cpu"]:
        logits = transform(widened(F.linear(hidden, weight, bias)))
        if hits is not None:
            hits.add(logits, targets)
        found = F.cross_entropy(logits, targets, reduction="sum")
        if z_loss is not None:
            penalty = z_loss.of(logits, targets)
            z_loss.note(penalty)
            found = found + penalty
        return found
    rule = _CrossEntropy(targets, part, transform, hits, z_loss)
    stores = stores_errors(
        device_type,
        hidden.dtype,
        *hidden.shape,
        trains_weight=weight.requires_grad and torch.is_grad_enabled(),
    )
    # All ranks need the same number of chunks, because each chunk is a collective.
    num_columns = part.most if part is not None else weight.shape[0]
    size = chunk_rows(device_type, num_columns, stores=stores)
    return loss_in_chunks(hidden, weight, bias, rule, size, stores=stores)


@dataclass(frozen=True)
class _CrossEntropy:
    """The summed cross-entropy of chunks, for :func:`loss_in_chunks`."""

    targets: Tensor
    part: VocabularyPart | None
    transform: LogitTransform
    hits: TokenHits | None
    z_loss: ZLoss | None

    def of_chunk(
        self,
        rows: slice,
        logits: Tensor,
        dtype: torch.dtype,
        place: ErrorPlace | None,
        *,
        with_errors: bool,
    ) -> tuple[Tensor, Tensor]:
        targets = self.targets[rows]
        if self.hits is not None:
            # Before the loss, which overwrites the logits.
            self.hits.add(logits, targets, self.part)
        losses, errors = losses_and_errors(
            logits,
            targets,
            self.part,
            self.transform,
            dtype,
            with_errors=with_errors,
            z_loss=self.z_loss,
            place=place,
        )
        return losses.sum(), errors

    def loss_of(self, sums: Tensor) -> Tensor:
        return sums


def in_autocast_dtype(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs of a product to the dtype of autocast, if it is enabled; gradients have that dtype too."""
    dtype = autocast_dtype(hidden.device)
    if dtype is None:
        return hidden, weight, bias
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None


def loss_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rule: Any,
    size: int,
    *,
    stores: bool = False,
) -> Tensor:
    """The loss of ``hidden [N, H] @ weight [V, H].T + bias [V]`` by *rule*, in chunks of *size* positions; 0-dim.

    ``rule.of_chunk(rows, logits, dtype, place, with_errors=)`` returns the sums over a chunk, 0-dim or [k], and the
    gradient [n, V] in *dtype* of its loss with respect to the *logits* [n, V], which are overwritten. It is stored in
    *place*, if that is given. ``rule.loss_of(sums)`` is the loss of the sums over all chunks. *stores*: whether the
    gradients of all logits are kept, as :class:`StoredErrors` does.
    """
    return _LossInChunks.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, weight, bias, rule, size, stores, torch.is_grad_enabled()
    )


class _LossInChunks(torch.autograd.Function):
    """Computes the gradients for a loss weight of 1 together with the loss; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: Any,
        size: int,
        stores: bool,
        with_gradients: bool,
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3] if with_gradients else (False, False, False)
        kind = StoredErrors if stores else GradientSums
        gradients: GradientSums | StoredErrors = kind(hidden, weight, bias, needed)
        total: Tensor | None = None
        # Without positions, an empty chunk, so that there is a sum.
        for rows, place in list(gradients.chunks(size)) or [(slice(0, 0), None)]:
            chunk = hidden[rows]
            logits = wide_logits(chunk, weight, bias)
            sums, errors = rule.of_chunk(rows, logits, hidden.dtype, place, with_errors=any(needed))
            total = sums if total is None else total.add_(sums)
            if any(needed) and len(chunk) and isinstance(gradients, GradientSums):
                gradients.add(rows.start, chunk, errors)
            # The memory of this chunk becomes the next one's.
            del logits, errors
        if isinstance(gradients, StoredErrors):
            gradients.multiply(weight)
            ctx.save_for_backward(hidden)
        ctx.gradients = gradients
        assert total is not None
        return rule.loss_of(total)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, loss_weight: Tensor) -> tuple[Tensor | None, ...]:
        # Scaling overwrites what it reads: a second backward pass must fail, not scale twice.
        gradients, ctx.gradients = ctx.gradients, None
        found = gradients.scaled(loss_weight, *ctx.saved_tensors)
        return *found, None, None, None, None


def wide_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [n, V] of a chunk in at least float32, on a GPU without rounding them to a narrower dtype first."""
    # Without rows, for a micro-batch without labels: these products were never tried so.
    if hidden.is_cuda and hidden.dtype in WIDE_PRODUCTS and len(hidden):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)
    return widened(F.linear(hidden, weight, bias))


def losses_and_errors(
    logits: Tensor,
    labels: Tensor,
    part: VocabularyPart | None,
    transform: LogitTransform,
    dtype: torch.dtype,
    *,
    with_errors: bool,
    z_loss: ZLoss | None = None,
    place: ErrorPlace | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy [n] of *logits* [n, V], and its gradient with respect to them [n, V] in *dtype*.

    *logits* are the output of the layer in at least float32; they are overwritten. The gradient is softmax minus
    one-hot, times the slope of *transform*. Rows with label -100 have loss 0 and gradient 0. Without *with_errors*,
    the gradient is undefined. With *part*, this is collective. *z_loss* is added to the cross-entropy. With *place*,
    the gradient is stored there, and the one that is returned is undefined.
    """
    if part is None and kernel_for(logits.device.type, logits.dtype) == "triton":
        from automodel_ckpt.models.loss import loss_kernels

        losses, errors, penalties = loss_kernels.losses_and_errors(
            logits,
            labels,
            transform.scale,
            transform.cap,
            dtype,
            with_errors,
            z_coefficient=0.0 if z_loss is None else z_loss.coefficient,
            place=place,
        )
        if z_loss is not None:
            z_loss.note(penalties.sum())
        return losses, errors
    losses, errors = _by_torch(logits, labels, part, transform, z_loss)
    if place is not None:
        place.put(errors)
    elif with_errors:
        # Autograd also casts the gradient of widened logits back to the dtype of the product.
        errors = errors.to(dtype)
    return losses, errors


def _by_torch(
    logits: Tensor,
    labels: Tensor,
    part: VocabularyPart | None,
    transform: LogitTransform,
    z_loss: ZLoss | None,
) -> tuple[Tensor, Tensor]:
    """:func:`losses_and_errors` with torch's operations; the gradient has the dtype of *logits*."""
    slope: Tensor | float = 1.0
    if transform != IDENTITY:
        logits = transform(logits)
        slope = transform.slope(logits)
    # Subtracted before the exponential, which would overflow in float32 for logits above 88.
    largest = logits.amax(1, keepdim=True)
    rows = torch.arange(len(labels), device=labels.device)
    columns = labels
    if part is not None:
        part.largest(largest)
        columns = labels - part.first
    # Masks, not selected positions: on a GPU, the number of selected ones would have to be waited for.
    is_here = (columns >= 0) & (columns < logits.shape[1])
    columns = columns.clamp(0, logits.shape[1] - 1)
    # One tensor for the label's logit and the sum of exponentials, so that ranks exchange both in one collective.
    sums = torch.zeros(2, len(logits), dtype=logits.dtype, device=logits.device)
    sums[0] = (logits[rows, columns] - largest[:, 0]).masked_fill_(~is_here, 0)
    exponentials = logits.sub_(largest).exp_()
    sums[1] = exponentials.sum(1)
    if part is not None:
        part.sum(sums)
    label_logits, total = sums.unbind()
    is_ignored = labels == IGNORE_INDEX
    losses = total.log().sub_(label_logits).masked_fill_(is_ignored, 0)
    if z_loss is not None:
        # The gradient of both losses has the softmax times the factors.
        logs = total.log().add_(largest[:, 0])
        penalties = z_loss.of_logs(logs, labels)
        z_loss.note(penalties.sum())
        losses = losses.add_(penalties)
        total = total / z_loss.factors(logs)
    # An infinite sum makes all probabilities of an ignored row 0.
    exponentials.div_(total.masked_fill(is_ignored, math.inf).unsqueeze(1))
    # Correct only because no position occurs twice: indexed subtraction counts duplicates once.
    exponentials[rows, columns] -= is_here.to(logits.dtype)
    if transform != IDENTITY:
        exponentials.mul_(slope)
    return losses, exponentials
