"""Adapters on a frozen base, by the peft library: which layers get one, and what describes the result.

Names are resolved here rather than by peft, which matches loosely in silence: ``head`` in ``modules_to_save`` would
also mean ``lm_head``. What peft is given selects exactly the modules that were found here, and is what its own tools
read back from ``adapter_config.json``.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.vocabulary import num_embeddings

log = logging.getLogger("automodel_ckpt")

ALL_LINEAR = "all-linear"
ADAPTER_NAME = "default"
_LINEAR = (nn.Linear, Conv1D)
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Lora:
    """What kind of adapter, and where: the keys of the same names in a recipe's ``peft`` section."""

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: Sequence[str] | str = ALL_LINEAR
    exclude_modules: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    use_dora: bool = False
    use_rslora: bool = False
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    bias: Literal["none", "all", "lora_only"] = "none"
    ensure_weight_tying: bool = True
    dtype: Literal["float32", "base"] = "float32"


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model with its adapters: *peft_config* is the content of adapter_config.json but for the base's name,
    *description* what else is needed to make the same adapters again."""

    model: nn.Module
    peft_config: Mapping[str, Any]
    description: Mapping[str, Any]


def add_adapters(
    model: nn.Module, lora: Lora, *, task_type: str | None, num_base_rows: int | None = None
) -> Adapted:
    """Freeze *model* and put adapters into it (it is changed in place, and wrapped in a ``PeftModel``).

    *task_type* is peft's (``CAUSAL_LM``), None for a model that peft has no class for. Where the embedding has another
    number of rows than *num_base_rows*, it was resized, and is saved with the adapters. Raises :class:`RecipeError`
    for names that match nothing, or nothing that can have an adapter.
    """
    targets, saved = find_modules(model, lora)
    if getattr(model, "is_quantized", False):
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    config_class, parent_library = type(model).__name__, type(model).__module__
    peft_config = _lora_config(model, lora, targets, saved, task_type)
    wrapped = _wrap(model, peft_config, autocast=lora.dtype == "float32")
    _draw_without_base(wrapped, peft_config.init_lora_weights)
    wrapped.save_embedding_layers = num_base_rows is not None and num_base_rows != num_embeddings(
        model
    )
    document = _document(peft_config)
    if task_type is None:
        document["auto_mapping"] = {
            "base_model_class": config_class,
            "parent_library": parent_library,
        }
    description = asdict(lora) | {
        "targets": targets,
        "saved": saved,
        "resized": wrapped.save_embedding_layers,
    }
    _log_what_is_saved(wrapped, targets, saved)
    return Adapted(wrapped, document, description)


def why_whole(lora: Lora) -> str:
    """Why the base must have its values when adapters are put into it; empty where it may be without memory."""
    if lora.use_dora:
        return "DoRA begins from the base's weights"
    return (
        "orthogonal adapters are drawn with the base at hand" if lora.init == "orthogonal" else ""
    )


def _draw_without_base(model: nn.Module, init: Any) -> None:
    """First values for adapters on layers without memory, from torch's generator: peft leaves them without, too."""
    from peft.tuners.lora import LoraLayer

    drawn: dict[nn.Parameter, nn.Parameter] = {}
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        parts = [
            part for name in layer.adapter_layer_names for part in getattr(layer, name).modules()
        ]
        held = [
            (part, name, parameter)
            for part in parts
            for name, parameter in part._parameters.items()
        ]
        without = [
            (part, name, parameter)
            for part, name, parameter in held
            if parameter is not None and parameter.is_meta
        ]
        for part, name, parameter in without:
            if parameter not in drawn:
                drawn[parameter] = nn.Parameter(
                    torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                )
            part._parameters[name] = drawn[parameter]
        if without:
            layer.reset_lora_parameters(ADAPTER_NAME, init)  # type: ignore[no-untyped-call]


@torch.no_grad()
def copy_saved_modules(model: nn.Module) -> None:
    """Give the modules that are trained as a whole the values of the base's, which got theirs after they were made."""
    from peft.utils.other import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            original: Any = module.original_module
            trained: Any = module.modules_to_save[ADAPTER_NAME]
            for target, source in zip(trained.parameters(), original.parameters(), strict=True):
                target.copy_(source)


