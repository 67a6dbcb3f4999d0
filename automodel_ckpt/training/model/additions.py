"""What training changes in a model's forward pass: router losses, rounded values, noise, further tokens, dropout."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.dropout import turn_off_dropout
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.loss.loss_head_probe import output_layer
from automodel_ckpt.models.routers import (
    RouterSettings,
    check_router_loss,
    check_stages_with_routers,
    router_settings,
    unused_coefficient,
)
from automodel_ckpt.parallel.ranks.agree import sum_over_ranks
from automodel_ckpt.training.model.sections import ModelRequest, balancing_scope

if TYPE_CHECKING:
    from automodel_ckpt.loss.router_loss import RouterLoss
    from automodel_ckpt.models.layers.fake_quantization import FakeQuantization
    from automodel_ckpt.models.layers.neftune import EmbeddingNoise
    from automodel_ckpt.models.loss.mtp import MultiTokenPrediction
    from automodel_ckpt.parallel.context_parallel import ContextParallel

log = logging.getLogger("automodel_ckpt")


def remove_dropout(request: ModelRequest, model: nn.Module) -> None:
    """Turn off the dropout of *model*, unless the recipe trains with it, and log that there was some."""
    if request.uses_dropout:
        return
    rates = turn_off_dropout(model)
    if rates:
        log.info(
            "dropout is off (%d rates, the largest %g), as in TRL; dropout: true keeps it",
            len(rates),
            max(rates),
        )


def choose_router_settings(request: ModelRequest, model: nn.Module) -> RouterSettings | None:
    """The settings of the router's loss; None for a model without one, or if the recipe switches it off.

    Raises :class:`RecipeError` for pipeline stages, and for ``micro_batch`` with a model that has no such loss.
    """
    settings = router_settings(model)
    scope = balancing_scope(request.config.model)
    if settings is None:
        if scope == "micro_batch":
            raise RecipeError(
                "router_aux_loss has no effect: this model computes no router logits",
                where="model.router_aux_loss",
                value=scope,
                hint="set output_router_logits: true in the model's config, or remove the key",
            )
        _log_unused_loss(request, model)
        return None
    if not scope or not request.is_trained:
        return None
    if request.has_task_head:
        log.info(
            "no load balancing loss: models with a classification head return no router logits"
        )
        return None
    check_stages_with_routers(request.layout.sizes.pp)
    return settings


def _log_unused_loss(request: ModelRequest, model: nn.Module) -> None:
    """Log that a mixture of experts is trained without the loss for which its config has a coefficient."""
    coefficient = unused_coefficient(model)
    if coefficient is not None and request.is_trained and balancing_scope(request.config.model):
        log.info(
            "no load balancing loss of the router (coefficient %g): output_router_logits is false in the model's "
            "config; model.config_overrides can set it",
            coefficient,
        )


def build_router_loss(
    request: ModelRequest, model: nn.Module, settings: RouterSettings, options: Mapping[str, Any]
) -> RouterLoss:
    """Build the load balancing loss, and compare it with that of the sharded *model* on a few tokens. A collective.

    *options* are the arguments of each forward pass. Raises :class:`RecipeError` if they differ.
    """
    layout = request.layout
    from automodel_ckpt.loss.router_loss import RouterLoss

    router_loss = RouterLoss(
        settings.coefficient,
        settings.top_k,
        balancing_scope(request.config.model),
        sum_over_ranks=partial(sum_over_ranks, layout.gloo_group),
        counts_here=layout.reports_loss,
    )
    check_router_loss(model, router_loss.of_logits, options, request.row_multiple, layout.device)
    log.info(
        "the router's load balancing loss is added with the coefficient %g, over each %s (model.router_aux_loss)",
        settings.coefficient,
        router_loss.over.replace("_", " "),
    )
    return router_loss


def add_fake_quantization(request: ModelRequest, model: nn.Module) -> FakeQuantization | None:
    """Let the layers of the unsharded *model* compute with rounded values; None without a ``qat`` section."""
    section = request.config.qat
    if section is None or not request.is_trained:
        return None
    from automodel_ckpt.models.layers.fake_quantization import FakeQuantization

    return FakeQuantization(model, section.scheme, section.group_size, section.start_step)


def add_embedding_noise(request: ModelRequest, model: nn.Module) -> EmbeddingNoise | None:
    """Add ``model.neftune_alpha`` to the sharded *model*; None without it, and on later pipeline stages."""
    section = request.config.model
    alpha = section.neftune_alpha if isinstance(section, ModelConfig) else None
    is_later_stage = request.layout.in_stages and request.layout.pp_rank > 0
    if alpha is None or not request.is_trained or is_later_stage:
        return None
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    log.info("noise is added to embeddings in training, alpha %g (model.neftune_alpha)", alpha)
    from automodel_ckpt.models.layers.neftune import EmbeddingNoise

    return EmbeddingNoise(embedding, alpha)


def install_mtp(
    request: ModelRequest, model: nn.Module, context: ContextParallel | None
) -> MultiTokenPrediction | None:
    """Install the layers that predict further tokens in the sharded *model*, and return them; None without any.

    *context* is how context parallel ranks divide rows; None: they do not.
    """
    section = request.config.model
    if not isinstance(section, ModelConfig) or section.mtp is None:
        return None
    from automodel_ckpt.models.loss.mtp import mtp_of

    inner = model_without_adapters(model)
    layers = mtp_of(inner)
    if layers is None:
        return None
    output = output_layer(model)
    assert output is not None
    part_of = context.slice_of if context is not None else None
    layers.install(inner, output, part_of)
    log.info(
        "the loss of %d further tokens is added with the factor %g (model.mtp)",
        layers.num_depths,
        layers.factor,
    )
    return layers
