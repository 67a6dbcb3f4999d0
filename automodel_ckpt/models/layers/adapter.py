"""Adapters of the peft library on a frozen base, and the configuration that describes them.

The configuration that peft gets selects exactly the modules that :mod:`automodel_ckpt.models.layers.adapter_layers`
finds, and other programs read it from ``adapter_config.json``.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.files.type_aliases import Counts, ValueDict, Values
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import num_embeddings
from automodel_ckpt.models.layers.adapter_layers import (
    find_layers,
)
from automodel_ckpt.models.layers.lora import ADAPTER_NAME, Lora
from automodel_ckpt.models.quantize import freeze_quantized

log = logging.getLogger("automodel_ckpt")

_UNTIE = "set peft.ensure_weight_tying to false: then the output layer is trained separately"


@dataclass(frozen=True)
class Adapted:
    """A model with adapters.

    *peft_config* is peft's ``LoraConfig``. *description* contains all settings that are necessary to create equal
    adapters again.
    """

    model: nn.Module
    peft_config: Any
    description: Values


def add_adapters(
    model: nn.Module,
    lora: Lora,
    *,
    task_type: str | None,
    num_base_rows: int | None = None,
    head: Sequence[str] = (),
) -> Adapted:
    """Freeze *model*, add adapters to it in place, and wrap it in a ``PeftModel``.

    *task_type* is peft's (``CAUSAL_LM``), or None for a model that peft has no class for. An embedding with another
    number of rows than *num_base_rows* was resized, and is saved with the adapters. The modules *head* are trained and
    saved in full and get no adapters. Raises :class:`RecipeError` for names that match no module, or no module that can
    have an adapter.
    """
    parameters, targets, saved, ranks, alphas = find_layers(model, lora, head)
    if getattr(model, "is_quantized", False):
        freeze_quantized(model)
    model_class = type(model)
    peft_config = _lora_config(model, lora, targets, parameters, saved, task_type)
    all_names = [*targets, *(name.rpartition(".")[0] for name in parameters)]
    peft_config.rank_pattern = _peft_patterns(lora.rank_pattern, ranks, all_names)
    peft_config.alpha_pattern = _peft_patterns(lora.alpha_pattern, alphas, all_names)
    wrapped = _wrap(model, peft_config, autocast=lora.dtype == "float32")
    _draw_without_base(wrapped, peft_config.init_lora_weights)
    was_resized = num_base_rows is not None and num_base_rows != num_embeddings(model)
    wrapped.save_embedding_layers = was_resized
    if peft_config.modules_to_save:
        # peft adds the usual names of heads to the list, which may have them already.
        peft_config.modules_to_save = list(dict.fromkeys(peft_config.modules_to_save))
    if task_type is None:
        peft_config.auto_mapping = {
            "base_model_class": model_class.__name__,
            "parent_library": model_class.__module__,
        }
    description = asdict(lora) | {"targets": targets, "saved": saved, "resized": was_resized}
    description["parameters"] = parameters
    description["ranks"] = {name: rank for name, rank in ranks.items() if rank != lora.r}
    description["alphas"] = {name: alpha for name, alpha in alphas.items() if alpha != lora.alpha}
    return Adapted(wrapped, peft_config, description)


def why_whole(lora: Lora) -> str:
    """Why the base must have values when adapters are added; empty if it may be on the meta device."""
    if lora.use_dora:
        return "DoRA begins from the base's weights"
    if lora.init == "orthogonal":
        return "orthogonal adapters are drawn with the base at hand"
    return ""


def _draw_without_base(model: nn.Module, init: Any) -> None:
    """Give adapters on the meta device memory and first values from torch's generator.

    peft creates the adapters of a base on the meta device there too.
    """
    from peft.tuners.lora import LoraLayer

    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        was_on_meta = False
        for layer_name in layer.adapter_layer_names:
            for part in getattr(layer, layer_name).modules():
                for name, parameter in part._parameters.items():
                    if parameter is None or not parameter.is_meta:
                        continue
                    was_on_meta = True
                    # Tied adapters stay tied.
                    if parameter not in replacements:
                        values = torch.empty_like(parameter, device="cpu")
                        replacements[parameter] = nn.Parameter(values, parameter.requires_grad)
                    part._parameters[name] = replacements[parameter]
        if was_on_meta:
            layer.reset_lora_parameters(ADAPTER_NAME, init)  # type: ignore[no-untyped-call]


@torch.no_grad()
def copy_saved_modules(model: nn.Module) -> None:
    """Copy the base's values to the modules that are fully trained, after the base has got its values."""
    from peft.utils.other import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            original: Any = module.original_module
            trained: Any = module.modules_to_save[ADAPTER_NAME]
            for target, source in zip(trained.parameters(), original.parameters(), strict=True):
                if isinstance(target, DTensor) and not isinstance(source, DTensor):
                    # One rank: fsdp2 manages only parameters that it casts, so that the base stays plain.
                    target = target.to_local()
                target.copy_(source)
            # Such as the scale of Gemma's embeddings, which no file contains.
            for copied, buffer in zip(trained.buffers(), original.buffers(), strict=True):
                copied.copy_(buffer)


