"""Adapters of the peft library on a frozen base: which layers get one, and the configuration that describes them.

Names are resolved here, because peft matches suffixes without a message: ``head`` in ``modules_to_save`` would also
match ``lm_head``. The configuration that peft gets selects exactly the modules found here, and other programs read it
from ``adapter_config.json``.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.mtp import is_of_mtp, mtp_of
from automodel_ckpt.models.vocabulary import num_embeddings
from automodel_ckpt.units import counted

log = logging.getLogger("automodel_ckpt")

ALL_LINEAR = "all-linear"
ALL_EXPERTS = "all-experts"
ADAPTER_NAME = "default"
_LINEAR = (nn.Linear, Conv1D)
_FUSED_DIMENSIONS = 3
"""Fused experts have the shape (experts, inputs, outputs) or (experts, outputs, inputs)."""
Named = TypeVar("Named")
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Lora:
    """The kind and the location of adapters. The fields are the keys of a recipe's ``peft`` section."""

    r: int = 8
    alpha: int = 16
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int] = field(default_factory=dict)
    dropout: float = 0.0
    target_modules: Sequence[str] | str = ALL_LINEAR
    target_parameters: Sequence[str] | str = ()
    exclude_modules: Sequence[str] = ()
    exclude_if_present: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    use_dora: bool = False
    use_rslora: bool = False
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    bias: Literal["none", "all", "lora_only"] = "none"
    ensure_weight_tying: bool = True
    dtype: Literal["float32", "base"] = "float32"


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model with adapters.

    *peft_config* is the content of adapter_config.json without the name of the base. *description* contains all
    settings that are necessary to create equal adapters again.
    """

    model: nn.Module
    peft_config: Mapping[str, Any]
    description: Mapping[str, Any]


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
    parameters = find_parameters(model, lora.target_parameters)
    targets, saved = find_modules(model, lora, head)
    if getattr(model, "is_quantized", False):
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    base_class = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
    }
    ranks, alphas = _numbers_of_layers(lora, targets)
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
    document = _document(peft_config)
    if task_type is None:
        document["auto_mapping"] = base_class
    description = asdict(lora) | {"targets": targets, "saved": saved, "resized": was_resized}
    description["parameters"] = parameters
    description["ranks"] = {name: rank for name, rank in ranks.items() if rank != lora.r}
    description["alphas"] = {name: alpha for name, alpha in alphas.items() if alpha != lora.alpha}
    _log_what_is_saved(wrapped, [*targets, *parameters], saved)
    return Adapted(wrapped, document, description)


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


def find_modules(
    model: nn.Module, lora: Lora, head: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Find the full names of the modules that get an adapter, and of those that are fully trained.

    The modules *head* are among the latter, and have no adapters, whatever the patterns match.
    The layers for multi-token prediction are not among them: peft's users load adapters into models without them.
    Raises :class:`RecipeError` with every pattern that matches no module.
    """
    modules = _without_mtp(model, dict(model.named_modules(remove_duplicate=False)))
    del modules[""]
    problems: list[Problem] = []
    given = _matching(lora.modules_to_save, modules, modules, "peft.modules_to_save", problems)
    # In the order of the model.
    saved = [name for name in modules if name in given or name in head]
    adaptable = {name: module for name, module in modules.items() if isinstance(module, _ADAPTABLE)}
    excluded = _matching(lora.exclude_modules, adaptable, modules, "peft.exclude_modules", problems)
    for pattern in lora.exclude_if_present:
        excluded += [name for name in adaptable if _matches(pattern, name)]
    patterns = lora.target_modules
    if isinstance(patterns, str):
        patterns = [patterns]
    found: set[str] = set()
    experts = _mistaken_for_experts(model, adaptable)
    not_linear = _not_linear(model, adaptable)
    lost = _lost_by_peft(model, adaptable)
    if ALL_LINEAR in patterns:
        found |= _all_linear(model, adaptable) - _within(saved, adaptable)
        # peft would adapt the fused experts instead, and the saved adapter would give other outputs
        # in peft.
        reasons = {
            "peft treats layers with these names as experts, so they get no adapter": experts,
            "peft does not support adapters on these layers of this model": _rejected_by_peft(
                model, found - experts
            ),
            "these layers do not return what a linear layer does, so they get no adapter": not_linear,
            "peft cannot load adapters of these layers, so they get none": lost,
        }
        for reason, names in reasons.items():
            if omitted := sorted(found & names - set(excluded)):
                log.warning("%s: %s", reason, ", ".join(_leaves(omitted)))
            found -= names
    named = [pattern for pattern in patterns if pattern != ALL_LINEAR]
    found |= set(_matching(named, adaptable, modules, "peft.target_modules", problems))
    found -= {*excluded, *_within(head, adaptable)}
    problems += _unsuited_problems(found, experts, not_linear, lost)
    if both := sorted(found & _within(saved, adaptable)):
        what = "these modules would be both fully trained and adapted"
        hint = "list them in only one of the two settings"
        problems.append(Problem(what, "peft.modules_to_save", both[:5], hint))
    if not found and not problems and not find_parameters(model, lora.target_parameters):
        what = "no layer is left to adapt"
        hint = _available(adaptable)
        problems.append(Problem(what, "peft.target_modules", list(patterns), hint))
    if problems:
        raise RecipeError.all_of(problems)
    return [name for name in modules if name in found], saved


