"""Finding the output layer of a model and what the model does to its logits, to make that layer a loss head.

A forward pass of a few tokens shows both: the layer returns known logits, and the model returns what it makes of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from automodel_ckpt.models.inspect.forward import (
    class_and_message,
    logits_of,
    model_without_adapters,
    side_effect_free,
)
from automodel_ckpt.models.loss.loss_head import LossHead, class_of
from automodel_ckpt.models.loss.loss_inputs import IDENTITY, LogitTransform

log = logging.getLogger("automodel_ckpt")


def install_loss_head(
    model: nn.Module,
    options: Mapping[str, Any],
    multiple: int = 1,
    device: torch.device | None = None,
) -> LossHead | None:
    """Make the output layer of *model* compute the loss, if its output is the logits of the model.

    Returns None, with the model unchanged, if there is no such layer, or if the model changes its output in another way
    than :class:`LogitTransform`. This is found by a forward pass of a few tokens with *options*, on *device* (default:
    that of the layer). *multiple* divides the number of tokens.
    """
    layer = output_layer(model)
    # No subclasses: theirs may compute something else than weight and bias.
    if layer is None or class_of(layer) is not nn.Linear or _is_sharded_across(layer):
        log.info("computing the loss from full logits: %s has no plain output layer", _name(model))
        return None
    plain: Any = layer
    tokens = torch.tensor([[1, 2, 3, 1] * multiple], device=device or plain.weight.device)
    inner = model_without_adapters(model)
    if adds_bias_to_logits(inner):
        log.info("computing the loss from full logits: %s adds a bias to its logits", _name(model))
        return None
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        options = {**options, "decoder_input_ids": tokens}
    why = "modifies its logits after the output layer"
    transform: LogitTransform | None = None
    try:
        transform = _probe_logits(model, layer, tokens, options)
    except Exception as error:
        log.debug("the model cannot be asked about its output layer", exc_info=True)
        reason = class_and_message(error)
        why = f"could not be probed for its output layer; a forward pass of a few tokens raised {reason}"
    if transform is None:
        log.info("computing the loss from full logits: %s %s", _name(model), why)
        return None
    head = LossHead.of(plain)
    head.transform = transform
    if transform.scale != 1:
        log.info("the loss head multiplies logits by %g, as the model does", transform.scale)
    if transform.cap is not None:
        log.info("the loss head caps logits at %g, as the model does", transform.cap)
    return head


def _name(model: nn.Module) -> str:
    name: str = class_of(model).__name__
    return name


def adds_bias_to_logits(model: Any) -> bool:
    """Whether *model* adds a bias of all tokens that its output layer does not have: BART and its relatives."""
    return getattr(model, "final_logits_bias", None) is not None


def output_layer(model: Any) -> nn.Module | None:
    """The layer that computes logits; if peft trains a copy of it, that copy."""
    layer: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    copies = getattr(layer, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        return copies[layer.active_adapters[0]]
    return layer  # type: ignore[no-any-return]


def head_without_adapters(model: nn.Module, head: LossHead | None) -> LossHead | None:
    """The loss head of *model* while its adapters are switched off; *head* is the one while they are on.

    These differ if peft trains a copy of the output layer: the original computes without adapters. It is made a loss
    head on the first call. None: the loss is computed from full logits.
    """
    inner = model_without_adapters(model)
    layer: Any = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None or not isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict):
        return head
    original = layer.original_module
    if isinstance(original, LossHead):
        return original
    if class_of(original) is not nn.Linear:
        return None
    made = LossHead.of(original)
    made.transform = head.transform
    return made


def _is_sharded_across(layer: nn.Module) -> bool:
    """Whether tensor parallel ranks have parts of the layer other than rows of its weight (tokens)."""
    for parameter in layer.parameters():
        if not isinstance(parameter, DTensor):
            continue
        if "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
            continue
        # tp is the innermost dimension of the mesh, so its placement is the last one.
        if parameter.placements[-1] not in (Shard(0), Replicate()):
            return True
    return False


def _probe_logits(
    model: nn.Module, layer: nn.Module, tokens: torch.Tensor, options: Mapping[str, Any]
) -> LogitTransform | None:
    """Find what *model* does to the logits of *layer*; None if it is not a :class:`LogitTransform`."""
    outputs: list[torch.Tensor] = []

    def substitute(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
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
    if not transform.is_identity and any(p.numel() == 1 for p in model.parameters()):
        return None
    return transform


def _test_logits(shape: torch.Size, device: torch.device) -> torch.Tensor:
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


def _placed_like(output: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """*logits*, equal on all ranks, sharded as *output* is."""
    if not isinstance(output, DTensor):
        return logits
    mesh = output.device_mesh
    replicated = DTensor.from_local(logits, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, output.placements)


def _transform_between(output: torch.Tensor, logits: torch.Tensor) -> LogitTransform | None:
    """The transform that computed *logits* from *output*, both of :func:`_test_logits`; None if there is none."""
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
