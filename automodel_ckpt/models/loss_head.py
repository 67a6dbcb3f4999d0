"""The output layer and the cross-entropy in one operation, so that the logits of a micro-batch never exist as a whole.

Positions without a label are removed before the layer. The others are computed in chunks: logits, loss, and gradients
with respect to the layer and the hidden states. With a vocabulary of 128k, the logits would be the largest tensors of a
training step. A layer that is not a single matrix (one with an adapter) computes the logits of each chunk again in the
backward pass.
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
"""The number of logits in a chunk: 128 MiB in float32."""
_FEW = 8
"""Up to an eighth of a chunk, torch's own functions are used, which have less overhead in Python."""
_SMALL = 2**18
"""Up to this number, all logits are computed, because selecting labeled positions takes longer."""


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
    """A context in which a model's forward pass computes a loss. A generator would take three times as long."""

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
"""nn.Module's setattr first checks for parameters and modules, which takes six times as long."""


class LossHead(ComputesLoss, nn.Linear):
    """A plain linear layer with a loss."""

    @classmethod
    def of(cls, layer: nn.Linear) -> LossHead:
        """Make *layer* a loss head by changing its class, so that wrappers and sharding still refer to it."""
        layer.__class__ = cls
        assert isinstance(layer, LossHead)
        return layer

    @property
    def all_up_to(self) -> int:
        """The number of positions up to which :meth:`computing_loss` takes all positions, labeled or not."""
        if isinstance(self.weight, DTensor):
            return 0
        return _SMALL // self.weight.shape[0]

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
        """The loss if tensor parallel ranks have different rows of the vocabulary; equal on all ranks. Collective."""
        mesh, weight = input.device_mesh, self.weight
        assert isinstance(weight, DTensor)
        # The gradient of a rank covers its rows of the vocabulary only, so the hidden states get partial sums.
        local = input.to_local(grad_placements=[Partial()])
        hidden = local.flatten(0, -2).index_select(0, positions)
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else None
        _, first = Shard.local_shard_size_and_offset(
            len(weight), mesh.size(), mesh.get_local_rank()
        )
        largest_part = math.ceil(len(weight) / mesh.size())
        part = VocabularyPart(mesh.get_group(), first, largest_part)
        loss = linear_cross_entropy(hidden, weight.to_local(), bias, targets, part)
        return DTensor.from_local(loss, mesh, [Replicate()], run_check=False)


class ModuleLossHead(ComputesLoss):
    """A mixin that computes the loss of any other layer, such as a linear layer with an adapter."""

    _vocabulary = 1

    @classmethod
    def of(cls, layer: nn.Module, vocabulary: int) -> ModuleLossHead:
        """Make *layer*, which returns logits of *vocabulary* tokens, a loss head by changing its class."""
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

        # Recomputed in the backward pass, when the context has ended and `_labeled` is None. So it
        # must call the layer's own forward and not this one.
        def loss_of_chunk(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = _widened(layer.forward(hidden, *args, **options))
            return F.cross_entropy(logits, labels, reduction="sum")

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
    """This rank's rows of the output layer, from row *first*. Each rank of *group* has at most *most* rows."""

    group: dist.ProcessGroup
    first: int
    most: int

    def largest(self, values: torch.Tensor) -> None:
        """Replace *values* by their maximum over all ranks."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def sum(self, values: torch.Tensor) -> None:
        """Replace *values* by their sum over all ranks."""
        dist.all_reduce(values, group=self.group)


def _widened(logits: torch.Tensor) -> torch.Tensor:
    """Logits in the dtype of the loss: float64 if they have it, otherwise float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of ``hidden [N, H] @ weight [V, H].T + bias [V]`` for targets [N]; 0-dim, at least float32.

    With *part*, *weight* and *bias* are this rank's rows, and the loss is that of all rows. This is collective.

    Equal to ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")`` except for the order
    of additions, with at most one chunk of logits in memory. With autocast, the product is computed in its dtype.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        # Cast here, so that the gradients are computed in the same dtype as the product.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    if part is None and _FEW * targets.shape[0] * weight.shape[0] <= CHUNK_ELEMENTS:
        return F.cross_entropy(_widened(F.linear(hidden, weight, bias)), targets, reduction="sum")
    loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, part, torch.is_grad_enabled()
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients for a loss weight of 1 together with the loss; the backward pass scales them."""

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
        loss_dtype = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=loss_dtype, device=hidden.device)
        # All ranks need the same number of chunks, because each chunk is a collective.
        num_rows = part.most if part is not None else weight.shape[0]
        size = math.ceil(CHUNK_ELEMENTS / num_rows)
        for start in range(0, len(targets), size):
            chunk = hidden[start : start + size]
            errors = _widened(F.linear(chunk, weight, bias))
            loss += _losses_of(errors, targets[start : start + size], part).sum()
            if any(needed):
                # Autograd also casts the gradient of widened logits back to the dtype of the
                # product.
                sums.add(start, chunk, errors.to(hidden.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, loss_weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Scaling changes the sums in place: a second backward pass must fail, not scale them twice.
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(loss_weight), None, None, None


def _losses_of(
    logits: torch.Tensor, labels: torch.Tensor, part: VocabularyPart | None
) -> torch.Tensor:
    """The cross-entropy [n, 1] of logits [n, V]. Overwrites *logits* with their gradient: softmax minus one-hot."""
    # Subtracted before the exponential, which would overflow in float32 for logits above 88.
    largest = logits.amax(1, keepdim=True)
    # The positions whose label is one of this rank's rows, and these rows.
    positions, rows = torch.arange(len(labels), device=labels.device), labels
    if part is not None:
        part.largest(largest)
        is_here = (labels >= part.first) & (labels < part.first + logits.shape[1])
        positions, rows = positions[is_here], labels[is_here] - part.first
    # One tensor for the label's logit and the sum of exponentials, so that ranks exchange both in one collective.
    sums = torch.zeros(2, len(logits), 1, dtype=logits.dtype, device=logits.device)
    sums[0, positions, 0] = logits[positions, rows] - largest[positions, 0]
    exponentials = logits.sub_(largest).exp_()
    sums[1] = exponentials.sum(1, keepdim=True)
    if part is not None:
        part.sum(sums)
    label_logits, total = sums.unbind()
    exponentials.div_(total)
    # Correct only because no position occurs twice: indexed subtraction counts duplicates once.
    exponentials[positions, rows] -= 1
    return total.log().sub_(label_logits)


class _Gradients:
    """The gradients of the inputs, summed over chunks in at least float32; None for inputs that need none."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needed: tuple[bool, ...],
    ) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.factor = weight
        self.hidden: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if needed[0]:
            # Not initialized: each row belongs to exactly one chunk, and `add` overwrites it.
            self.hidden = torch.empty_like(hidden)
        if needed[1]:
            self.weight = torch.zeros_like(weight, dtype=wide)
        if needed[2] and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=wide)

    def add(self, start: int, part: torch.Tensor, errors: torch.Tensor) -> None:
        """Add a chunk: *errors* [n, V] are the gradient of its logits, *part* [n, H] its hidden states."""
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
        """The gradients times *loss_weight*, in the dtype of the parameters. Call it once: it changes the sums."""
        scaled: list[torch.Tensor | None] = []
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient = gradient.mul_(loss_weight.to(gradient.dtype)).to(self.factor.dtype)
            scaled.append(gradient)
        return scaled


