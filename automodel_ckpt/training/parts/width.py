"""Learning rates and initial values by width, so that narrow and wide models have the same best learning rate.

This is the maximal update parametrization of arXiv:2203.03466 (table 8) for AdamW. With the factor r = base width /
width, for widths that only change the number of heads and not their size:

=====================================  =============  =====================  ============
parameters                             learning rate  initial values         weight decay
=====================================  =============  =====================  ============
embeddings, norms, biases              1              1                      1
hidden matrices, experts, routers      r              sqrt(r)                1 / r
output layer                           r              r                      1 / r
=====================================  =============  =====================  ============

The multiplier r of the output is part of the output layer's weights: for AdamW, scaling the initial values and the
learning rate of a matrix by r is the same as scaling what it computes. So the model is an ordinary one, and its exports
need no multiplier. The weight decay of a step, learning rate times decay, is the same for all widths.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.parts.parameter_groups import trained_parameters

log = logging.getLogger("automodel_ckpt")


def factor_of(config: PreTrainedConfig, base_width: int) -> float:
    """Return *base_width* divided by the width of the model.

    Raises :class:`RecipeError` if the output layer is the embedding: both would need different scales.
    """
    text = config.get_text_config()
    if getattr(text, "tie_word_embeddings", False):
        raise RecipeError(
            "the output layer is tied to the embedding, and a width scales them differently",
            where="pretrain.base_width",
            value=base_width,
            hint="set tie_word_embeddings: false in model.from_config, or remove base_width",
        )
    return base_width / int(text.hidden_size)


def scale_initial_values(model: nn.Module, factor: float) -> None:
    """Scale the initial values of *model*, sharded or not, in place. *factor* is the result of :func:`factor_of`."""
    num_hidden = num_output = 0
    with torch.no_grad():
        for each in trained_parameters(model):
            if each.is_output and each.scales_with_width:
                each.parameter.mul_(factor)
                num_output += 1
            elif each.scales_with_width:
                each.parameter.mul_(factor**0.5)
                num_hidden += 1
    log.info(
        "initial values by width: %d hidden matrices times %.4g, %d of the output layer times %.4g",
        num_hidden,
        factor**0.5,
        num_output,
        factor,
    )