def find_modules(model: nn.Module, lora: Lora) -> tuple[list[str], list[str]]:
    """The full names of the modules that get an adapter, and of those that are trained as a whole.

    Raises :class:`RecipeError` naming every pattern that finds nothing.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    del modules[""]
    problems: list[Problem] = []
    saved = _matching(lora.modules_to_save, modules, modules, "peft.modules_to_save", problems)
    adaptable = {name: module for name, module in modules.items() if isinstance(module, _ADAPTABLE)}
    excluded = _matching(lora.exclude_modules, adaptable, modules, "peft.exclude_modules", problems)
    patterns = (
        [lora.target_modules] if isinstance(lora.target_modules, str) else list(lora.target_modules)
    )
    found: set[str] = set()
    mistaken = _taken_for_experts(model, adaptable)
    if ALL_LINEAR in patterns:
        found |= _all_linear(model, adaptable) - _within(saved, adaptable)
        if lost := sorted(found & mistaken - set(excluded)):
            log.warning(
                "peft treats layers with these names as experts, so they get no adapter: %s",
                ", ".join(_leaves(lost)),
            )
        found -= mistaken
    named = [pattern for pattern in patterns if pattern != ALL_LINEAR]
    found |= set(_matching(named, adaptable, modules, "peft.target_modules", problems))
    found -= set(excluded)
    if lost := sorted(found & mistaken):
        problems.append(_mistaken(lost))
    if both := sorted(found & _within(saved, adaptable)):
        what = "these modules would be both fully trained and adapted"
        problems.append(
            Problem(
                what, "peft.modules_to_save", both[:5], "list them in only one of the two settings"
            )
        )
    if not found and not problems:
        what = "no layer is left to adapt"
        problems.append(Problem(what, "peft.target_modules", patterns, _there_are(adaptable)))
    if problems:
        raise RecipeError.all_of(problems)
    return [name for name in modules if name in found], saved


def _matching(
    patterns: Iterable[str],
    wanted: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    key: str,
    problems: list[Problem],
) -> list[str]:
    """The names in *wanted* that patterns match; a problem for each pattern that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        matches = [name for name in wanted if _matches(pattern, name)]
        found.update(matches)
        if not matches:
            unfit = next((name for name in modules if _matches(pattern, name)), None)
            what = "no module has this name"
            if unfit is not None:
                what = f"{unfit} is a {type(modules[unfit]).__name__}: only single layers can have an adapter"
            problems.append(Problem(what, key, pattern, did_you_mean(pattern, wanted)))
    return [name for name in wanted if name in found]


def _matches(pattern: str, name: str) -> bool:
    """A glob means whole names; a plain name also the end of one, after a dot."""
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def _within(parents: Sequence[str], names: Iterable[str]) -> set[str]:
    return {
        name
        for name in names
        if any(name == parent or name.startswith(f"{parent}.") for parent in parents)
    }


def _all_linear(model: Any, adaptable: Mapping[str, nn.Module]) -> set[str]:
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name
        for name, layer in adaptable.items()
        if isinstance(layer, _LINEAR) and layer is not output
    }


def _taken_for_experts(model: Any, adaptable: Iterable[str]) -> set[str]:
    """Layers beside fused experts whose names these had in older versions of the model: peft means the experts."""
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # peft that knows no fused experts
        return set()

    def kept(leaf: str) -> bool:
        config: Any = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # a part of what is fused
            return False
        return leaf in config.target_modules

    mistaken = {leaf for leaf in _leaves(adaptable) if not kept(leaf)}
    return {name for name in adaptable if name.rpartition(".")[2] in mistaken}


def _mistaken(names: Sequence[str]) -> Problem:
    what = "peft treats layers with these names as experts, and would adapt the experts instead"
    return Problem(what, "peft.target_modules", names[:5], "select other layers, or use all-linear")


