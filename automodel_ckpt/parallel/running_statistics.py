"""The running means and variances of batch normalization: frozen layers keep them, and fsdp2 does not train them."""

from __future__ import annotations

import logging
from types import MethodType

from torch import nn

from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def keep_frozen_statistics(model: nn.Module) -> None:
    """Leave the frozen layers of batch normalization of *model* in evaluation mode.

    In training mode they would change their statistics, which adapters do not contain, and normalize a row with the
    statistics of its micro-batch, unlike the exported model.
    """
    number = 0
    for layer in _layers_with_statistics(model):
        parameters = list(layer.parameters())
        if parameters and not any(each.requires_grad for each in parameters):
            layer.eval()
            # Each call of train() on the model reaches all of its modules.
            setattr(layer, "train", MethodType(_unchanged, layer))  # noqa: B010
            number += 1
    if number:
        log.info("%d frozen layers of batch normalization keep their statistics", number)


def _unchanged(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Do nothing: replaces the method ``train`` of *layer*, which keeps its mode."""
    return layer


def check_statistics(model: nn.Module) -> None:
    """Raise :class:`RecipeError` for layers of batch normalization that are trained: fsdp2 does not equalize them.

    Ranks would evaluate with different statistics, and continue with rank 0's, which are saved.
    """
    trained = [layer for layer in _layers_with_statistics(model) if layer.training]
    if trained:
        raise RecipeError(
            "fsdp2 does not train layers of batch normalization on several ranks",
            where="distributed.strategy",
            value=f"fsdp2, {len(trained)} such layers",
            hint="set distributed.strategy to ddp, or freeze the layers (model.freeze)",
        )


def _layers_with_statistics(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, _LAYERS) and module.running_mean is not None
    ]
