"""What a sharded model supports, found by forward passes of a few tokens: shared rows, the loss head, divided rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.data.batches.packing import RowLayout
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention.by_document import (
    Answer,
    attend_by_document,
    attend_by_mask,
    keeps_samples_apart,
    padding_changes_outputs,
    probe_rows,
)
from automodel_ckpt.models.attention.documents import document_kernel
from automodel_ckpt.models.inspect.interface import (
    attention_of,
    class_and_message,
    context_length,
    logits_of,
    model_without_adapters,
    side_effect_free,
)
from automodel_ckpt.models.loss.loss_head import install_loss_head, output_layer
from automodel_ckpt.models.model_checks import (
    RouterSettings,
    check_router_loss,
    check_stages_with_routers,
    router_settings,
)
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.parallelize import reshard
from automodel_ckpt.parallel.ranks.agree import gather_objects, on_all_ranks, sum_over_ranks
from automodel_ckpt.training.model.deferred_model import Sharded
from automodel_ckpt.training.model.sections import (
    ModelRequest,
    balancing_scope,
)

if TYPE_CHECKING:
    from automodel_ckpt.loss.router_loss import RouterLoss
    from automodel_ckpt.models.layers.fake_quantization import FakeQuantization
    from automodel_ckpt.models.layers.neftune import EmbeddingNoise
    from automodel_ckpt.models.loss.mtp import MultiTokenPrediction
    from automodel_ckpt.parallel.context_parallel import ContextParallel

log = logging.getLogger("automodel_ckpt")


Rows = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From a collated micro-batch to the rows that the model gets, with the same sum of losses over labels."""
_USUAL_HIDDEN_SIZE = 1024
"""For a model by ``_target_``, which need not have a configuration."""


@dataclass(frozen=True)
class ProbedModel:
    """A sharded *model*, and how forward passes of a few tokens are computed with it."""

    request: ModelRequest
    model: nn.Module
    """The object that was sharded in place: a DDP wrapper around it would reduce gradients."""
    from_tokens: nn.Module
    """The same, or the pipeline stages as a model that takes tokens."""
    options: Mapping[str, Any]
    """The arguments of each forward pass."""
    compute: Callable[[], AbstractContextManager[Any]]
    """The context of a forward pass."""
    marks_tokens: bool
    """Whether the rows contain a mask of the tokens that are not padding."""

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        return self.request.row_multiple

    @property
    def layout(self) -> RankLayout:
        """The ranks that share the model."""
        return self.request.layout


def choose_row_layout(probed: ProbedModel) -> Rows | None:
    """How samples share rows, if the recipe wants it and the model supports it. None: each is padded to the longest.

    A collective, which runs the model. Raises :class:`RecipeError` if ``packed_sequence`` is not supported.
    """
    request, config = probed.request, probed.request.config
    is_packed = config.packed_sequence is not None
    if not (config.dataloader.padding_free or is_packed):
        return None
    attention = attention_of(probed.model)
    # Flash attention finds the samples by their position ids only in a batch of one row.
    one_row = "flash" in attention
    max_row_length = None
    if config.packed_sequence is not None and not one_row:
        # Each pack has a row, while samples that are not packed can share longer rows.
        max_row_length = config.packed_sequence.size
    apart = partial(
        keeps_samples_apart,
        probed.from_tokens,
        one_row,
        probed.options,
        probed.row_multiple,
        probed.layout.device,
        max_row_length,
    )
    answer, _ = probe_with_masks(probed, apart, _masks_by_positions)
    if not answer and is_packed:
        raise _shared_packs(probed, answer)
    if not answer:
        log.info(
            "samples are padded to the longest: this model does not keep those apart that share a row%s",
            answer.reason,
        )
        return None
    kernel = choose_document_kernel(probed)
    how = f"{attention} attention separates them by their position ids"
    if kernel:
        how = f"attention is limited to each sample ({kernel})"
    log.debug("packing samples without padding; %s", how)
    text = request.model_config and request.model_config.get_text_config()
    hidden_size = getattr(text, "hidden_size", _USUAL_HIDDEN_SIZE)
    one_row = one_row or bool(kernel)
    return RowLayout(hidden_size, one_row, probed.row_multiple, probed.marks_tokens)


def _masks_by_positions(model: nn.Module) -> RemovableHandle | None:
    from automodel_ckpt.models.attention.row_masks import mask_by_positions

    return mask_by_positions(model)


