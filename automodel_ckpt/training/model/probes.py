"""What a sharded model supports, found by forward passes of a few tokens: shared rows, the loss head, divided rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from automodel_ckpt.data.batches.packing import RowLayout
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention.packing_probe import probe_rows
from automodel_ckpt.models.config_values import context_length
from automodel_ckpt.models.inspect.forward import class_and_message, side_effect_free
from automodel_ckpt.models.loss.loss_head import LossHead
from automodel_ckpt.models.loss.loss_head_probe import install_loss_head
from automodel_ckpt.models.routers import RouterSettings
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.training.model.additions import build_router_loss
from automodel_ckpt.training.model.row_sharing import Rows, choose_row_layout
from automodel_ckpt.training.model.sections import ModelRequest
from automodel_ckpt.training.model.sharding import Sharded

if TYPE_CHECKING:
    from automodel_ckpt.loss.router_loss import RouterLoss
    from automodel_ckpt.parallel.context_parallel import ContextParallel

log = logging.getLogger("automodel_ckpt")

_USUAL_HIDDEN_SIZE = 1024
"""For a model by ``_target_``, which need not have a configuration."""


@dataclass(frozen=True, slots=True)
class Probed:
    """How the forward passes of a sharded model are called; each value is None if the model or the recipe has none."""

    router_loss: RouterLoss | None = None
    row_layout: Rows | None = None
    loss_head: LossHead | None = None
    all_up_to: int = 0
    """:attr:`LossHead.all_up_to` at the time of the probes; 0 without a loss head."""
    context: ContextParallel | None = None


def probe(
    request: ModelRequest,
    model: nn.Module,
    sharded: Sharded,
    options: Mapping[str, Any],
    router: RouterSettings | None,
) -> Probed:
    """Find out what the *sharded* model supports, and prepare it for that. A collective.

    *model* is the object that was sharded in place: a DDP wrapper around it would reduce gradients. *options* are the
    arguments of each forward pass. *router* describes the load balancing loss; None: there is none. Leaves a model
    that is not trained in evaluation mode. Raises :class:`RecipeError` for what the model does not support.
    """
    layout = request.layout
    router_loss = None
    if router is not None:
        router_loss = build_router_loss(request, model, router, options)
    probe_model = _from_tokens(model, sharded)
    if layout.sizes.tp > 1:
        _check_plan(request, probe_model, sharded, options)
    marks_tokens = router is not None
    rows = _shared_rows(request, model, probe_model, sharded, options, marks_tokens=marks_tokens)
    head = _loss_head(request, probe_model, options)
    # Read here: its value depends on the weight's type, which sharding changes back after the probes.
    all_up_to = head.all_up_to if head is not None else 0
    context = None
    if layout.sizes.cp > 1:
        from automodel_ckpt.training.model.context_parallel import divide_rows

        context = divide_rows(model, probe_model, layout, options)
    if request.config.compile.enabled:
        rows = _widened(request, rows)
    # The probes left the parameters gathered.
    reshard(sharded.model)
    if not request.is_trained:
        sharded.model.eval()
    return Probed(router_loss, rows, head, all_up_to, context)


def _from_tokens(model: nn.Module, sharded: Sharded) -> nn.Module:
    """A model that takes token ids, for probes; pipeline stages, most of which take hidden states, are wrapped."""
    if sharded.stage is None:
        return model
    from automodel_ckpt.training.model.pipeline import FromTokens

    return FromTokens(model, sharded.stage)


def _check_plan(
    request: ModelRequest, probe_model: nn.Module, sharded: Sharded, options: Mapping[str, Any]
) -> None:
    """Compute a few tokens with the tensor parallel plan. A collective.

    Some plans of transformers do not fit the code of their model (Doge: the mask has all heads, the queries those of a
    rank). Raises :class:`RecipeError` if the shapes do not fit. Models with images are not run: some need them.
    """
    layout, model_config = request.layout, request.model_config
    if model_config is None or model_config.get_text_config() is not model_config:
        return
    tokens, _, _ = probe_rows(request.row_multiple, layout.device)
    try:
        with side_effect_free(probe_model), sharded.compute():
            probe_model(input_ids=tokens, **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        plan = "distributed.tp_plan" if request.config.distributed.tp_plan else "its own plan"
        raise RecipeError(
            "this model cannot be computed with its tensor parallel plan",
            where="distributed.tp_size",
            value=f"{layout.sizes.tp}, with {plan}: {class_and_message(error)}",
            hint="remove tp_size (fsdp2 shards any model), or write a plan and set distributed.tp_plan",
        ) from error
    except Exception as error:
        # Such as a model that needs other inputs, which a probe of tokens cannot give it.
        log.debug("could not probe the tensor parallel plan: %s", class_and_message(error))


def _shared_rows(
    request: ModelRequest,
    model: nn.Module,
    probe_model: nn.Module,
    sharded: Sharded,
    options: Mapping[str, Any],
    *,
    marks_tokens: bool,
) -> Rows | None:
    """How samples or packs with images share rows; None: each sample is padded to the longest.

    *marks_tokens*: the rows contain a mask of the tokens that are not padding.
    """
    if request.packs_images and request.config.packed_sequence is not None:
        from automodel_ckpt.models.inspect.vision import image_token_ids

        ids = image_token_ids(request.model_config, request.preprocessor)
        from automodel_ckpt.data.image_collate import ImageTextCollator
        from automodel_ckpt.training.model.image_rows import choose_image_rows

        return choose_image_rows(
            probe_model,
            ImageTextCollator(request.preprocessor, ids),
            request.layout,
            options,
            sharded.compute,
            request.config,
            row_multiple=request.row_multiple,
            marks_tokens=marks_tokens,
        )
    if not request.shares_rows:
        return None
    return choose_row_layout(
        model,
        probe_model,
        request.config,
        request.layout,
        options,
        sharded.compute,
        row_multiple=request.row_multiple,
        hidden_size=_hidden_size(request),
        marks_tokens=marks_tokens,
    )


def _hidden_size(request: ModelRequest) -> int:
    text = request.model_config and request.model_config.get_text_config()
    return getattr(text, "hidden_size", _USUAL_HIDDEN_SIZE)


def _loss_head(
    request: ModelRequest, probe_model: nn.Module, options: Mapping[str, Any]
) -> LossHead | None:
    """Let the output layer compute the loss if it can; None: the loss is computed from full logits."""
    has_own_loss = request.config.loss_fn is not None
    if has_own_loss or not request.predicts_tokens or not request.layout.is_last_stage:
        return None
    return install_loss_head(probe_model, options, request.row_multiple, request.layout.device)


def _widened(request: ModelRequest, rows: Rows | None) -> Rows | None:
    """Let rows have few widths, as ``compile.row_widths`` asks."""
    section = request.config.compile
    from automodel_ckpt.models.layers.compiling import num_row_widths

    count = num_row_widths(section.row_widths, section.dynamic, request.layout.device.type)
    longest = _longest_row(request)
    if count is None or longest is None or request.packs_images:
        return rows
    multiple = request.row_multiple
    if request.config.fp8 is not None:
        # Otherwise each product would copy its factors to pad them.
        from automodel_ckpt.models.layers.fp8 import MULTIPLE as FP8_MULTIPLE

        multiple = math.lcm(multiple, FP8_MULTIPLE)
    unpadded_length = None
    if getattr(rows, "one_row", False):
        # Micro-batches of the longest samples are one more shape. Others in rows of one sample would need a mask.
        unpadded_length = longest if longest % multiple == 0 else 0
        longest *= request.config.step_scheduler.local_batch_size
    if isinstance(rows, RowLayout):
        rows = replace(rows, unpadded_length=unpadded_length)
    from automodel_ckpt.data.batches.row_widths import RowWidths, WidenedRows

    widths = RowWidths(longest, count, multiple)
    log.info(
        "rows are padded to one of %d widths up to %d tokens (compile.row_widths)",
        len(widths.widths),
        widths.widths[-1],
    )
    return WidenedRows(rows, widths, unpadded_length)


def _longest_row(request: ModelRequest) -> int | None:
    """The number of tokens of the longest sample or pack that the recipe or the model allows; None: unknown."""
    config = request.config
    if config.packed_sequence is not None:
        return config.packed_sequence.size
    given = config.dataset.kwargs.get("seq_length") if config.dataset else None
    if given is None and request.model_config is not None:
        given = context_length(request.model_config)
    return None if given is None else int(given)