def install_loss_head(
    model: nn.Module,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
) -> LossHead | ModuleLossHead | None:
    """Make the output layer of *model* compute the loss, if its output is the logits of the model.

    Returns None, with the model unchanged, if there is no such layer, or if the model changes its output (scaled or
    capped logits). This is found by a forward pass of a few tokens with *options*, on *device* (default: that of the
    layer). *multiple* divides the number of tokens.
    """
    layer = _output_layer(model)
    weight = next(layer.parameters(), None) if layer is not None else None
    if layer is None or weight is None or _is_sharded_across(layer):
        log.info("computing the loss from full logits: %s has no single output layer", _name(model))
        return None
    tokens = torch.tensor([[1, 2, 3, 1] * multiple], device=device or weight.device)
    why = "modifies its logits after the output layer"
    try:
        vocabulary = _num_logits(model, layer, tokens, options)
    except Exception as error:
        log.debug("the model cannot be asked about its output layer", exc_info=True)
        reason = class_and_message(error)
        vocabulary = 0
        why = f"could not be probed for its output layer; a forward pass of a few tokens raised {reason}"
    if not vocabulary:
        log.info("computing the loss from full logits: %s %s", _name(model), why)
        return None
    # No subclasses: theirs may compute something else than weight and bias.
    if type(layer) is nn.Linear:
        return LossHead.of(layer)
    return ModuleLossHead.of(layer, vocabulary)


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _output_layer(model: Any) -> nn.Module | None:
    """The layer that computes logits; if peft trains a copy of it, that copy."""
    layer: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    copies = getattr(layer, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        return copies[layer.active_adapters[0]]
    return layer  # type: ignore[no-any-return]


def _is_sharded_across(layer: nn.Module) -> bool:
    """Whether tensor parallel ranks have parts of the layer other than rows of its weight (tokens)."""
    for parameter in layer.parameters():
        if not isinstance(parameter, DTensor):
            continue
        if "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
            continue
        # tp is the innermost dimension of the mesh, so its placement is the last one.
        by_rows = parameter.placements[-1] in (Shard(0), Replicate())
        if type(layer) is not nn.Linear or not by_rows:
            return True
    return False


def _num_logits(
    model: nn.Module, layer: nn.Module, tokens: torch.Tensor, options: Mapping[str, Any]
) -> int:
    """The number of logits that *layer* computes per token; 0 if its output is not the logits of the model."""
    outputs: list[torch.Tensor] = []

    def look(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        # The layer can be called again only here, while its sharded parameters are gathered.
        if type(layer) is nn.Linear or _equal_by_row(module.forward, inputs[0], output):
            # A copy: a model that changes its logits in place would otherwise appear to return
            # them.
            outputs.append(output.clone())

    hook = layer.register_forward_hook(look)
    try:
        with side_effect_free(model):
            output = model(input_ids=tokens, **options)
    finally:
        hook.remove()
    logits = logits_of(output)
    if len(outputs) != 1 or logits.shape != outputs[0].shape:
        return 0
    if not torch.equal(logits, outputs[0].to(logits.dtype)):
        return 0
    return logits.shape[-1]


def _equal_by_row(
    forward: Callable[..., torch.Tensor], hidden: torch.Tensor, logits: torch.Tensor
) -> bool:
    """Whether *forward* computes the logits of each position independently of the other positions."""
    some = forward(hidden.flatten(0, -2)[1:3])
    rows = logits.flatten(0, -2)[1:3]
    return some.shape == rows.shape and torch.allclose(
        some.float(), rows.float(), rtol=1e-2, atol=1e-2
    )