def _shared_packs(probed: ProbedModel, answer: Answer) -> RecipeError:
    return RecipeError(
        "this model does not keep the samples of a pack apart, or their images",
        where="packed_sequence",
        value=f"{type(probed.model).__name__}, {attention_of(probed.model)} attention{answer.reason}",
        hint="leave packed_sequence out, or use another model or attn_implementation",
    )


def choose_image_rows(probed: ProbedModel) -> Rows:
    """How packs of samples with images share rows. A collective, which runs the model on a few small images.

    Raises :class:`RecipeError` if it does not separate samples.
    """
    from automodel_ckpt.data.image_collate import ImageTextCollator
    from automodel_ckpt.data.media.image_packing import ImageRowLayout
    from automodel_ckpt.models.attention.positions import rotary_positions
    from automodel_ckpt.models.attention.row_masks import install_row_masks
    from automodel_ckpt.models.inspect.interface import image_token_ids
    from automodel_ckpt.training.model.image_rows import RowProbe

    model, request = probed.from_tokens, probed.request
    ids = image_token_ids(request.model_config, request.preprocessor)
    collate = ImageTextCollator(request.preprocessor, ids)
    # Flash attention finds the samples by their position ids only in a batch of one row.
    one_row = "flash" in attention_of(model)
    rows = ImageRowLayout(
        rotary_positions(model), one_row, probed.row_multiple, probed.marks_tokens
    )
    probe = RowProbe(probed, collate, rows)
    # For example Gemma 3: see row_masks.
    answer, has_masks = probe_with_masks(probed, probe.keeps_samples_apart, install_row_masks)
    if not answer:
        raise _shared_packs(probed, answer)
    if not has_masks and choose_document_kernel(probed):
        # All packs in one row. The kernel finds the documents in it.
        in_one_row = replace(rows, one_row=True)
        apart = replace(probe, rows=in_one_row).keeps_samples_apart()
        if on_all_ranks(probed.layout.gloo_group, bool(apart)):
            return in_one_row
        attend_by_mask(model)
    return rows


def probe_with_masks(
    probed: ProbedModel,
    apart: Callable[[], Answer],
    install_masks: Callable[[nn.Module], RemovableHandle | None],
) -> tuple[Answer, bool]:
    """Whether *apart* holds on all ranks for the model as it is, or else with the masks that *install_masks* gives it.

    Also returns whether the model keeps these masks. A collective.
    """
    layout, answer = probed.layout, apart()
    # Each pipeline stage probes its own layers, and all stages need the same rows.
    if on_all_ranks(layout.gloo_group, bool(answer)):
        return Answer(True), False
    handle = None if layout.in_stages else install_masks(probed.from_tokens)
    if handle is None:
        return replace(answer, holds=False), False
    # All ranks have the same model here.
    answer = apart()
    if on_all_ranks(layout.gloo_group, bool(answer)):
        return Answer(True), True
    handle.remove()
    return replace(answer, holds=False), False


def choose_document_kernel(probed: ProbedModel) -> str:
    """Let attention skip pairs of tokens of different samples, if the recipe names no implementation itself.

    A collective. Returns the label of the kernel, the same on all ranks. Empty if attention uses the mask.
    """
    config, layout = probed.request.config, probed.layout
    section = config.model
    if not isinstance(section, ModelConfig) or section.attn_implementation is not None:
        return ""
    kernel = document_kernel(layout.device.type, is_compiled=config.compile.enabled)
    # A probe is a collective of the ranks that share the model.
    if not on_all_ranks(layout.gloo_group, kernel is not None):
        return ""
    assert kernel is not None
    able = attend_by_document(
        probed.from_tokens,
        probed.options,
        probed.row_multiple,
        layout.device,
        kernel=kernel,
        compute=probed.compute,
    )
    if on_all_ranks(layout.gloo_group, able):
        return kernel.label
    # Another rank could not: undo the change on this rank.
    attend_by_mask(probed.from_tokens)
    return ""


