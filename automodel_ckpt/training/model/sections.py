"""What the sections of a recipe mean for its model, and how the samples of a micro-batch share rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.config.callables.trust import trusts_remote_code
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.keys.monitoring import LoggingConfig
from automodel_ckpt.config.keys.ranks_and_steps import DistributedConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.packing import RowLayout
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention.by_document import (
    Answer,
    attend_by_document,
    attend_by_mask,
    keeps_samples_apart,
)
from automodel_ckpt.models.attention.documents import document_kernel
from automodel_ckpt.models.config_reading import (
    check_layer_drop,
    check_task,
    layer_configs,
    load_model_config,
)
from automodel_ckpt.models.inspect.interface import (
    attention_of,
    check_context,
    check_vocabulary,
    context_length,
    naming_files,
    set_size,
    wanted_size,
)
from automodel_ckpt.models.inspect.repository import RepositoryOptions
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes, choose_strategy
from automodel_ckpt.parallel.parallelize import Parallelism
from automodel_ckpt.parallel.precision import compute_dtype
from automodel_ckpt.parallel.ranks.agree import on_all_ranks

log = logging.getLogger("automodel_ckpt")


def parallelism(section: DistributedConfig) -> Parallelism:
    """The ``distributed`` section without the sizes of the mesh and the plan."""
    return Parallelism(
        strategy=section.strategy,
        reshard_after_forward=section.reshard_after_forward,
        compute_dtype=compute_dtype(section),
        cpu_offload=section.cpu_offload,
        defer_gradient_sync=section.defer_gradient_sync,
        sequence_parallel=section.sequence_parallel,
    )


def activation_mode(section: ModelConfig | Target) -> str:
    """Which activations are recomputed: ``full`` or ``selective``; empty: none."""
    given = section.activation_checkpointing if isinstance(section, ModelConfig) else False
    if isinstance(given, str):
        return given
    return "full" if given else ""


def fuses_layers(config: RecipeConfig, device_type: str) -> bool:
    """Whether layers compute with fewer kernels than the modules of transformers and peft.

    By default on a GPU, unless layers are compiled: torch.compile fuses more operators.
    """
    section = config.model
    given = section.fused_layers if isinstance(section, ModelConfig) else False
    if given == "auto":
        return device_type == "cuda" and not config.compile.enabled
    return bool(given)


def compiles_kernels(config: RecipeConfig, device_type: str) -> bool:
    """Whether torch.compile makes kernels of several operators for a GPU."""
    return config.compile.enabled and config.compile.backend == "inductor" and device_type == "cuda"


def balancing_scope(section: ModelConfig | Target) -> str:
    """Over what the router's load is balanced: ``global_batch`` or ``micro_batch``; empty: it is not."""
    given = section.router_aux_loss if isinstance(section, ModelConfig) else True
    if isinstance(given, str):
        return given
    return "global_batch" if given else ""


def row_multiple(config: RecipeConfig, layout: RankLayout) -> int:
    """Rows are padded to a multiple of this many tokens, so that ranks can divide them along the sequence."""
    num_parts = layout.num_row_parts(sequence_parallel=config.distributed.sequence_parallel)
    return math.lcm(config.dataloader.pad_to_multiple_of or 1, num_parts)


def num_micro_batches(config: RecipeConfig, dp_size: int) -> int:
    """The number of micro-batches of each data-parallel rank in a global batch."""
    steps = config.step_scheduler
    return steps.global_batch_size // (steps.local_batch_size * dp_size)


def is_fully_sharded(config: RecipeConfig, layout: RankLayout) -> bool:
    """Whether fsdp2 shards the parameters."""
    return choose_strategy(config.distributed.strategy, layout.sizes) == "fsdp2"


def logs_mfu(section: LoggingConfig, layout: RankLayout) -> bool:
    """Whether the floating-point operations of a step are logged, the same on all ranks."""
    return layout.device.type == "cuda" or section.peak_tflops is not None


@contextmanager
def naming_keys(rename: Callable[[str], str]) -> Iterator[None]:
    """Let errors name the keys of a second model, which is built like the one of the section ``model``.

    *rename* returns the key of the recipe for the key in an error.
    """
    try:
        yield
    except RecipeError as error:
        problems = [replace(each, where=rename(each.where)) for each in error.problems]
        raise type(error).all_of(problems) from error


_FEATURES = "FEATURE_EXTRACTION"
_CLASSIFICATION = "SEQ_CLS"
"""peft's name of the task of a model without an output layer."""


@dataclass(frozen=True)
class ModelRequest:
    """A model to build, by the sections of a recipe, for the ranks of a device mesh. No step changes it."""

    config: RecipeConfig
    layout: RankLayout
    auto_class: Any
    """The class of transformers. Its ``from_pretrained`` and ``from_config`` make the model."""
    task_type: str | None = None
    """peft's name of the task. None when peft has no class of models for it."""
    preprocessor: Any = None
    """The tokenizer or processor. None when there is none."""
    model_config: PreTrainedConfig | None = None
    """The transformers configuration, which is read if it is not given. None for a model by ``_target_``."""
    shares_rows: bool = False
    """Whether samples may share rows without padding, if the model supports it."""
    packs_images: bool = False
    """Whether the samples of ``packed_sequence`` have images, which *preprocessor* prepares."""
    uses_dropout: bool = True
    """Whether a model that is trained keeps its dropout."""
    is_trained: bool = True
    """Whether parameters get gradients, as far as ``model.freeze`` and ``peft`` allow. Otherwise the model is frozen
    and in evaluation mode."""
    is_dry_run: bool = False
    """Whether the model stays on the meta device, complete and without values, to be counted."""
    keeps_masters: bool = False
    """Whether parameters that are trained in addition to a base in 16 bits get float32."""
    keeps_frozen_types: bool = False
    """Whether frozen parameters keep the 16 bits of their files."""

    @property
    def has_task_head(self) -> bool:
        """Whether the model has a classification head, which its pretrained files may lack."""
        return self.task_type == _CLASSIFICATION

    @property
    def predicts_tokens(self) -> bool:
        """Whether the output layer computes logits of tokens."""
        return not self.has_task_head and self.task_type != _FEATURES

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        return row_multiple(self.config, self.layout)


