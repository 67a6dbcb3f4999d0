"""The last layer and the loss in one, so that the logits of a whole micro-batch never exist.

Positions without a label are dropped before the layer; the others go through it and the cross-entropy in chunks, whose
gradients are computed at once. At a vocabulary of 128k the logits would be the largest tensors of a training step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from automodel_ckpt.models.probe import logits_of, undisturbed

log = logging.getLogger(__name__)

LossOf = Callable[[torch.Tensor, torch.Tensor], AbstractContextManager[None]]
""":meth:`LossHead.loss_of` of a model's head."""

CHUNK_ELEMENTS = 2**25
"""Logits that exist at a time: 128 MiB in float32."""


class LossHead(nn.Linear):
    """A model's output layer that, inside :meth:`loss_of`, returns the summed cross-entropy instead of logits.

    Elsewhere it does what the layer did that it was made of.
    """

    _labelled: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> LossHead:
        """*layer* itself, made a loss head in place: wrappers and sharding go on to know it."""
        layer.__class__ = cls
        assert isinstance(layer, LossHead)
        return layer

    @contextmanager
    def loss_of(self, positions: torch.Tensor, targets: torch.Tensor) -> Iterator[None]:
        """What the model's forward inside returns as its logits is the loss, 0-dim in float32.

        *positions* [N] are the labelled places in the flattened batch, *targets* [N] the tokens that they predict.
        """
        self._labelled = positions, targets
        try:
            yield
        finally:
            self._labelled = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H], or the loss: see :meth:`loss_of`."""
        if self._labelled is None:
            return super().forward(input)
        positions, targets = self._labelled
        if isinstance(input, DTensor):
            return self._loss_in_parts(input, positions, targets)
        hidden = input.flatten(0, -2).index_select(0, positions)
        return linear_cross_entropy(hidden, self.weight, self.bias, targets)

    def _loss_in_parts(self, input: DTensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss where tensor parallel ranks have a part of the vocabulary each; the same on all of them."""
        mesh, weight = input.device_mesh, self.weight
        assert isinstance(weight, DTensor)
        # Each rank's errors reach the hidden states through its own rows only.
        hidden = input.to_local(grad_placements=[Partial()]).flatten(0, -2).index_select(0, positions)
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else None
        _, first = Shard.local_shard_size_and_offset(len(weight), mesh.size(), mesh.get_local_rank())
        part = VocabularyPart(mesh.get_group(), first, math.ceil(len(weight) / mesh.size()))
        loss = linear_cross_entropy(hidden, weight.to_local(), bias, targets, part)
        return DTensor.from_local(loss, mesh, [Replicate()], run_check=False)


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The rows of the output layer that a rank of *group* has, from the number *first*; none has more than *most*."""

    group: dist.ProcessGroup
    first: int
    most: int

    def largest(self, values: torch.Tensor) -> None:
        """The largest of all ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def sum(self, values: torch.Tensor) -> None:
        """The sum over all ranks, in place."""
        dist.all_reduce(values, group=self.group)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of ``hidden [N, H] @ weight [V, H].T + bias [V]`` for targets [N]; 0-dim, float32.

    With *part* the weight and bias are those rows of the whole, and the loss is that of the whole: a collective.

    Like ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")`` but for the order of
    additions, with no more than a chunk of the logits at a time. Under autocast the product is in its dtype.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, part, torch.is_grad_enabled()
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients for a loss weight of 1 are computed with the loss; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        part: VocabularyPart | None,
        with_gradients: bool,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad[:3] if with_gradients else (False, False, False)
        sums = ctx.gradients = _Gradients(hidden, weight, bias, needed)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = math.ceil(CHUNK_ELEMENTS / (part.most if part is not None else weight.shape[0]))
        for start in range(0, len(targets), size):
            chunk = hidden[start : start + size]
            errors = F.linear(chunk, weight, bias).float()
            loss += _losses_of(errors, targets[start : start + size], part).sum()
            if any(needed):
                sums.add(start, chunk, errors.to(hidden.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, loss_weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(loss_weight), None, None, None


def _losses_of(logits: torch.Tensor, labels: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """The cross-entropy of each row of logits [n, V]: [n, 1]. In their memory they become the gradient with respect to
    them, softmax minus one-hot."""
    largest = logits.amax(1, keepdim=True)
    here, mine = torch.arange(len(labels), device=labels.device), labels
    if part is not None:
        part.largest(largest)
        inside = (labels >= part.first) & (labels < part.first + logits.shape[1])
        here, mine = here[inside], labels[inside] - part.first
    wanted_and_total = torch.zeros(2, len(logits), 1, dtype=logits.dtype, device=logits.device)
    wanted_and_total[0, here, 0] = logits[here, mine] - largest[here, 0]
    exponentials = logits.sub_(largest).exp_()
    wanted_and_total[1] = exponentials.sum(1, keepdim=True)
    if part is not None:
        part.sum(wanted_and_total)
    wanted, total = wanted_and_total.unbind()
    exponentials.div_(total)
    exponentials[here, mine] -= 1
    return total.log().sub_(wanted)


class _Gradients:
    """Sums over the chunks, in float32 where the parameters are shorter; None for what needs no gradient."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.factor = weight
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def add(self, start: int, part: torch.Tensor, errors: torch.Tensor) -> None:
        """A chunk's *errors* [n, V] with respect to the logits of its *part* [n, H] of the hidden states."""
        if self.hidden is not None:
            torch.mm(errors, self.factor, out=self.hidden[start : start + len(part)])
        if self.weight is not None:
            if self.weight.dtype == errors.dtype:
                self.weight.addmm_(errors.t(), part)
            else:
                self.weight += errors.t() @ part
        if self.bias is not None:
            self.bias += errors.sum(0, dtype=self.bias.dtype)

    def scaled(self, loss_weight: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients times *loss_weight*, in the types of what they belong to; the sums are used up by it."""
        sums, dtype = (self.hidden, self.weight, self.bias), self.factor.dtype
        return [None if each is None else each.mul_(loss_weight.to(each.dtype)).to(dtype) for each in sums]


def install_loss_head(
    model: nn.Module, options: Mapping[str, Any], multiple: int = 1, device: torch.device | None = None
) -> LossHead | None:
    """Make the model's output layer a :class:`LossHead`, where it gives the logits as they are.

    None, with the model unchanged, where it has no such layer or does more to the logits (scales or caps them), which
    a few tokens (a number of them divisible by *multiple*) through the model, on *device* (the layer's) and with
    *options*, show.
    """
    transformers_model: Any = model
    layer = transformers_model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(layer) is not nn.Linear or _is_cut_across(layer):
        return None
    tokens = torch.tensor([[1, 2, 3, 1] * multiple], device=device or layer.weight.device)
    if not _gives_the_logits(model, layer, tokens, options):
        return None
    return LossHead.of(layer)


def _is_cut_across(layer: nn.Linear) -> bool:
    """Whether tensor parallel ranks have columns of the weight, not rows (tokens of the vocabulary)."""
    weight = layer.weight
    if not isinstance(weight, DTensor) or "tp" not in (weight.device_mesh.mesh_dim_names or ()):
        return False
    return weight.placements[-1] not in (Shard(0), Replicate())


def _gives_the_logits(model: nn.Module, layer: nn.Linear, tokens: torch.Tensor, options: Mapping[str, Any]) -> bool:
    outputs: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output.clone()))
    try:
        with undisturbed(model):
            output = model(input_ids=tokens, **options)
    except Exception as error:
        log.debug("the model cannot be asked about its output layer: %s: %s", type(error).__name__, error)
        return False
    finally:
        hook.remove()
    logits = logits_of(output)
    return len(outputs) == 1 and logits.shape == outputs[0].shape and torch.equal(logits, outputs[0].to(logits.dtype))
