"""Select what of a model is trained, and validate it: frozen parameters, dropout, types, ties, attention, routers."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.inspect.interface import (
    PARTS,
    attention_of,
    did_you_mean,
    parameters_of,
    side_effect_free,
)

log = logging.getLogger("automodel_ckpt")

_ROUTERS = "model.router_aux_loss"
_OFF = "set model.router_aux_loss: false to train without it"


def check_complete(model: object) -> None:
    """Raise :class:`RecipeError` if *model* is not a module, or has lazy tensors or tensors on the meta device."""
    if not isinstance(model, nn.Module):
        hint = "return one from the function or class of this section"
        raise RecipeError(
            "the model is not a torch.nn.Module",
            where="model",
            value=type(model).__name__,
            hint=hint,
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor) or tensor.is_meta]
    if lazy:
        raise RecipeError(
            "tensors of the model are not initialized",
            where="model",
            value=f"{len(lazy)} of {len(tensors)}, the first {lazy[0]}",
            hint="let what makes the model run it once on a few tokens (lazy layers), and leave the meta device out",
        )


def check_trained_types(model: nn.Module) -> None:
    """Raise :class:`RecipeError` for trainable parameters in float16."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    short = [name for name, p in trained if p.dtype == torch.float16]
    if short:
        raise RecipeError(
            "float16 training requires a loss scaler (small gradients underflow), which is not supported",
            where="model.dtype",
            value=f"{len(short)} trainable parameters in float16, the first {short[0]}",
            hint="set it to bfloat16, which has float32's range, or to float32; adapters on a base in float16 are "
            "trained in peft.dtype float32",
        )


def check_attention(model: nn.Module, device: torch.device) -> None:
    """Raise :class:`RecipeError` if *device* does not support training with the model's attention implementation."""
    if device.type == "cpu" and attention_of(model) == "flex_attention":
        raise RecipeError(
            "torch's flex_attention has no backward pass on the CPU",
            where="model.attn_implementation",
            value="flex_attention",
            hint="set it to sdpa or eager, or train on a GPU",
        )


def note_untied(model: Any, name: str) -> None:
    """Let the config of a *model* that was read from *name* state that its weights are not tied, where they are not.

    transformers does not tie weights with different values in the files, whatever the config states, and other programs
    that read the config would lose one of them. If only some of the weights of a model differ, the config stays as it
    is: it has one setting for all.
    """
    expected = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = {
        alias: source
        for alias, source in expected.items()
        if alias not in model.all_tied_weights_keys
    }
    if not apart:
        return
    outcome = "they are trained and exported as two tensors"
    if not model.all_tied_weights_keys:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        outcome += ", and config.json of exports has tie_word_embeddings: false"
    pairs = ", ".join(f"{alias} and {source}" for alias, source in apart.items())
    log.warning(
        "%s: config.json ties %s, but the files have different values: %s", name, pairs, outcome
    )