def repository_options(section: ModelConfig) -> RepositoryOptions:
    """How the repository of ``model.from_pretrained``, or of a name in ``model.from_config``, is read."""
    return RepositoryOptions(
        section.revision,
        requests_code=section.trust_remote_code,
        trusts_code=trusts_remote_code(),
    )


def preprocessor_options(config: RecipeConfig, name: str, where: str) -> RepositoryOptions:
    """How the repository *name* of a tokenizer or processor, which the dotted key *where* gives, is read.

    The options of the model apply to its repository only. A tokenizer of another repository can run code with a
    ``_target_`` and its argument ``trust_remote_code``.
    """
    section = config.model
    options = RepositoryOptions()
    if isinstance(section, ModelConfig) and name in (section.from_pretrained, section.from_config):
        options = repository_options(section)
    own = getattr(config, where.partition(".")[0])
    if own is not section and own.revision is not None:
        options = replace(options, revision=own.revision)
    return options


def read_model_config(
    config: RecipeConfig, layout: RankLayout, *, auto_class: Any, preprocessor: Any
) -> PreTrainedConfig | None:
    """Read the transformers configuration of ``config.model``. Returns None for a model by ``_target_``.

    Raises :class:`RecipeError` if it does not fit the tokenizer, the data or the device mesh.
    """
    section = config.model
    if isinstance(section, Target):
        return None
    tokenizer = text_tokenizer(preprocessor)
    found = load_model_config(
        from_pretrained=section.from_pretrained,
        from_config=section.from_config,
        tokenizer=tokenizer,
        processor=preprocessor,
        overrides=section.config_overrides,
        repository=repository_options(section),
        auto_class=auto_class,
    )
    files = f"config.json of {section.from_pretrained or section.from_config}"
    with naming_files("transformers cannot use this configuration of a model", files):
        check_task(found, auto_class)
        check_layer_drop(found)
        size = wanted_size(section.vocab_size, tokenizer)
        if size is not None and section.from_config is not None:
            set_size(found, size)
        check_vocabulary(found, tokenizer, size=size)
        check_all_heads(found, layout.sizes)
    for name, dataset in data_sections(config).items():
        seq_length = dataset.kwargs.get("seq_length") if dataset is not None else None
        if seq_length is not None:
            check_context(found, int(seq_length), f"{name}.seq_length")
    return found


def data_sections(config: RecipeConfig) -> Mapping[str, Target | None]:
    """The sections of data sets by their dotted keys."""
    sections = {"dataset": config.dataset, "validation_dataset": config.validation_dataset}
    for name, section in config.validation_datasets.items():
        sections[f"validation_datasets.{name}"] = section
    return sections


def check_all_heads(config: PreTrainedConfig, sizes: Sizes) -> None:
    """Raise :class:`RecipeError` if the attention heads of a layer cannot be divided among the ranks."""
    if sizes.tp == sizes.cp == 1:
        return
    from automodel_ckpt.parallel.tensor_parallel import check_heads

    for layer in layer_configs(config.get_text_config()):
        check_heads(layer, sizes.tp, sizes.cp)


def with_model_limits(section: Target, model_config: PreTrainedConfig | None) -> Target:
    """Return the section of a data set with values of the model: ``seq_length`` null is replaced by the length of its
    context, and ``vocab_size`` with the word ``model`` by the size of its vocabulary.

    What the model does not state stays as it is, as does everything if *model_config* is None. No limit on the length
    is null then.
    """
    if model_config is None:
        return section
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    limits = {}
    if section.kwargs.get("seq_length", 0) is None:
        limits["seq_length"] = context_length(model_config)
    if section.kwargs.get("vocab_size") == "model" and vocab_size is not None:
        limits["vocab_size"] = vocab_size
    return replace(section, kwargs=section.kwargs | limits)


def text_tokenizer(preprocessor: Any) -> Any:
    """The tokenizer, also of a processor. Returns None when there is none."""
    return getattr(preprocessor, "tokenizer", preprocessor)


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
    answer = probe_with_masks(probed.from_tokens, probed.layout, apart)
    if not answer and is_packed:
        raise RecipeError(
            "this model does not keep the samples of a pack apart",
            where="packed_sequence",
            value=f"{type(probed.model).__name__}, {attention} attention{answer.reason}",
            hint="leave packed_sequence out, or use another model or attn_implementation",
        )
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


def probe_with_masks(
    probe_model: nn.Module, layout: RankLayout, apart: Callable[[], Answer]
) -> Answer:
    """Whether *apart* holds on all ranks for the model as it is, or else with masks by positions, which it then keeps.

    A collective.
    """
    answer = apart()
    # Each pipeline stage probes its own layers, and all stages need the same rows.
    if on_all_ranks(layout.gloo_group, bool(answer)):
        return Answer(True)
    from automodel_ckpt.models.attention.row_masks import mask_by_positions

    handle = None if layout.in_stages else mask_by_positions(probe_model)
    if handle is None:
        return replace(answer, holds=False)
    # All ranks have the same model here.
    if on_all_ranks(layout.gloo_group, bool(apart())):
        return Answer(True)
    handle.remove()
    return replace(answer, holds=False)


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