def did_you_mean(pattern: str, wanted: Mapping[str, nn.Module]) -> str:
    """Names of layers near to what a pattern holds that no layer has; as a glob where layers lie inside."""
    leaves, parts = (
        _leaves(wanted),
        dict.fromkeys(part for name in wanted for part in name.split(".")),
    )
    unknown = [word for word in re.split(r"[^\w-]+", pattern) if word and word not in parts]
    word = unknown[-1] if unknown else pattern.rpartition(".")[2]
    near = difflib.get_close_matches(
        word, [part for part in parts if not part.isdecimal()], n=3, cutoff=0.5
    )
    shown = [part if part in leaves else f"*.{part}.*" for part in near]
    return (
        f"did you mean {' or '.join(shown)}? {_there_are(wanted)}" if near else _there_are(wanted)
    )


def _there_are(wanted: Iterable[str]) -> str:
    leaves = _leaves(wanted)
    more = f" and {len(leaves) - 20} more" if len(leaves) > 20 else ""
    return f"there are {', '.join(leaves[:20])}{more}" if leaves else "the model has no such layer"


def _leaves(names: Iterable[str]) -> list[str]:
    return list(
        dict.fromkeys(leaf for name in names if not (leaf := name.rpartition(".")[2]).isdecimal())
    )


def _lora_config(
    model: Any, lora: Lora, targets: list[str], saved: list[str], task_type: str | None
) -> Any:
    from peft import LoraConfig

    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    keep_tied = bool(getattr(model, "all_tied_weights_keys", None)) and lora.ensure_weight_tying
    if keep_tied and (adapted := _ends_of_model(targets)):
        raise RecipeError(
            "adapters on an embedding and on its tied output layer cannot be kept equal",
            where="peft.target_modules",
            value=adapted,
            hint="set peft.ensure_weight_tying to false, or list the embedding in peft.modules_to_save instead",
        )
    options: dict[str, Any] = (
        {"ensure_weight_tying": True} if keep_tied and _ends_of_model(saved) else {}
    )
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=peft_targets(targets, names),
        modules_to_save=_peft_names(saved, names, str.endswith) or None,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        init_lora_weights=True if lora.init == "default" else lora.init,
        bias=lora.bias,
        task_type=task_type,
        **options,
    )


def _ends_of_model(names: Iterable[str]) -> list[str]:
    """Those of the names by which peft knows embeddings and output layers."""
    return [name for name in names if name.rpartition(".")[2] in {"embed_tokens", "lm_head"}]


def peft_targets(targets: Sequence[str], names: Sequence[str]) -> list[str] | str:
    """What makes peft choose exactly *targets* among *names*: ends of names where that can be, else an expression."""
    found = _peft_names(targets, names, lambda name, end: name == end or name.endswith(f".{end}"))
    return found or "|".join(map(re.escape, targets))


def _peft_names(
    wanted: Sequence[str], names: Sequence[str], selects: Callable[[str, str], bool]
) -> list[str]:
    """The shortest of two lists that *selects* exactly the wanted names; an empty one where neither does."""
    for ends in (sorted({name.rpartition(".")[2] for name in wanted}), sorted(wanted)):
        if {name for name in names if any(selects(name, end) for end in ends)} == set(wanted):
            return ends
    if wanted and selects is str.endswith:
        raise RecipeError(
            "peft cannot distinguish these modules from others with the same name suffix",
            where="peft.modules_to_save",
            value=list(wanted)[:5],
            hint="list all modules with these suffixes, or other modules",
        )
    return []


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
    for text in {
        str(w.message)
        for w in caught
        if not issubclass(w.category, FutureWarning | DeprecationWarning)
    }:
        log.warning("peft: %s", text)
    return wrapped.train()


def _document(peft_config: Any) -> dict[str, Any]:
    """The fields of adapter_config.json as ``save_pretrained`` writes them, in an order that repeats."""
    fields = peft_config.to_dict()
    plain = {
        key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()
    }
    return plain | {"inference_mode": True}


def _log_what_is_saved(model: nn.Module, targets: Sequence[str], saved: Sequence[str]) -> None:
    num_all = sum(p.numel() for p in model.parameters())
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    wholes = f", and {', '.join(saved)} as a whole" if saved else ""
    log.info(
        "adapters on %d layers%s: %s of %s parameters are trained, and checkpoints hold only these",
        len(targets),
        wholes,
        f"{num_trained:,}",
        f"{num_all:,}",
    )
    if getattr(model, "save_embedding_layers", False):
        log.info("the embeddings are saved too: their size differs from the base's")
