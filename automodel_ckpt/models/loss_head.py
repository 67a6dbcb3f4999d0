"""The last layer and the loss in one, so that the logits of a whole micro-batch never exist.

Positions without a label are dropped before the layer; the others go through it and the cross-entropy in chunks, whose
gradients are computed at once. At a vocabulary of 128k the logits would be the largest tensors of a training step.
A layer that is more than a matrix (with an adapter on it) is asked for the logits of each chunk again in the backward
pass.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from automodel_ckpt.models.forward import (
    class_and_message,
    last_layer_output,
    logits_of,
    side_effect_free,
)

log = logging.getLogger("automodel_ckpt")

CHUNK_ELEMENTS = 2**25
"""Logits that exist at a time: 128 MiB in float32."""
_FEW = 8
"""Of an eighth of a chunk torch computes the loss alone: a function of one's own costs Python's time in each step."""


_SMALL = 2**18
"""Logits that are all computed, with or without a label: picking out some costs Python's time in each step."""


class ComputesLoss:
    """An output layer that returns the summed cross-entropy inside :meth:`computing_loss`; elsewhere, logits.

    Why not call the backbone, then a head: FSDP2 gathers the root's parameters before the root's forward pass and puts
    its backward hooks on what that returns; DDP prepares its reduction there, and peft and multimodal models do more in
    it. So the root module is called, and its output layer returns the loss, which :meth:`LossPass.loss_in` takes from
    the model's output.
    """

    _labeled: tuple[torch.Tensor | None, torch.Tensor] | None = None

    @property
    def all_up_to(self) -> int:
        """The number of positions up to which :meth:`computing_loss` takes all positions, labeled or not."""
        return 0

    def computing_loss(self, positions: torch.Tensor | None, targets: torch.Tensor) -> LossPass:
        """Let the forward passes of the model inside the context compute a loss instead of logits.

        *positions* [N] are the labeled positions in the flattened batch, *targets* [N] the tokens that they predict.
        None stands for all positions of a batch of at most :attr:`all_up_to`; there -100 is no target.
        """
        return LossPass(self, positions, targets)


class LossPass(AbstractContextManager["LossPass"]):
    """A forward pass that computes a loss. A class, since a generator takes three times as long, in each step."""

    def __init__(
        self, head: ComputesLoss, positions: torch.Tensor | None, targets: torch.Tensor
    ) -> None:
        self._head, self._labeled = head, (positions, targets)

    def __enter__(self) -> LossPass:
        _set_past_torch(self._head, "_labeled", self._labeled)
        return self

    def __exit__(self, *_: object) -> None:
        _set_past_torch(self._head, "_labeled", None)

    def loss_in(self, output: Any) -> torch.Tensor:
        """The summed loss, 0-dim in float32 or float64, in what the model returned inside the context."""
        return last_layer_output(output)


_set_past_torch = object.__setattr__
"""A module looks first whether a value is a parameter or a module, six times as long, twice in each step."""