def widen_trained(model: nn.Module) -> None:
    """Give the trained parameters of a model with adapters float32, where the base is kept in 16 bits.

    peft gives it to the adapters only: modules that are trained in full, and biases, have the type of the base. Their
    small updates would be lost, and fsdp2 needs one type for all trained parameters of a layer.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            # The parameter stays the same object, so that ties are kept.
            parameter.data = parameter.data.float()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let *model* compute as its base does: without its adapters, and with the base's copies of saved modules."""
    # peft's disable_adapter() also changes which parameters need gradients, and forgets what it was before.
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _lora_config(
    model: Any,
    lora: Lora,
    targets: list[str],
    parameters: list[str],
    saved: list[str],
    task_type: str | None,
) -> Any:
    from peft import LoraConfig

    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    keep_tied = bool(getattr(model, "all_tied_weights_keys", None)) and lora.ensure_weight_tying
    # peft makes the adapter of the output layer a transposed view of the embedding's. Sharding,
    # building in parts and the optimizer would treat the two as separate tensors.
    if keep_tied and (adapted := _ends_of_model(targets)):
        raise RecipeError(
            "adapters on an embedding and on its tied output layer cannot be kept equal",
            where="peft.target_modules",
            value=adapted,
            hint=_UNTIE,
        )
    options: ValueDict = {}
    if keep_tied and (ends := _ends_of_model(saved)):
        _check_tied_embeddings(model, ends)
        options["ensure_weight_tying"] = True
    if parameters:
        all_parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        options["target_parameters"] = suffixes_of(parameters, all_parameters, has_suffix)
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        # peft takes an empty list for no layers, and None for those that it knows of the model's type.
        target_modules=peft_targets(targets, names) if targets else [],
        modules_to_save=suffixes_of(saved, names, str.endswith) or None,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        init_lora_weights=True if lora.init == "default" else lora.init,
        bias=lora.bias,
        task_type=task_type,
        **options,
    )


def _ends_of_model(names: Iterable[str]) -> list[str]:
    """The names that peft recognizes as an embedding or an output layer."""
    return [name for name in names if name.rpartition(".")[2] in {"embed_tokens", "lm_head"}]


def _check_tied_embeddings(model: Any, saved: Iterable[str]) -> None:
    """Raise :class:`RecipeError` if peft would put a copy of a linear layer in the place of an embedding.

    It does so for each module with a weight that is tied to another embedding, as in encoder-decoders.
    """
    tied = [name.rpartition(".")[0] for name in model.all_tied_weights_keys]
    embeddings = [name for name in tied if isinstance(model.get_submodule(name), nn.Embedding)]
    linear = [name for name in saved if not isinstance(model.get_submodule(name), nn.Embedding)]
    if embeddings and linear:
        raise RecipeError(
            "peft cannot train an output layer as a whole if several embeddings share its weight",
            where="peft.modules_to_save",
            value=f"{', '.join(linear)}; tied to {', '.join(embeddings)}",
            hint=_UNTIE,
        )


def _wrap(model: nn.Module, peft_config: Any, *, autocast: bool) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrapped = get_peft_model(
                model, peft_config, ADAPTER_NAME, autocast_adapter_dtype=autocast
            )
        except ValueError as error:
            hint = "exclude such layers with peft.exclude_modules, or list others in peft.target_modules"
            what = "peft cannot put adapters there"
            raise RecipeError(what, where="peft.target_modules", value=error, hint=hint) from error
    texts = {
        str(warning.message)
        for warning in caught
        if not issubclass(warning.category, FutureWarning | DeprecationWarning)
    }
    for text in texts:
        log.warning("peft: %s", text)
    return wrapped.train()


def peft_targets(targets: Sequence[str], names: Sequence[str]) -> list[str] | str:
    """The target_modules by which peft selects exactly *targets* among *names*.

    These are suffixes of names if possible, otherwise a regular expression.
    """
    suffixes = suffixes_of(targets, names, has_suffix)
    return suffixes or "|".join(re.escape(target) for target in targets)


def _peft_patterns(patterns: Counts, numbers: Counts, names: Sequence[str]) -> dict[str, int]:
    """The patterns by which peft gives the *numbers* to exactly their layers, among *names*.

    peft's are regular expressions for the end of a name: *patterns* themselves if these are plain names that select the
    same, else full names. Earlier versions wrote the same, and averages compare them.
    """
    selected: dict[str, int] = {}
    for name in names:
        for pattern, number in patterns.items():
            if f".{name}".endswith(f".{pattern}"):
                selected.setdefault(name, number)
    if selected == numbers:
        return dict(patterns)
    return {f"^{name}": number for name, number in numbers.items()}


def suffixes_of(
    wanted: Sequence[str], names: Sequence[str], selects: Callable[[str, str], bool]
) -> list[str]:
    """Suffixes that select exactly the *wanted* names by *selects*: last components, or else full names.

    Returns an empty list if neither does. Raises :class:`RecipeError` if peft's only rule is str.endswith.
    """
    last_components = sorted({name.rpartition(".")[2] for name in wanted})
    for suffixes in (last_components, sorted(wanted)):
        selected = {name for name in names if any(selects(name, suffix) for suffix in suffixes)}
        if selected == set(wanted):
            return suffixes
    if wanted and selects is str.endswith:
        raise RecipeError(
            "peft cannot distinguish these modules from others with the same name suffix",
            where="peft.modules_to_save",
            value=list(wanted)[:5],
            hint="",
        )
    return []


def has_suffix(name: str, suffix: str) -> bool:
    """Whether the last components of the dotted *name* are *suffix*, as peft compares target_modules."""
    return name == suffix or name.endswith(f".{suffix}")