def _numbers_of_layers(lora: Lora, targets: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The ranks and the alphas of the layers *targets* that a pattern matches.

    Raises :class:`RecipeError` with every pattern that matches none of them.
    """
    found: list[dict[str, int]] = []
    problems: list[Problem] = []
    for key, patterns in (
        ("peft.rank_pattern", lora.rank_pattern),
        ("peft.alpha_pattern", lora.alpha_pattern),
    ):
        numbers: dict[str, int] = {}
        for pattern, number in patterns.items():
            matches = [name for name in targets if _matches(pattern, name)]
            for name in matches:
                numbers.setdefault(name, number)
            if not matches:
                what = "no adapted layer has this name"
                problems.append(Problem(what, key, pattern, _available(targets)))
        found.append(numbers)
    if problems:
        raise RecipeError.all_of(problems)
    ranks, alphas = found
    return ranks, alphas


def _peft_patterns(
    patterns: Mapping[str, int], numbers: Mapping[str, int], names: Sequence[str]
) -> dict[str, int]:
    """The patterns by which peft gives the *numbers* to exactly their layers, among *names*.

    peft's are regular expressions for the end of a name. These are the *patterns* themselves if possible, otherwise
    full names.
    """
    selected: dict[str, int] = {}
    if all(re.fullmatch(r"[\w.]+", pattern) for pattern in patterns):
        for name in names:
            for pattern, number in patterns.items():
                if re.match(rf"(.*\.)?({pattern})$", name):
                    selected[name] = number
                    break
        if selected == numbers:
            return dict(patterns)
    return {f"^{name}": number for name, number in numbers.items()}


def find_parameters(model: nn.Module, patterns: Sequence[str] | str) -> list[str]:
    """Find the full names of the parameters with three dimensions (fused experts) that *patterns* match.

    A glob matches the full name, other patterns the name or its last components. ``all-experts`` selects all, also if
    there are none. Raises :class:`RecipeError` with every other pattern that matches none.
    """
    modules = dict(model.named_modules())
    shapes: dict[str, int] = {}
    fused: list[str] = []
    for name, parameter in _without_mtp(model, dict(model.named_parameters())).items():
        shapes[name] = parameter.dim()
        # The kernel of a convolution can have three dimensions, too.
        is_layer = isinstance(modules[name.rpartition(".")[0]], _ADAPTABLE)
        if parameter.dim() == _FUSED_DIMENSIONS and not is_layer:
            fused.append(name)
    found: set[str] = set()
    problems: list[Problem] = []
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        if pattern == ALL_EXPERTS:
            # Embeddings of positions can have three dimensions, too.
            found.update(name for name in fused if _is_of_experts(name))
            continue
        matches = [name for name in fused if _matches(pattern, name)]
        found.update(matches)
        if matches:
            continue
        what = "no parameter with three dimensions (fused experts) has this name"
        if others := [name for name in shapes if _matches(pattern, name)]:
            other = others[0]
            what = f"{other} has {shapes[other]} dimensions: only fused experts, with three, are adapted like this"
        leaves = _leaves(fused)
        hint = "the model has no fused experts: use peft.target_modules"
        if leaves:
            hint = f"there are {', '.join(leaves)}"
        problems.append(Problem(what, "peft.target_parameters", pattern, hint))
    if problems:
        raise RecipeError.all_of(problems)
    return [name for name in fused if name in found]


def _without_mtp(model: Any, named: dict[str, Named]) -> dict[str, Named]:
    """The modules or parameters of *model* without those of the layers for multi-token prediction."""
    if mtp_of(model) is None:
        return named
    return {name: value for name, value in named.items() if not is_of_mtp(name)}


def _is_of_experts(name: str) -> bool:
    """Whether a module that a parameter is in has the name that transformers gives to experts."""
    return any("experts" in component for component in name.split(".")[:-1])


def _matching(
    patterns: Iterable[str],
    wanted: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    key: str,
    problems: list[Problem],
) -> list[str]:
    """The names in *wanted* that patterns match. Adds a problem for each pattern without a match."""
    found: set[str] = set()
    for pattern in patterns:
        matches = [name for name in wanted if _matches(pattern, name)]
        found.update(matches)
        if not matches:
            what = "no module has this name"
            others = [name for name in modules if _matches(pattern, name)]
            if others:
                kind = type(modules[others[0]]).__name__
                what = f"{others[0]} is a {kind}: only single layers can have an adapter"
            problems.append(Problem(what, key, pattern, did_you_mean(pattern, wanted)))
    return [name for name in wanted if name in found]


def _matches(pattern: str, name: str) -> bool:
    """Whether a glob matches the full name, or a pattern without wildcards the name or its last components."""
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def _within(parents: Sequence[str], names: Iterable[str]) -> set[str]:
    """The names of modules that are in *parents* or inside of one of them."""
    prefixes = tuple(f"{parent}." for parent in parents)
    return {name for name in names if name in parents or name.startswith(prefixes)}


def _all_linear(model: Any, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of all linear layers except the output layer."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = set()
    for name, layer in adaptable.items():
        if isinstance(layer, _LINEAR) and layer is not output:
            found.add(name)
    return found


def _mistaken_for_experts(model: Any, adaptable: Iterable[str]) -> set[str]:
    """The names of layers that peft would replace by the fused experts of the model.

    peft interprets such names as those of experts in older versions of the model.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a version of peft without support for fused experts
        return set()

    def is_unchanged(leaf: str) -> bool:
        config: Any = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # peft rejects a part of a fused tensor
            return False
        return leaf in config.target_modules

    experts = {leaf for leaf in _leaves(adaptable) if not is_unchanged(leaf)}
    return {name for name in adaptable if name.rpartition(".")[2] in experts}


def _rejected_by_peft(model: Any, names: Iterable[str]) -> set[str]:
    """The *names* of layers that peft rejects in models of this type, such as those whose kernels read the weight."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    def is_rejected(leaf: str) -> bool:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, leaf)
        except ValueError:
            return True
        return False

    candidates = set(names)
    rejected = {leaf for leaf in _leaves(candidates) if is_rejected(leaf)}
    return {name for name in candidates if name.rpartition(".")[2] in rejected}


def _lost_by_peft(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The *names* of layers whose adapters peft saves, and ignores when it loads them, with a warning.

    peft applies the renamings that transformers has for old weights to adapters, too, and some rename the present name
    of a layer (peft 0.21: shared_experts of Laguna).
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_adapter_state_dict_for_transformers as loaded_state,
        )
    except ImportError:  # a version of peft that renames nothing
        return set()
    keys = {f"base_model.model.{name}.lora_A.weight": name for name in names}
    # Only the names matter. Adapters on the meta device take no memory.
    state = {key: torch.empty(1, 1, device="meta") for key in keys}
    config: Any = LoraConfig(target_modules=list(keys.values()))
    loaded = loaded_state(model, config, state, ADAPTER_NAME)
    found = {key.replace(f".{ADAPTER_NAME}.", ".") for key in loaded}
    return {name for key, name in keys.items() if key not in found}


def _not_linear(model: nn.Module, adaptable: Mapping[str, nn.Module]) -> set[str]:
    """The names of layers that the model's code derives from ``nn.Linear``, but that compute something else.

    Examples are routers that return scores and indices, and block-diagonal projections. peft adds the output of an
    adapter to what such a layer returns, and the forward pass fails.
    """
    found = set()
    for name, layer in adaptable.items():
        # Classes of other packages, such as quantized layers, have adapters of their own in peft.
        is_own_class = type(layer).__module__ == type(model).__module__
        if isinstance(layer, nn.Linear) and is_own_class and not _maps_rows(layer):
            found.add(name)
    return found


def _maps_rows(layer: nn.Linear) -> bool:
    """Whether *layer* maps rows of ``in_features`` values to a tensor with rows of ``out_features`` values."""
    if type(layer).forward is nn.Linear.forward:
        return True
    # On the meta device, nothing is computed and no random numbers are drawn.
    state = [*layer.named_parameters(), *layer.named_buffers()]
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in state}
    rows = torch.empty(2, 3, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        with torch.no_grad():
            output = torch.func.functional_call(layer, tensors, (rows,))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, 3, layer.out_features)


def _unsuited_problems(
    found: set[str], experts: set[str], not_linear: set[str], lost: set[str]
) -> list[Problem]:
    """The problems of the layers *found* that were selected by name and can have no adapter."""
    leave_out = "leave them out: peft.exclude_modules"
    causes = [
        (
            "peft treats layers with these names as experts, and would adapt the experts instead",
            experts,
            "select other layers, or use all-linear",
        ),
        (
            "these layers do not return what a linear layer does, so they can have no adapter",
            not_linear,
            leave_out,
        ),
        ("peft saves adapters of these layers, and cannot load them", lost, leave_out),
    ]
    problems = []
    for what, names, hint in causes:
        if wrong := sorted(found & names):
            problems.append(Problem(what, "peft.target_modules", wrong[:5], hint))
    return problems


def did_you_mean(pattern: str, wanted: Mapping[str, nn.Module]) -> str:
    """A hint with the names that are similar to the unknown component of *pattern*, and with all names.

    The suggestion for a component that is not the last one of a name is a glob.
    """
    leaves = _leaves(wanted)
    components: dict[str, None] = {}
    for name in wanted:
        components.update(dict.fromkeys(name.split(".")))
    words = [word for word in re.split(r"[^\w-]+", pattern) if word]
    unknown = [word for word in words if word not in components]
    word = unknown[-1] if unknown else pattern.rpartition(".")[2]
    names = [component for component in components if not component.isdecimal()]
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if not near:
        return _available(wanted)
    suggestions = [name if name in leaves else f"*.{name}.*" for name in near]
    return f"did you mean {' or '.join(suggestions)}? {_available(wanted)}"


def _available(wanted: Iterable[str]) -> str:
    """A hint with the last components of up to 20 names."""
    leaves = _leaves(wanted)
    if not leaves:
        return "the model has no such layer"
    more = f" and {len(leaves) - 20} more" if len(leaves) > 20 else ""
    return f"there are {', '.join(leaves[:20])}{more}"


def _leaves(names: Iterable[str]) -> list[str]:
    """The last components of module names, without numbers and duplicates."""
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return [leaf for leaf in leaves if not leaf.isdecimal()]


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
            hint="set peft.ensure_weight_tying to false, or list the embedding in peft.modules_to_save instead",
        )
    options: dict[str, Any] = {}
    if keep_tied and _ends_of_model(saved):
        options["ensure_weight_tying"] = True
    if parameters:
        all_parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        options["target_parameters"] = _peft_names(parameters, all_parameters, _has_suffix)
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        # peft takes an empty list for no layers, and None for those that it knows of the model's type.
        target_modules=peft_targets(targets, names) if targets else [],
        modules_to_save=_peft_names(saved, names, str.endswith) or None,
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


def peft_targets(targets: Sequence[str], names: Sequence[str]) -> list[str] | str:
    """The target_modules by which peft selects exactly *targets* among *names*.

    These are suffixes of names if possible, otherwise a regular expression.
    """

    suffixes = _peft_names(targets, names, _has_suffix)
    return suffixes or "|".join(re.escape(target) for target in targets)


def _has_suffix(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _peft_names(
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
    texts = set()
    for warning in caught:
        if not issubclass(warning.category, FutureWarning | DeprecationWarning):
            texts.add(str(warning.message))
    for text in texts:
        log.warning("peft: %s", text)
    return wrapped.train()


def _document(peft_config: Any) -> dict[str, Any]:
    """The fields of adapter_config.json as ``save_pretrained`` writes them, in a reproducible order."""
    fields: dict[str, Any] = peft_config.to_dict()
    for key, value in fields.items():
        if isinstance(value, set):
            # The order of a set of strings differs between processes (PYTHONHASHSEED).
            fields[key] = sorted(value)
    # save_pretrained writes true also after training, so that a loaded adapter is frozen.
    fields["inference_mode"] = True
    return fields


def _log_what_is_saved(model: nn.Module, targets: Sequence[str], saved: Sequence[str]) -> None:
    num_all = sum(p.numel() for p in model.parameters())
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    wholes = f", and {', '.join(saved)} as a whole" if saved else ""
    log.info(
        "adapters on %s%s: %s of %s parameters are trained, and checkpoints hold only these",
        counted(len(targets), "layer"),
        wholes,
        f"{num_trained:,}",
        f"{num_all:,}",
    )
    if getattr(model, "save_embedding_layers", False):
        log.info("the embeddings are saved too: their size differs from the base's")