class LossHead(ComputesLoss, nn.Linear):
    """A plain linear layer with a loss."""

    @classmethod
    def of(cls, layer: nn.Linear) -> LossHead:
        """*layer* itself, made a loss head in place: wrappers and sharding go on to know it."""
        layer.__class__ = cls
        assert isinstance(layer, LossHead)
        return layer

    @property
    def all_up_to(self) -> int:
        """See :attr:`ComputesLoss.all_up_to`."""
        return 0 if isinstance(self.weight, DTensor) else _SMALL // self.weight.shape[0]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H], or the loss: see :meth:`computing_loss`."""
        if self._labeled is None:
            return super().forward(input)
        positions, targets = self._labeled
        if isinstance(input, DTensor):
            assert positions is not None
            return self._loss_in_parts(input, positions, targets)
        hidden = input.flatten(0, -2)
        if positions is not None:
            hidden = hidden.index_select(0, positions)
        return linear_cross_entropy(hidden, self.weight, self.bias, targets)

    def _loss_in_parts(
        self, input: DTensor, positions: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """The loss where tensor parallel ranks have a part of the vocabulary each; the same on all of them."""
        mesh, weight = input.device_mesh, self.weight
        assert isinstance(weight, DTensor)
        # Each rank's errors reach the hidden states through its own rows only.
        hidden = (
            input.to_local(grad_placements=[Partial()]).flatten(0, -2).index_select(0, positions)
        )
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else None
        _, first = Shard.local_shard_size_and_offset(
            len(weight), mesh.size(), mesh.get_local_rank()
        )
        part = VocabularyPart(mesh.get_group(), first, math.ceil(len(weight) / mesh.size()))
        loss = linear_cross_entropy(hidden, weight.to_local(), bias, targets, part)
        return DTensor.from_local(loss, mesh, [Replicate()], run_check=False)


class ModuleLossHead(ComputesLoss):
    """Any other layer with a loss, such as a linear one with an adapter. :func:`_with_loss` joins it to their class."""

    _vocabulary = 1

    @classmethod
    def of(cls, layer: nn.Module, vocabulary: int) -> ModuleLossHead:
        """*layer* itself, made a loss head in place; it gives the logits of *vocabulary* tokens."""
        kind: Any = type(layer)
        layer.__class__ = _with_loss(kind)
        assert isinstance(layer, ModuleLossHead)
        layer._vocabulary = vocabulary
        return layer

    def forward(self, input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H], or the loss: see :meth:`computing_loss`."""
        layer: Any = super()
        if self._labeled is None:
            return layer.forward(input, *args, **options)  # type: ignore[no-any-return]
        positions, targets = self._labeled
        assert positions is not None

        def loss_of_chunk(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(
                _widened(layer.forward(hidden, *args, **options)), labels, reduction="sum"
            )

        hidden = input.flatten(0, -2).index_select(0, positions)
        size = math.ceil(CHUNK_ELEMENTS / self._vocabulary)
        chunks = zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
        losses = [checkpoint(loss_of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(losses).sum()


@functools.cache
def _with_loss(layer_class: Any) -> Any:
    return type(f"{layer_class.__name__}WithLoss", (ModuleLossHead, layer_class), {})


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


def _widened(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32, or in float64 where they are: what a loss is computed in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of ``hidden [N, H] @ weight [V, H].T + bias [V]`` for targets [N]; 0-dim, at least float32.

    With *part* the weight and bias are those rows of the whole, and the loss is that of the whole: a collective.

    Like ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")`` but for the order of
    additions, with no more than a chunk of the logits at a time. Under autocast the product is in its dtype.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = (
            hidden.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
        )
    if part is None and _FEW * targets.shape[0] * weight.shape[0] <= CHUNK_ELEMENTS:
        return F.cross_entropy(_widened(F.linear(hidden, weight, bias)), targets, reduction="sum")
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
        loss = torch.zeros(
            (), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
        )
        size = math.ceil(CHUNK_ELEMENTS / (part.most if part is not None else weight.shape[0]))
        for start in range(0, len(targets), size):
            chunk = hidden[start : start + size]
            errors = _widened(F.linear(chunk, weight, bias))
            loss += _losses_of(errors, targets[start : start + size], part).sum()
            if any(needed):
                sums.add(start, chunk, errors.to(hidden.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, loss_weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(loss_weight), None, None, None


def _losses_of(
    logits: torch.Tensor, labels: torch.Tensor, part: VocabularyPart | None
) -> torch.Tensor:
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
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needed: tuple[bool, ...],
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
        return [
            None if each is None else each.mul_(loss_weight.to(each.dtype)).to(dtype)
            for each in sums
        ]


def install_loss_head(
    model: nn.Module,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
) -> LossHead | ModuleLossHead | None:
    """Make the model's output layer one that gives the loss, where it gives the logits as they are.

    None, with the model unchanged, where it has no such layer or does more to the logits (scales or caps them), which
    a few tokens (a number of them divisible by *multiple*) through the model, on *device* (the layer's) and with
    *options*, show.
    """
    layer = _output_layer(model)
    weight = next(layer.parameters(), None) if layer is not None else None
    if layer is None or weight is None or _is_cut_across(layer):
        log.info("computing the loss from full logits: %s has no single output layer", _name(model))
        return None
    tokens = torch.tensor([[1, 2, 3, 1] * multiple], device=device or weight.device)
    try:
        vocabulary, why = (
            _num_logits(model, layer, tokens, options),
            "modifies its logits after the output layer",
        )
    except Exception as error:
        log.debug("the model cannot be asked about its output layer", exc_info=True)
        reason = class_and_message(error)
        vocabulary = 0
        why = f"could not be probed for its output layer; a forward pass of a few tokens raised {reason}"
    if not vocabulary:
        log.info("computing the loss from full logits: %s %s", _name(model), why)
        return None
    return LossHead.of(layer) if type(layer) is nn.Linear else ModuleLossHead.of(layer, vocabulary)


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _output_layer(model: Any) -> nn.Module | None:
    """The layer that makes logits; of one that peft trains as a whole the trained copy."""
    layer: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    copies = getattr(layer, "modules_to_save", None)
    return copies[layer.active_adapters[0]] if isinstance(copies, nn.ModuleDict) else layer


def _is_cut_across(layer: nn.Module) -> bool:
    """Whether tensor parallel ranks have parts of the layer that are not rows of its weight (tokens)."""
    cut = [
        p
        for p in layer.parameters()
        if isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ())
    ]
    return any(
        type(layer) is not nn.Linear or p.placements[-1] not in (Shard(0), Replicate()) for p in cut
    )


def _num_logits(
    model: nn.Module, layer: nn.Module, tokens: torch.Tensor, options: Mapping[str, Any]
) -> int:
    """How many logits *layer* gives for a token; 0 where they are not the model's answer as they are."""
    outputs: list[torch.Tensor] = []

    def look(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        # Called here, where what is sharded is whole.
        if type(layer) is nn.Linear or _equal_by_row(module.forward, inputs[0], output):
            outputs.append(output.clone())

    hook = layer.register_forward_hook(look)
    try:
        with side_effect_free(model):
            output = model(input_ids=tokens, **options)
    finally:
        hook.remove()
    logits = logits_of(output)
    same = len(outputs) == 1 and logits.shape == outputs[0].shape
    return logits.shape[-1] if same and torch.equal(logits, outputs[0].to(logits.dtype)) else 0


def _equal_by_row(
    forward: Callable[..., torch.Tensor], hidden: torch.Tensor, logits: torch.Tensor
) -> bool:
    """Whether *forward* gives each position's logits by itself, whatever the others are."""
    some, rows = forward(hidden.flatten(0, -2)[1:3]), logits.flatten(0, -2)[1:3]
    return some.shape == rows.shape and torch.allclose(
        some.float(), rows.float(), rtol=1e-2, atol=1e-2
    )
