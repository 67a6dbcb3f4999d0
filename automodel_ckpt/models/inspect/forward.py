"""Helpers for calling a model's forward: its parameters and attention, its logits, and calls without side effects."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from automodel_ckpt.models.inspect.error_texts import first_line


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on *device*; None while it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def attention_of(model: nn.Module) -> str:
    """The name of the attention implementation; ``its own`` for a model that is not of transformers."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) or "its own"


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's forward; of the base's if adapters or ddp wrap it, which pass everything on."""
    return inspect.signature(model_without_adapters(model).forward).parameters


def text_inputs(model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of *rows* of text that *model* takes. Decoders take no ``token_type_ids``."""
    taken = forward_parameters(model)
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: rows[name] for name in names if name in rows and name in taken}


def model_without_adapters(model: nn.Module) -> Any:
    """The base that peft's adapters and ``DistributedDataParallel`` wrap; *model* itself if neither does."""
    if isinstance(model, DistributedDataParallel):
        # Its forward takes any arguments, whatever the model takes.
        model = model.module
    get_base_model: Any = getattr(model, "get_base_model", None)
    if get_base_model is None:
        return model
    return get_base_model()


def accepts_use_cache(model: nn.Module) -> bool:
    """Whether the model's forward takes ``use_cache``, or passes it to a model inside that takes it."""
    parameters = forward_parameters(model)
    if "use_cache" in parameters:
        return True
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    config = getattr(model, "config", None)
    if not passes_on or not isinstance(config, PreTrainedConfig):
        return False
    if config.is_encoder_decoder:
        # T5Gemma's classifier passes use_cache itself, and fails if it gets another one.
        return False
    # Granite's mixtures of experts: only the forward of the model without the output layer names it.
    # The user's own module may have a config, and no base model.
    outer = model_without_adapters(model)
    inner = getattr(outer, "base_model", outer)
    if "use_cache" in inspect.signature(inner.forward).parameters:
        return True
    # Vision-language models such as LLaVA: only the text model's forward names it.
    return config.get_text_config() is not config and hasattr(config.get_text_config(), "use_cache")


def logits_of(output: Any) -> Tensor:
    """What a model's last layer returned: logits; hidden states of a pipeline stage; the loss of a loss head.

    transformers' models return it in a field that is named ``logits``, whatever it is; other models return it alone.
    """
    last: Tensor
    if isinstance(output, Mapping) and not hasattr(output, "logits"):
        last = output.get("logits", output)
    else:
        last = getattr(output, "logits", output)
    return last


def class_and_message(error: Exception) -> str:
    """The class of an exception and the first line of its message."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


@contextmanager
def side_effect_free(model: nn.Module) -> Iterator[None]:
    """Run *model* in evaluation mode without gradients; on exit, restore its modes and the random state of the CPU."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # A few tokens are not worth compiling for.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            yield
    finally:
        for module, training in modes.items():
            # Not train(), which would also set all inner modules.
            module.training = training
