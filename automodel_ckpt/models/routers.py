"""Whether a mixture of experts has a load balancing loss for its routers, and whether it is the usual one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.forward import side_effect_free

WHERE = "model.router_aux_loss"
_OFF = "set model.router_aux_loss: false to train without it"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What a model's config states about the loss of its routers."""

    coefficient: float
    top_k: int


def router_settings(model: nn.Module) -> RouterSettings | None:
    """The settings of a transformers model whose config asks for the loss (``output_router_logits``); else None."""
    text = _text_config(model)
    return _stated(text) if getattr(text, "output_router_logits", False) else None


def unused_coefficient(model: nn.Module) -> float | None:
    """The coefficient in the config of a mixture of experts whose config does not ask for the loss; else None."""
    text = _text_config(model)
    settings = _stated(text)
    if settings is None or getattr(text, "output_router_logits", None) is not False:
        return None
    return settings.coefficient


def _text_config(model: nn.Module) -> Any:
    """The config of the language model; None if *model* has no config."""
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config() if get_text_config is not None else config


def _stated(text: Any) -> RouterSettings | None:
    """The settings in the config *text* of a language model; None if it has no coefficient, or no experts."""
    coefficient = getattr(text, "router_aux_loss_coef", None)
    top_k = getattr(text, "num_experts_per_tok", None)
    if not coefficient or not top_k:
        return None
    return RouterSettings(float(coefficient), int(top_k))


def check_router_loss(
    model: nn.Module,
    loss_of: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    options: Mapping[str, Any],
    multiple: int,
    device: torch.device,
) -> None:
    """Check that *model* returns the router loss that *loss_of* computes from its router logits.

    Runs the model, with *options*, on a few tokens, whose number is divisible by *multiple*. A collective if the model
    is sharded. Raises :class:`RecipeError` if the losses differ by more than 1%, or the model returns none.
    """
    tokens = torch.tensor([[1, 2, 3, 1, 0] * multiple], device=device)
    with side_effect_free(model):
        output = model(input_ids=tokens, **options)
    router_logits, expected = (
        getattr(output, "router_logits", None),
        getattr(output, "aux_loss", None),
    )
    if not router_logits or expected is None:
        found = "the model returns no router logits"
    else:
        computed = loss_of(router_logits)
        if torch.allclose(computed.float(), expected.float(), rtol=1e-2):
            return
        found = f"the model's is {float(expected):g}, the load balancing loss of its router logits {float(computed):g}"
    raise RecipeError(
        "the model's router loss is not the supported load balancing loss",
        where=WHERE,
        value=f"{type(model).__name__}: {found}",
        hint=_OFF,
    )


def check_stages_with_routers(num_stages: int) -> None:
    """Raise :class:`RecipeError` for more than one pipeline stage: no stage has the routers of all layers."""
    if num_stages > 1:
        raise RecipeError(
            "the router's load balancing loss requires the routers of all layers, but a pipeline stage has only some",
            where=WHERE,
            value=f"distributed.pp_size {num_stages}, and the model's config has output_router_logits: true",
            hint=f"{_OFF}, or remove pp_size",
        )
