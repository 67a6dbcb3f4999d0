"""The output layer and the cross-entropy in one operation, so that the logits of a micro-batch never exist as a whole.

Positions without a label are removed before the layer. The others are computed in chunks (``fused_cross_entropy``).
With a vocabulary of 128k, the logits would be the largest tensors of a training step.

Some models scale the output of this layer, or cap it with tanh (Cohere, Granite, Gemma). The loss head does this
itself. A forward pass of a few tokens shows what a model does: the layer returns known logits, and the model returns
what it makes of them.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.models.inspect.interface import (
    class_and_message,
    logits_of,
    model_without_adapters,
    side_effect_free,
)
from automodel_ckpt.models.loss.fused_cross_entropy import (
    IDENTITY,
    Labeled,
    LogitTransform,
    TokenHits,
    VocabularyPart,
    in_autocast_dtype,
    linear_cross_entropy,
    wide_logits,
)

if TYPE_CHECKING:
    from automodel_ckpt.models.loss.fused_cross_entropy import ZLoss

log = logging.getLogger("automodel_ckpt")

_SMALL = 2**18
"""Up to this number, all logits are computed, because selecting labeled positions takes longer."""


LinearLoss = Callable[[Labeled, Tensor, Tensor | None], Tensor]
"""What a loss head computes from labeled hidden states, for a layer of weight [V, H] and bias [V]: all of its rows, or
the rows of ``labeled.part``. Returns a 0-dim tensor, or a vector of one loss for each position."""


@dataclass(eq=False)
class LossPass(AbstractContextManager["LossPass"]):
    """A context in which a model's forward pass computes a loss. A generator would take three times as long."""

    _head: LossHead
    positions: Tensor | None
    targets: Tensor
    sizes: Sequence[int] | None = None
    hits: TokenHits | None = None
    criterion: LinearLoss | None = None
    z_loss: ZLoss | None = None
    _loss: Tensor | None = field(default=None, init=False)
    _shape: torch.Size = field(default=torch.Size(), init=False)

    def __enter__(self) -> LossPass:
        _set_past_torch(self._head, "_loss_pass", self)
        return self

    def __exit__(self, *_: object) -> None:
        _set_past_torch(self._head, "_loss_pass", None)

    def of_labeled(self, labeled: Labeled, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The loss of labeled hidden states, for a layer that is one matrix."""
        if self.criterion is not None:
            return self.criterion(labeled, weight, bias)
        hidden, labels, transform, hits, part = labeled
        return linear_cross_entropy(
            hidden, weight, bias, labels, part, transform, hits, self.z_loss
        )

    def output_for(self, loss: Tensor) -> Tensor:
        """What the layer returns for a *loss*, 0-dim or one per group: [1, groups, 1].

        A model may select columns of its logits, so that the output has as many dimensions as they have. A model that
        changes the output of the layer would change the loss. It gets a zero that carries the gradient.
        """
        transform = self._head.transform
        self._shape = loss.shape
        if transform != IDENTITY:
            self._loss = loss.detach()
            loss = _Carrier.apply(loss, transform.scale)  # type: ignore[no-untyped-call]
        return loss.reshape(1, -1, 1)

    def loss_in(self, output: Any) -> Tensor:
        """The summed loss in what the model returned inside the context, in float32 or float64.

        It is 0-dim, or a vector with one loss per group or position.
        """
        returned = logits_of(output).reshape(self._shape)
        if self._loss is None:
            return returned
        if isinstance(returned, DTensor):
            returned = returned.to_local()
        return _Carried.apply(returned, self._loss)  # type: ignore[no-any-return, no-untyped-call]


class _Carrier(torch.autograd.Function):
    """A zero in place of a loss. Its gradient becomes the loss's gradient, divided by *slope*.

    *slope* is the derivative, at zero, of what the model does to the zero: the scale of the logits. The derivative of
    a cap is 1 there. So the model passes the gradient of the loss through unchanged.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.slope, None


class _Carried(torch.autograd.Function):
    """The value of a loss, with the gradient of what the model returned for its :class:`_Carrier`."""

    @staticmethod
    def forward(ctx: Any, returned: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = returned.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


_set_past_torch = object.__setattr__
"""nn.Module's setattr first checks for parameters and modules, which takes six times as long."""


class LossHead(nn.Linear):
    """A linear output layer that returns the summed cross-entropy inside :meth:`computing_loss`; elsewhere, logits.

    Why not call the backbone, then a head: FSDP2 gathers the root's parameters before the root's forward pass and puts
    its backward hooks on what that returns; DDP prepares its reduction there, and peft and multimodal models do more in
    it. So the root module is called, and its output layer returns the loss, which :meth:`LossPass.loss_in` takes from
    the model's output.
    """

    transform: LogitTransform = IDENTITY
    """What the model does to the output of this layer."""
    _loss_pass: LossPass | None = None

    @staticmethod
    def of(layer: nn.Linear) -> LossHead:
        """Make *layer* a loss head by changing its class, so that wrappers and sharding still refer to it."""
        layer.__class__ = _sharded_class() if isinstance(layer, FSDPModule) else LossHead
        assert isinstance(layer, LossHead)
        return layer

    @property
    def all_up_to(self) -> int:
        """The number of positions up to which :meth:`computing_loss` takes all positions, labeled or not."""
        if isinstance(self.weight, DTensor):
            return 0
        return _SMALL // self.weight.shape[0]

    def computing_loss(
        self,
        positions: Tensor | None,
        targets: Tensor,
        sizes: Sequence[int] | None = None,
        hits: TokenHits | None = None,
        criterion: LinearLoss | None = None,
        z_loss: ZLoss | None = None,
    ) -> LossPass:
        """Let the forward passes of the model inside the context compute a loss instead of logits.

        *positions* [N] are the labeled positions in the flattened batch, *targets* [N] the tokens that they predict.
        None means all positions of a batch of at most :attr:`all_up_to`; there -100 is no target. With *sizes*,
        the positions belong to several losses, so many positions to each, in this order. *positions* is then given.
        *hits* counts the targets with the highest logit, in passes without gradients. *criterion* replaces the
        cross-entropy; *positions* is then given. *z_loss* is added to the cross-entropy.
        """
        return LossPass(self, positions, targets, sizes, hits, criterion, z_loss)

    def forward(self, input: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], or the loss: see :meth:`computing_loss`."""
        loss_pass = self._loss_pass
        if loss_pass is None:
            return super().forward(input)
        positions = loss_pass.positions
        if isinstance(input, DTensor):
            return self._loss_in_parts(input, loss_pass)
        hidden = input.flatten(0, -2)
        if positions is not None:
            hidden = hidden.index_select(0, positions)
        return self._loss(loss_pass, hidden, self.weight, self.bias)

    def _loss(
        self,
        loss_pass: LossPass,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: VocabularyPart | None = None,
    ) -> Tensor:
        """What the layer returns for the loss of labeled states *hidden* [N, H], by *weight* [V, H] and *bias* [V]."""
        groups = [(hidden, loss_pass.targets)]
        sizes = loss_pass.sizes
        if sizes is not None:
            parts = torch.split(hidden, [*sizes]), torch.split(loss_pass.targets, [*sizes])
            groups = list(zip(*parts, strict=True))
        losses = [
            loss_pass.of_labeled(
                Labeled(states, labels, self.transform, loss_pass.hits, part), weight, bias
            )
            for states, labels in groups
        ]
        return loss_pass.output_for(losses[0] if sizes is None else torch.stack(losses))

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of *hidden* [n, H] in a new tensor, with what the model does to them, outside of its forward
        pass. With tensor parallelism, V are the columns of this rank. The weights have to be gathered."""
        bias = None if self.bias is None else _local(self.bias)
        return self.transform(wide_logits(*in_autocast_dtype(hidden, _local(self.weight), bias)))

    def _loss_in_parts(self, input: DTensor, loss_pass: LossPass) -> Tensor:
        """The losses if tensor parallel ranks have different rows of the vocabulary; equal on all ranks. Collective."""
        mesh, weight, positions = input.device_mesh, self.weight, loss_pass.positions
        assert isinstance(weight, DTensor) and positions is not None
        # The gradient of a rank covers its rows of the vocabulary only, so the hidden states get partial sums.
        local = input.to_local(grad_placements=[Partial()])
        hidden = local.flatten(0, -2).index_select(0, positions)
        bias = None if self.bias is None else _local(self.bias)
        _, first = Shard.local_shard_size_and_offset(
            len(weight), mesh.size(), mesh.get_local_rank()
        )
        largest_part = math.ceil(len(weight) / mesh.size())
        vocabulary = VocabularyPart(mesh.get_group(), first, largest_part)
        output = self._loss(loss_pass, hidden, weight.to_local(), bias, vocabulary)
        return DTensor.from_local(output, mesh, [Replicate()], run_check=False)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that tensor parallel ranks share."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def class_of(layer: nn.Module) -> Any:
    """The class of *layer* without the one that fsdp2 derives from it for a layer that is sharded separately."""
    kind = type(layer)
    # The order in which torch's fully_shard derives: [FSDPLinear, FSDPModule, Linear, ...].
    return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind


@functools.cache
def _sharded_class() -> Any:
    return type("FSDPLossHead", (FSDPModule, LossHead), {})


def install_loss_head(
    model: nn.Module,
    options: Values,
    multiple: int = 1,
    device: torch.device | None = None,
) -> LossHead | None:
    """Make the output layer of *model* compute the loss, if its output is the logits of the model.

    Returns None, with the model unchanged, if there is no such layer, or if the model changes its output in another way
    than :class:`LogitTransform`. This is found by a forward pass of a few tokens with *options*, on *device* (default:
    the layer's device). *multiple* divides the number of tokens.
    """
    layer: Any = output_layer(model)
    inner = model_without_adapters(model)
    transform: LogitTransform | None = None
    why = "modifies its logits after the output layer"
    # No subclasses: theirs may compute something else than weight and bias.
    if layer is None or class_of(layer) is not nn.Linear or not _has_rows_of_tokens(layer):
        why = "has no plain output layer"
    elif adds_bias_to_logits(inner):
        why = "adds a bias to its logits"
    else:
        tokens = torch.tensor([[1, 2, 3, 1] * multiple], device=device or layer.weight.device)
        if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
            options = {**options, "decoder_input_ids": tokens}
        try:
            transform = _probe_logits(model, layer, tokens, options)
        except Exception as error:
            log.debug("the model cannot be asked about its output layer", exc_info=True)
            reason = class_and_message(error)
            why = f"could not be probed for its output layer; a forward pass of a few tokens raised {reason}"
    if transform is None:
        log.debug("computing the loss from full logits: %s %s", class_of(model).__name__, why)
        return None
    head = LossHead.of(layer)
    head.transform = transform
    return head


def adds_bias_to_logits(model: Any) -> bool:
    """Whether *model* adds a bias of all tokens that its output layer does not have: BART and its relatives."""
    return getattr(model, "final_logits_bias", None) is not None


def output_layer(model: Any) -> nn.Module | None:
    """The layer that computes logits; if peft trains a copy of it, that copy."""
    layer = _stated_output_layer(model)
    copies = getattr(layer, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        return copies[layer.active_adapters[0]]
    return layer  # type: ignore[no-any-return]


def _stated_output_layer(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def head_without_adapters(model: nn.Module, head: LossHead | None) -> LossHead | None:
    """The loss head of *model* while its adapters are switched off; *head* is the one while they are on.

    None: the loss is computed from full logits, as where peft trains a copy of the output layer.
    """
    layer = _stated_output_layer(model_without_adapters(model))
    has_copy = isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict)
    return None if has_copy else head


def _has_rows_of_tokens(layer: nn.Module) -> bool:
    """Whether a tensor parallel rank has all of the layer, or rows of its weight (tokens)."""
    placements = [
        # tp is the innermost dimension of the mesh, so its placement is the last one.
        parameter.placements[-1]
        for parameter in layer.parameters()
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
    ]
    return all(placement in (Shard(0), Replicate()) for placement in placements)


def _probe_logits(
    model: nn.Module, layer: nn.Module, tokens: Tensor, options: Values
) -> LogitTransform | None:
    """Find what *model* does to the logits of *layer*. None when it is not a :class:`LogitTransform`."""
    outputs: list[Tensor] = []

    def substitute(_: Any, __: Any, output: Tensor) -> Tensor:
        outputs.append(_test_logits(output.shape, output.device))
        # A copy: a model that changes its logits in place would otherwise appear to return them.
        return _placed_like(output, outputs[-1].clone())

    hook = layer.register_forward_hook(substitute)
    try:
        with side_effect_free(model):
            output = model(input_ids=tokens, **options)
    finally:
        hook.remove()
    logits = logits_of(output)
    if len(outputs) != 1 or logits.shape != outputs[0].shape:
        return None
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    transform = _transform_between(outputs[0], logits)
    if transform is None:
        return None
    # The model could train the scale, which would get no gradient.
    if transform != IDENTITY and any(p.numel() == 1 for p in model.parameters()):
        return None
    return transform


def _test_logits(shape: torch.Size, device: torch.device) -> Tensor:
    """Logits of both signs and very different sizes, all different. The first and the last are 2^-8 and 2^16."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(shape, generator=generator)
    exponents.mul_(24).sub_(8)
    signs = torch.rand(shape, generator=generator)
    signs.sub_(0.5).sign_()
    logits = torch.exp2(exponents).mul_(signs)
    flat = logits.view(-1)
    flat[0] = 2**-8
    flat[-1] = 2**16
    return logits.to(device)


def _placed_like(output: Tensor, logits: Tensor) -> Tensor:
    """*logits*, equal on all ranks, sharded as *output* is."""
    if not isinstance(output, DTensor):
        return logits
    mesh = output.device_mesh
    replicated = DTensor.from_local(logits, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, output.placements)


def _transform_between(output: Tensor, logits: Tensor) -> LogitTransform | None:
    """The transform that computed *logits* from *output*, both of :func:`_test_logits`. None when there is none."""
    if torch.equal(logits, output.to(logits.dtype)):
        return IDENTITY
    if logits.dtype not in (torch.float32, torch.float64):
        # Too few digits to find the constants.
        return None
    first, last = logits.view(-1)[0].item(), logits.view(-1)[-1].item()
    # tanh(x) is exactly 1 for large x, but a scale alone multiplies each value.
    cap = last if torch.count_nonzero(logits == last) > 1 else None
    scale = first / output.view(-1)[0].item()
    if cap is not None and abs(first) < cap:
        scale = math.atanh(first / cap) * cap / output.view(-1)[0].item()
        # Most of these models do not scale, and the logarithm is not exact.
        if math.isclose(scale, 1, rel_tol=1e-5):
            scale = 1.0
    transform = LogitTransform(scale, cap)
    if not scale > 0 or not math.isfinite(scale):
        return None
    expected = transform(output.double())
    is_equal = torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-6)
    return transform if is_equal else None