def check_separate_memory(model: nn.Module) -> None:
    """Raise :class:`RecipeError` if a trainable parameter of *model* shares memory with another parameter.

    Two names of one parameter are no error. Separate parameters have separate gradients and optimizer state, and stop
    sharing memory where the model is copied to a device or sharded: the same recipe would train another model there.
    """
    found: list[tuple[int, int, str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        # Tensors of other types may have no memory, or another one than they state.
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            continue
        if parameter.is_meta or not parameter.numel():
            continue
        start = parameter.data_ptr()
        # The ranges of columns of a matrix overlap without a common element.
        size = parameter.nbytes if parameter.is_contiguous() else parameter.itemsize
        found.append((start, start + size, name, parameter))
    found.sort(key=lambda entry: entry[:2])
    for index, (_, end, name, parameter) in enumerate(found):
        for start, _, other_name, other in found[index + 1 :]:
            if start >= end:
                break
            if not (parameter.requires_grad or other.requires_grad):
                continue
            raise RecipeError(
                "two parameters of the model share memory, but they are not one parameter",
                where="model",
                value=f"{name}, {other_name}",
                hint="to tie them, assign the parameter itself (head.weight = embedding.weight), not its .data; to "
                "separate them, copy the values (.data.clone())",
            )


@dataclass(frozen=True)
class RouterSettings:
    """What a model's config states about the loss of its routers."""

    coefficient: float
    top_k: int


def router_settings(model: nn.Module) -> RouterSettings | None:
    """The settings of a mixture of experts with a config that requests the loss (``output_router_logits``). None for
    other models."""
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", lambda: config)
    text = get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", None)
    top_k = getattr(text, "num_experts_per_tok", None)
    if not coefficient or not top_k or getattr(text, "output_router_logits", None) is not True:
        return None
    return RouterSettings(float(coefficient), int(top_k))


def check_router_loss(
    model: nn.Module,
    loss_of: Callable[[Sequence[Tensor]], Tensor],
    options: Values,
    multiple: int,
    device: torch.device,
) -> None:
    """Check that *model* returns the router loss that *loss_of* computes from its router logits.

    Runs the model, with *options*, on a few tokens. Their number is divisible by *multiple*. A collective if the model
    is sharded. Raises :class:`RecipeError` if the losses differ by more than 1%, or the model returns none.
    """
    tokens = torch.tensor([[1, 2, 3, 1, 0] * multiple], device=device)
    with side_effect_free(model):
        output = model(input_ids=tokens, **options)
    router_logits = getattr(output, "router_logits", None)
    expected = getattr(output, "aux_loss", None)
    if not router_logits or expected is None:
        found = "the model returns no router logits"
    else:
        computed = loss_of(router_logits)
        if torch.allclose(computed.float(), expected.float(), rtol=1e-2):
            return
        found = f"the model's is {float(expected):g}, the load balancing loss of its router logits {float(computed):g}"
    raise RecipeError(
        "the model's router loss is not the supported load balancing loss",
        where=_ROUTERS,
        value=f"{type(model).__name__}: {found}",
        hint=_OFF,
    )


def check_stages_with_routers(num_stages: int) -> None:
    """Raise :class:`RecipeError` for more than one pipeline stage: no stage has the routers of all layers."""
    if num_stages > 1:
        raise RecipeError(
            "the router's load balancing loss requires the routers of all layers, but a pipeline stage has only some",
            where=_ROUTERS,
            value=f"distributed.pp_size {num_stages}, and the model's config has output_router_logits: true",
            hint=f"{_OFF}, or remove pp_size",
        )


def freeze(model: nn.Module, patterns: Sequence[str], if_present: Sequence[str] = ()) -> int:
    """Exclude from training the parameters with names that match a glob. Returns the number of trainable elements.

    The parts of a multimodal model are also patterns: ``vision_tower``, ``audio_tower``, ``projector``,
    ``language_model``. Raises :class:`RecipeError` for *patterns* without a match, and if no parameter is left to
    train. The patterns *if_present* may match nothing, which is logged.
    """
    # With duplicates, because a pattern may match only the second name of a tied parameter.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = [part for part in PARTS if parameters_of(part, parameters)]
    frozen: set[str] = set()
    problems = []
    for pattern in (*patterns, *if_present):
        names = fnmatch.filter(parameters, pattern)
        if pattern in PARTS:
            names = parameters_of(pattern, parameters)
        frozen.update(names)
        if not names and pattern not in patterns:
            log.info("model.freeze_if_present: the model has no parameters %s", pattern)
        elif not names:
            hint = did_you_mean(pattern, {*parameters, *parts})
            problems.append(Problem("no parameter's name matches", "model.freeze", pattern, hint))
    RecipeError.check(problems)
    for name in frozen:
        parameters[name].requires_grad_(False)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if num_trainable == 0:
        raise RecipeError(
            "no parameter is left to train",
            where="model.freeze",
            value=[*patterns, *if_present],
            hint="",
        )
    return num_trainable


def narrow_frozen(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Give the frozen parameters of *model* the types of 16 bits that their names have in *types*.

    Nothing is lost if these are the types of the files that the values come from.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and types.get(name) in (torch.bfloat16, torch.float16):
            # The parameter stays the same object, so that ties are kept.
            parameter.data = parameter.data.to(types[name])


_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def turn_off_dropout(model: nn.Module) -> list[float]:
    """Set all dropout rates of *model* to 0, the rates of adapters included. Its config is not changed.

    Layers that call functions of torch keep their rates as attributes, such as ``attention_dropout``, ``layerdrop``
    and ``drop_prob``.

    Returns:
        The rates above 0 that were set to 0.
    """
    rates = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or (name == "p" and isinstance(module, _LAYERS))
            if is_rate and isinstance(value, float) and value > 0:
                rates.append(value)
                setattr(module, name, 0.0)
    return rates
