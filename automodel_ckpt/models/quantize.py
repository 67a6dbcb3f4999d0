"""A frozen base in few bits, for adapters to be trained on (QLoRA): bitsandbytes' formats, on CUDA devices only."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, NoReturn

import torch

from automodel_ckpt.errors import RecipeError

_WHERE = "peft.quantize_base"

Quantization = Literal["nf4", "fp4", "int8"]


def quantized_loading(kind: Quantization, *, device: torch.device, strategy: str, dtype: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` by which a base is read in so few bits.

    *dtype* is the one to compute in. Raises :class:`RecipeError` where that cannot be: on a CPU, without bitsandbytes,
    or sharded.
    """
    if device.type != "cuda":
        _refuse(kind, f"it needs a CUDA device; this is a {device.type}", "leave it out, or train on a GPU")
    if strategy == "fsdp2":
        _refuse(kind, "packed weights cannot be sharded by fsdp2", "set distributed.strategy to ddp")
    if importlib.util.find_spec("bitsandbytes") is None:
        _refuse(kind, "bitsandbytes is not installed", "pip install 'automodel_ckpt[quantization]'")
    import transformers

    make: Any = transformers.BitsAndBytesConfig  # it has no annotations
    if kind == "int8":
        config = make(load_in_8bit=True)
    else:
        compute = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        config = make(
            load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
        )
    return {"quantization_config": config, "device_map": {"": device}}


def _refuse(kind: str, why: str, remedy: str) -> NoReturn:
    raise RecipeError(f"the base cannot be quantized: {why}", where=_WHERE, value=kind, remedy=remedy)