def probe(
    request: ModelRequest,
    model: nn.Module,
    sharded: Sharded,
    options: Values,
    router: RouterSettings | None,
) -> ValueDict:
    """Find out what the *sharded* model supports, and prepare it for that. A collective.

    *model* is the object that was sharded in place. *options* are the arguments of each forward pass. *router*
    describes the load balancing loss. None: there is none. Leaves a model that is not trained in evaluation mode.
    Returns the fields of a :class:`Trainable` that this decides. Raises :class:`RecipeError` for what the model does
    not support.
    """
    layout, config = request.layout, request.config
    router_loss = None
    if router is not None:
        router_loss = build_router_loss(request, model, router, options)
    from_tokens = model
    if sharded.stage is not None:
        from automodel_ckpt.training.model.pipeline import FromTokens

        from_tokens = FromTokens(model, sharded.stage)
    probed = ProbedModel(
        request, model, from_tokens, options, sharded.compute, marks_tokens=router is not None
    )
    if layout.sizes.tp > 1:
        _check_plan(probed)
    rows = _shared_rows(probed)
    if request.shares_rows and rows is None:
        _warn_of_padding(probed)
    head = None
    if config.loss_fn is None and request.predicts_tokens and layout.is_last_stage:
        # Otherwise the loss is computed from full logits.
        head = install_loss_head(from_tokens, options, request.row_multiple, layout.device)
    found: ValueDict = {
        "router_loss": router_loss,
        "loss_head": head,
        # Read here: it depends on the weight's type, which sharding changes back after the probes.
        "all_up_to": head.all_up_to if head is not None else 0,
        "context": None,
    }
    if layout.sizes.cp > 1:
        found["context"] = divide_rows(model, from_tokens, layout, options)
    found["row_layout"] = _widened(request, rows) if config.compile.enabled else rows
    # The probes left the parameters gathered.
    reshard(sharded.model)
    if not request.is_trained:
        sharded.model.eval()
    return found


