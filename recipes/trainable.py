"""A model that is ready for training, with what its forward pass needs besides the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automodel_ckpt.distributed.context_parallel import ContextParallel
from automodel_ckpt.models.loss_head import LossOf
from automodel_ckpt.training.router_loss import RouterLoss

Rows = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From a collated micro-batch to the rows that the model sees, with the same sum of losses over labels."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """This rank's shards of a model, or of one pipeline stage, and how its forward pass is called."""

    model: nn.Module
    forward_options: Mapping[str, Any]
    """Arguments of each forward pass besides the rows."""
    compute: Callable[[], AbstractContextManager[Any]]
    """The context of each forward pass, which sets the type that all ranks compute in."""
    row_layout: Rows | None = None
    """How samples share rows; None: each sample is padded to the longest."""
    loss_of: LossOf | None = None
    """Lets the output layer compute the loss; None: the loss is computed from full logits."""
    all_up_to: int = 0
    """Number of positions in a micro-batch up to which the output layer takes those without a label too."""
    context: ContextParallel | None = None
    """How context parallel ranks divide rows; None: rows are whole."""
    router_loss: RouterLoss | None = None
    """The load balancing loss of a mixture of experts; None: the model has none, or the recipe switches it off."""
