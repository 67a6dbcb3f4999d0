"""The data types of a run: what the recipe's null and auto mean on a device, and the line that reports them.

The decisions are functions of the device's type, so that a machine without a GPU can test those for GPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.base.units import counted
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.keys.ranks_and_steps import DistributedConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.parallel.mesh_sizes import Sizes, Strategy, choose_strategy

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
    if compute_type == "none" or device_type != "cuda":
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


def describe_precision(
    model: nn.Module,
    *,
    strategy: Strategy,
    compute_type: torch.dtype | None,
    products: Float32Precision | None = None,
    num_in_float32: int = 0,
) -> str:
    """Which data type is used for what, as a line of text.

    *model* is the model before it is sharded. *compute_type* None is the data type of the parameters. *products* is how
    float32 matrices are multiplied; None: there is no choice on this device. *num_in_float32* parameters, which
    transformers keeps in float32, are computed in this type instead of *compute_type*.
    """
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
    if compute_type is not None:
        means = "FSDP2" if strategy == "fsdp2" else "autocast"
        text = f"computed in {name_of(compute_type)} ({means})"
        if num_in_float32:
            text += f" but {counted(num_in_float32, 'tensor')} in float32"
        parts.append(text)
        if trained and strategy == "fsdp2":
            parts.append("gradients reduced in float32")
    else:
        parts.append("computed in the type of the weights")
    if products is not None:
        text = "in TF32" if products == "high" else "exact"
        parts.append(f"float32 products {text}")
    return ", ".join(parts)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
