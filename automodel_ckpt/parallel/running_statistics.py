"""The running means and variances of batch normalization: of layers that are not trained, and on several ranks."""

from __future__ import annotations

import logging
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


class RunningStatistics:
    """The statistics that training changes. After each step, all ranks have rank 0's statistics, as with DDP.

    Otherwise, ranks would evaluate with different ones, and continue with rank 0's, which are saved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = _layers_with_statistics(model)

    def equalize(self) -> None:
        """A collective for models with such layers, called after the forward passes of a step."""
        buffers: list[Tensor] = []
        for layer in self._layers:
            if layer.training:
                buffers += [layer.get_buffer("running_mean"), layer.get_buffer("running_var")]
        if not buffers:
            return
        together = torch.cat([each.double() for each in buffers])
        dist.broadcast(together, 0)
        parts = torch.split(together, [each.numel() for each in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part)


def _layers_with_statistics(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, _LAYERS) and module.running_mean is not None
    ]
