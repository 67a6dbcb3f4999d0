"""The memory of the features of images, which a multimodal model computes for its text layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.training.forecast.step_trace import LiveBytes, fake_parameters

log = logging.getLogger("automodel_ckpt")


def image_bytes(
    model: nn.Module,
    images: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    is_autocast: bool = False,
) -> int | None:
    """Bytes that remain after *model* has computed the features of *images*; None if they are unknown.

    *images* are arguments of ``get_image_features``, of which only shapes and dtypes are used. *dtype* is that of the
    computation, to which parameters are cast, unless *is_autocast*; None: that of the parameters.
    """
    inner = model_without_adapters(model)
    try:
        features = _ImageFeatures(getattr(inner, "base_model", inner))
        return _saved_bytes(features, images, dtype, is_autocast=is_autocast)
    except Exception as error:
        log.debug("the features of images cannot be traced: %r", error)
        return None


class _ImageFeatures(nn.Module):
    """The part of a multimodal model that computes the features of images for its text layers."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, **images: torch.Tensor) -> Any:
        return self.backbone.get_image_features(**images)  # type: ignore[operator]


def _saved_bytes(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    *,
    is_autocast: bool,
) -> int:
    """Bytes that exist after a forward pass of *model*, without those of its parameters and buffers."""
    cast_to = None if is_autocast else dtype
    live = LiveBytes()
    with FakeTensorMode():
        own = fake_parameters(model, cast_to, {}, {})
        fake_inputs: dict[str, torch.Tensor] = {}
        for name, tensor in inputs.items():
            is_cast = cast_to is not None and tensor.is_floating_point()
            kind = cast_to if is_cast else tensor.dtype
            fake_inputs[name] = torch.empty(tensor.shape, dtype=kind)
        for tensor in own.values():
            live.exclude(tensor)
        autocast = torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=is_autocast)
        with live, autocast:
            features = torch.func.functional_call(model, own, kwargs=fake_inputs)
        found = live.current
        del features
    return found