def _check_plan(probed: ProbedModel) -> None:
    """Compute a few tokens with the tensor parallel plan. A collective.

    Some plans of transformers do not fit the code of their model (Doge: the mask has all heads, the queries the heads
    of one rank). Raises :class:`RecipeError` if the shapes do not fit. Models with images are not run: some need them.
    """
    layout, model_config = probed.layout, probed.request.model_config
    if model_config is None or model_config.get_text_config() is not model_config:
        return
    from automodel_ckpt.parallel.tensor_parallel import OTHER_PLAN

    tokens, _, _ = probe_rows(probed.row_multiple, layout.device)
    try:
        with side_effect_free(probed.from_tokens), probed.compute():
            probed.from_tokens(input_ids=tokens, **probed.options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        section = probed.request.config.distributed
        plan = "distributed.tp_plan" if section.tp_plan else "its own plan"
        raise RecipeError(
            "this model cannot be computed with its tensor parallel plan",
            where="distributed.tp_size",
            value=f"{layout.sizes.tp}, with {plan}: {class_and_message(error)}",
            hint=OTHER_PLAN,
        ) from error
    except Exception as error:
        # Such as a model that needs other inputs, which a probe of tokens cannot give it.
        log.debug("could not probe the tensor parallel plan: %s", class_and_message(error))


def _shared_rows(probed: ProbedModel) -> Rows | None:
    """How samples or packs with images share rows. None: each sample is padded to the longest."""
    request = probed.request
    if request.packs_images and request.config.packed_sequence is not None:
        return choose_image_rows(probed)
    return choose_row_layout(probed) if request.shares_rows else None


def _warn_of_padding(probed: ProbedModel) -> None:
    """Log a warning if the losses of samples depend on their padding (CPM-Ant, ProphetNet). A collective."""
    layout, size = probed.layout, probed.request.config.step_scheduler.local_batch_size
    if size == 1 or layout.in_stages or probed.row_multiple > 1:
        return
    with probed.compute():
        is_changed = padding_changes_outputs(probed.from_tokens, probed.options, layout.device)
    if is_changed:
        log.warning(
            "the padding of a row changes what this model computes for its tokens, so losses depend on which samples"
            " share a micro-batch; step_scheduler.local_batch_size: 1 avoids padding"
        )


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
    from automodel_ckpt.data.batches.packing import RowWidths, WidenedRows

    return WidenedRows(rows, RowWidths(longest, count, multiple), unpadded_length)


def _longest_row(request: ModelRequest) -> int | None:
    """The number of tokens of the longest sample or pack that the recipe or the model allows. None: unknown."""
    config = request.config
    if config.packed_sequence is not None:
        return config.packed_sequence.size
    given = config.dataset.kwargs.get("seq_length") if config.dataset else None
    if given is None and request.model_config is not None:
        given = context_length(request.model_config)
    return None if given is None else int(given)


def remove_dropout(request: ModelRequest, model: nn.Module) -> None:
    """Turn off the dropout of *model*, unless the recipe trains with it, and log that there was some."""
    if request.uses_dropout:
        return
    from automodel_ckpt.models.model_checks import turn_off_dropout

    rates = turn_off_dropout(model)
    if rates:
        log.info(
            "dropout is off (%d rates, the largest %g), as in TRL; dropout: true keeps it",
            len(rates),
            max(rates),
        )


def choose_router_settings(request: ModelRequest, model: nn.Module) -> RouterSettings | None:
    """The settings of the router's loss. Returns None for a model without one, or if the recipe switches it off.

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
                hint="remove the key",
            )
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


def build_router_loss(
    request: ModelRequest, model: nn.Module, settings: RouterSettings, options: Values
) -> RouterLoss:
    """Build the load balancing loss, and compare it with the sharded *model*'s loss on a few tokens. A collective.

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
    return router_loss


def add_fake_quantization(request: ModelRequest, model: nn.Module) -> FakeQuantization | None:
    """Let the layers of the unsharded *model* compute with rounded values. Returns None without a ``qat`` section."""
    section = request.config.qat
    if section is None or not request.is_trained:
        return None
    from automodel_ckpt.models.layers.fake_quantization import FakeQuantization

    return FakeQuantization(model, section.scheme, section.group_size, section.start_step)


def add_embedding_noise(request: ModelRequest, model: nn.Module) -> EmbeddingNoise | None:
    """Add ``model.neftune_alpha`` to the sharded *model*. Returns None without it, and on later pipeline stages."""
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
    """Install the layers that predict further tokens in the sharded *model*, and return them. Returns None without any.

    *context* is how context parallel ranks divide rows. None: they do not.
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
    return layers


_TOKENS_PER_SLICE = 3


def divide_rows(
    model: nn.Module, probe_model: nn.Module, layout: RankLayout, options: Values
) -> ContextParallel:
    """Make the sharded *model* compute only this rank's slice of each row. A collective.

    Tokens must exchange information in attention only. A forward pass of a few tokens with *options*, of complete rows
    and of slices, shows whether they do. *probe_model* is *model*, or its pipeline stages as a model that takes tokens.
    Raises :class:`RecipeError` if not.
    """
    from automodel_ckpt.models.loss.mtp import mtp_decoders
    from automodel_ckpt.parallel.context_parallel import ContextParallel, context_parallel_error
    from automodel_ckpt.training.model.pipeline import FromTokens

    context = ContextParallel(model, layout, mtp_decoders(model_without_adapters(model)))
    if isinstance(probe_model, FromTokens):
        probe_model.context = context
    difference = _difference(probe_model, context, layout.device, options)
    for reason in gather_objects(layout.gloo_group, difference):
        if reason:
            raise context_parallel_error(model, reason)
    return context


def _difference(
    model: nn.Module, context: ContextParallel, device: torch.device, options: Values
) -> str:
    """How the logits of this rank's slice differ from the logits of complete rows. Empty if only by rounding."""
    length = context.size * _TOKENS_PER_SLICE
    # Small ids, which every vocabulary has.
    tokens = torch.arange(length, device=device).remainder(5).unsqueeze(0)
    last_tokens = tokens[:, -_TOKENS_PER_SLICE:]
    try:
        with side_effect_free(model):
            complete = logits_of(model(input_ids=tokens, **options)).float()
            without_context = logits_of(model(input_ids=last_tokens, **options)).float()
            context.start()
            sliced = logits_of(model(input_ids=tokens, **options)).float()
    # Returned, not raised: the other ranks wait in gather_objects().
    except Exception as error:
        log.debug("could not probe the model for divided rows", exc_info=True)
        return f"{type(error).__name__}: {error}"
    # The scale is the error of ignoring the other slices: rounding is far below it in every dtype.
    error_without_context = (complete[:, -_TOKENS_PER_SLICE:] - without_context).abs().max()
    tolerance = 0.1 * float(error_without_context)
    expected = complete[:, context.slice_of(length)]
    is_equal = sliced.shape == expected.shape
    # The comparison is false for NaN.
    if is_equal and float((sliced - expected).abs().max()) <= tolerance:
        return ""
    return "slices of rows have other logits than complete rows"
