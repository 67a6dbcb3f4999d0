"""What the sections of a recipe mean for its model on a device: its data types, its strategy, its repositories."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.base.units import counted
from automodel_ckpt.config.callables.trust import trusts_remote_code
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.keys.monitoring import LoggingConfig
from automodel_ckpt.config.keys.ranks_and_steps import DistributedConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.config_reading import (
    check_layer_drop,
    check_task,
    layer_configs,
    load_model_config,
)
from automodel_ckpt.models.inspect.interface import (
    check_context,
    check_vocabulary,
    context_length,
    naming_files,
    set_size,
    wanted_size,
)
from automodel_ckpt.models.inspect.repository import RepositoryOptions
from automodel_ckpt.models.meta_init import float32_names
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes, Strategy, choose_strategy
from automodel_ckpt.parallel.parallelize import Parallelism

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


ComputeType = Literal["bfloat16", "float16", "none"]
ParameterType = Literal["float32", "bfloat16", "float16", "float64", "auto"]
Float32Precision = Literal["highest", "high"]

_NOT_FOR_SHARDS = re.compile(
    r"torch\.optim\.(.+\.)?(Adafactor|Rprop)|transformers\.(.+\.)?Adafactor"
)
"""Names of optimizers that fail in the first step for sharded parameters (torch 2.14, transformers 5.24)."""


def resolve_precision(config: RecipeConfig, sizes: Sizes, device_type: str) -> RecipeConfig:
    """Replace ``auto`` and null of ``distributed.mixed_precision`` and ``distributed.strategy`` by what they mean on a
    device of *device_type* (``cuda``, ``cpu``).

    Values that the recipe gives are unchanged, so the result is the same if it is called with its own result. Raises
    :class:`RecipeError` for a strategy that this mesh does not support.
    """
    compute_type = _compute_type(config, sizes, device_type)
    strategy = _strategy(config, sizes, compute_type, device_type)
    section = replace(config.distributed, strategy=strategy, mixed_precision=compute_type)
    return replace(config, distributed=section)


def _compute_type(config: RecipeConfig, sizes: Sizes, device_type: str) -> ComputeType:
    given = config.distributed.mixed_precision
    if given is None:
        return "none"
    if given != "auto":
        return given
    if device_type != "cuda":
        return "none"
    dtype = config.model.dtype if isinstance(config.model, ModelConfig) else None
    if dtype == "float64":
        # Asked for to get more precise results than float32.
        return "none"
    if dtype == "bfloat16" and config.peft is None and sizes.world == 1:
        # Nothing is left to cast, and no gradient is added up over ranks.
        return "none"
    return "bfloat16"


def _strategy(
    config: RecipeConfig, sizes: Sizes, compute_type: ComputeType, device_type: str
) -> Strategy:
    given = config.distributed.strategy
    # Neither weights of bitsandbytes in 8 bits nor all optimizers can be sharded.
    is_in_8_bits = config.peft is not None and config.peft.quantize_base == "int8"
    is_whole = is_in_8_bits or _updates_no_shards(config)
    if given != "auto":
        return choose_strategy(given, sizes)
    if sizes.token_parts > 1:
        # ddp supports neither stages nor replicas of shards.
        can_replicate = sizes.pp == 1 and sizes.dp_replicate == 1
        return "ddp" if is_whole and can_replicate else "fsdp2"
    # Only fsdp2 offloads a teacher.
    offloads = config.distill is not None and config.distill.offload_teacher
    if device_type != "cuda" or (compute_type == "none" and not offloads):
        # Autocast is faster on a CPU, and keeps norms and residual sums in float32.
        return "single"
    if is_whole or isinstance(config.model, Target):
        # A module of the user's own may call its parts in any order.
        return "single"
    # Autocast would keep 16-bit copies of all float32 weights until the end of a backward pass.
    return "fsdp2"


def _updates_no_shards(config: RecipeConfig) -> bool:
    """Whether the recipe names an optimizer with operations that DTensor does not support."""
    sections = [config.optimizer, *config.optimizer.groups]
    names = [section._target_ for section in sections if isinstance(section, Target)]
    return any(_NOT_FOR_SHARDS.fullmatch(name) for name in names)


def compute_dtype(section: DistributedConfig) -> torch.dtype | None:
    """The data type of forward and backward passes; None: the data type of the parameters, also for ``auto`` before
    :func:`resolve_precision`."""
    if section.mixed_precision in (None, "none", "auto"):
        return None
    return getattr(torch, section.mixed_precision)  # type: ignore[no-any-return]


def keeps_masters(config: RecipeConfig) -> bool:
    """Whether parameters that are trained beside a base in 16 bits get float32: not if the recipe gives their type."""
    section, peft = config.model, config.peft
    if isinstance(section, Target) or section.dtype is not None:
        return False
    return peft is not None and peft.dtype == "float32"


def keeps_frozen_types(config: RecipeConfig) -> bool:
    """Whether parameters that ``model.freeze`` excludes from training keep the 16 bits of their files.

    FSDP2 computes with them in 16 bits in any case. Not if the recipe gives the type of all parameters, and not with
    ``init_from``: the values are not from these files.
    """
    section = config.model
    if isinstance(section, Target) or section.dtype is not None:
        return False
    if config.peft is not None or config.init_from:
        return False
    has_patterns = bool(section.freeze or section.freeze_if_present)
    casts = config.distributed.strategy == "fsdp2" and compute_dtype(config.distributed) is not None
    return has_patterns and casts


def with_parameter_type(
    config: RecipeConfig,
    model_config: PreTrainedConfig | None,
    *,
    device_type: str,
    is_trained: bool,
) -> RecipeConfig:
    """Return *config* with a ``model.dtype`` for a device of *device_type*. *model_config* belongs to the files.

    Parameters that are trained need float32, because small updates would be lost in 16 bits. The base of adapters and
    a reference model are frozen.
    """
    section = config.model
    if isinstance(section, Target) or section.dtype is not None:
        return config
    dtype: ParameterType = "float32"
    if device_type == "cuda" and (config.peft is not None or not is_trained):
        # bfloat16 has fewer bits of mantissa, so a base in float16 stays what it is.
        is_half = getattr(model_config, "dtype", None) == torch.float16
        dtype = "float16" if is_half else "bfloat16"
    return replace(config, model=replace(section, dtype=dtype))


def float32_precision(config: RecipeConfig, device_type: str) -> Float32Precision:
    """How float32 matrices are multiplied: ``highest`` is exact, ``high`` uses TF32."""
    if config.float32_precision is not None:
        return config.float32_precision
    if device_type == "cuda" and not config.deterministic:
        return "high"
    return "highest"


def set_float32_precision(precision: Float32Precision, device_type: str) -> None:
    """Apply *precision* to the products and convolutions of this process; without effect on a CPU."""
    if device_type != "cuda":
        # torch would use it for the CPU's products as well.
        return
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"


def describe_precision(config: RecipeConfig, layout: RankLayout, model: nn.Module) -> str:
    """Which data type is used for what, as a line of text. *model* is not sharded yet."""
    is_fsdp2, dtype = is_fully_sharded(config, layout), compute_dtype(config.distributed)
    trained: Counter[str] = Counter()
    frozen: Counter[str] = Counter()
    for parameter in model.parameters():
        counter = trained if parameter.requires_grad else frozen
        counter[name_of(parameter.dtype)] += parameter.numel()
    parts: list[str] = []
    for what, counts in (
        ("trained weights and their optimizer state", trained),
        ("frozen weights", frozen),
    ):
        if counts:
            # From the type with most elements.
            types = [name for name, _ in counts.most_common()]
            parts.append(f"{what} {' and '.join(types)}")
    if dtype is None:
        parts.append("computed in the type of the weights")
    else:
        text = f"computed in {name_of(dtype)} ({'FSDP2' if is_fsdp2 else 'autocast'})"
        kept = [model.get_parameter(name) for name in float32_names(model, dtype)]
        num_in_float32 = sum(each.dtype == torch.float32 for each in kept)
        if is_fsdp2 and num_in_float32:
            text += f" but {counted(num_in_float32, 'tensor')} in float32"
        parts.append(text)
        if trained and is_fsdp2:
            parts.append("gradients reduced in float32")
    if layout.device.type == "cuda":
        is_exact = float32_precision(config, "cuda") == "highest"
        parts.append(f"float32 products {'exact' if is_exact else 'in TF32'}")
    return ", ".join(parts)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
