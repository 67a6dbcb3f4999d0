"""Quantized bases: where a frozen one can be in few bits for adapters (QLoRA), and files that are quantized."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.meta_init import float32_names

_READ_AS_FLOATS = ("fp8", "mxfp4")
"""Formats that transformers dequantizes while it reads, to the type that it is asked for."""
_ORDINARY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Quantization = Literal["nf4", "fp4", "int8"]


def check_quantization(kind: Quantization, *, device: torch.device, strategy: str) -> None:
    """Raise :class:`RecipeError` where a base cannot be quantized: 8 bits on a CPU or sharded, a GPU without
    bitsandbytes."""
    why = hint = ""
    if kind == "int8" and device.type != "cuda":
        why = f"8 bits need a CUDA device; this is a {device.type}"
        hint = "set it to nf4, or train on a GPU"
    elif kind == "int8" and strategy == "fsdp2":
        why = "weights in 8 bits cannot be sharded by fsdp2"
        hint = "set it to nf4, or distributed.strategy to ddp"
    elif device.type == "cuda" and importlib.util.find_spec("bitsandbytes") is None:
        why = "bitsandbytes is not installed"
        hint = "pip install 'automodel_ckpt[quantization]'"
    if why:
        what = f"the base cannot be quantized: {why}"
        raise RecipeError(what, where="peft.quantize_base", value=kind, hint=hint)


def int8_loading(device: torch.device) -> ValueDict:
    """Arguments of ``from_pretrained`` by which bitsandbytes reads a base in 8 bits."""
    make: Any = transformers.BitsAndBytesConfig  # it has no annotations
    return {"quantization_config": make(load_in_8bit=True), "device_map": {"": device}}


def dequantized(config: PreTrainedConfig) -> ValueDict:
    """Arguments of ``from_pretrained`` by which a base with quantized files is read as ordinary floats.

    Empty for a base that is not quantized, and for formats that transformers cannot dequantize while it reads.
    """
    settings = getattr(config, "quantization_config", None)
    if not isinstance(settings, dict):
        return {}
    method = settings.get("quant_method")
    is_read_as_floats = method in _READ_AS_FLOATS
    if method == "compressed-tensors":
        # Otherwise, packed weights stay packed until the first forward pass, and peft cannot add adapters to them.
        # transformers 5.17 does not have the setting yet.
        make: Any = transformers.CompressedTensorsConfig
        is_read_as_floats = "dequantize" in inspect.signature(make).parameters
    if not is_read_as_floats:
        return {}
    changed = copy.deepcopy(config)
    changed.quantization_config = {**settings, "dequantize": True}
    return {"config": changed}


def cast_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every ordinary float parameter of a model that was read the type *dtype* that the recipe asks for.

    transformers leaves parameters of quantized files in the type of the files. What a model keeps in float32 stays.
    """
    kept = float32_names(model, dtype)
    for name, parameter in model.named_parameters():
        stays = parameter.dtype == torch.float32 and name in kept
        if parameter.dtype in _ORDINARY and parameter.dtype != dtype and not stays:
            # The parameter stays the same object, so that ties are kept.
            parameter.data = parameter.data.to(dtype)


def check_not_quantized(model: nn.Module) -> None:
    """Raise :class:`RecipeError` if the weights of *model* stay quantized: they cannot be trained in full."""
    if not getattr(model, "is_quantized", False):
        return
    config: Any = model.config
    settings = config.quantization_config
    raise RecipeError(
        "the base's weights stay quantized and cannot be cast to model.dtype",
        where="model.from_pretrained",
        value=f"quantization_config with quant_method {getattr(settings, 'quant_method', settings)}",
        hint="use a base that is not quantized, or train adapters on it (add a peft section)",
    )


def freeze_quantized(model: nn.Module) -> None:
    """Freeze *model* for adapters. Its weights stay quantized.

    What is not quantized stays in bfloat16, as in a base that is not quantized. peft would convert it to float32. Then
    hidden states and the results of quantized layers are float32, and take twice the memory. Weights in float16 are
    converted, since sums of float16 and bfloat16 are float32.
    """
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    model.requires_grad_(False)


def type_beside_quantized(dtype: torch.dtype) -> torch.dtype:
    """The type that :func:`freeze_quantized` gives frozen weights of *dtype* that are not quantized."""
    return torch.float32 if dtype == torch.float16 else dtype
