"""Merging an adapter into tensors of its base: LoRA, rsLoRA, DoRA, and modules trained as a whole. Pure functions.

With P a layer's weight as (outputs, inputs), A and B the adapter's factors and s its scale, the merged weight is
P' = P + s B A. With DoRA and its magnitude m, each row of P' is scaled to the length that m has for it (sources: Hu
et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732: s = alpha / sqrt(r); Liu et al. 2024,
arXiv:2402.09353).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, Values
from automodel_ckpt.checkpoint.tensors.float_cast import Array
from automodel_ckpt.errors import CheckpointUnusable

MERGE_WITH_PEFT = "load base and adapter with peft in your own code, and call merge_and_unload"
_LARGEST_ALPHA = 1e9
_NAME = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)
_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)
# The roles of an adapter's tensors in the formulas above.
_ROLES = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "m",
}


@dataclass(slots=True)
class Change:
    """How a tensor changes: the adapter's keys of its new value (*whole*), of the factors (a, b) and of the magnitude
    (m). *experts* is not None for the factors of fused experts."""

    whole: str | None = None
    factors: TextDict = field(default_factory=dict)
    experts: ExpertRange | None = None


class Experts(Protocol):
    """A parameter in memory with the weights of all experts of a layer.

    *parts* maps names in files to (expert, slices of the expert's matrix). It is empty if the files have one tensor.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def parts(self) -> Mapping[str, tuple[int, tuple[slice, ...]]]: ...


@dataclass(frozen=True)
class ExpertRange:
    """The experts of a tensor in files: one of *num_experts*, or all of them if *expert* is None."""

    num_experts: int
    expert: int | None = None
    columns: tuple[slice, ...] = ()
    """The part of the expert's matrix in memory that the tensor contains."""


class Naming(Protocol):
    """The names of the base's tensors.

    *files* maps names in memory to names in files, and *tied* each further name of a tensor (in memory) to its first.
    The weights of the modules in *transposed* have one row for each input. *experts* has the parameters of modules with
    fused experts, in the module's order. *others* are the tensors in files that the model does not have. *exported*
    maps names in files to names in the merged model's files, where these differ.
    """

    @property
    def files(self) -> Texts: ...
    @property
    def tied(self) -> Texts: ...
    @property
    def transposed(self) -> frozenset[str]: ...
    @property
    def experts(self) -> Mapping[str, Sequence[Experts]]: ...
    @property
    def others(self) -> frozenset[str]: ...
    @property
    def exported(self) -> Texts: ...


def changes_by(keys: Values, where: str) -> dict[str, Change]:
    """Return {name in memory: its change} for the *keys* of an adapter's file.

    Raises :class:`CheckpointUnusable` for a key of another kind of adapter, or if a factor is missing.
    """
    changes: dict[str, Change] = {}
    for key in keys:
        name = key.removeprefix(_PREFIX)
        match = _FACTOR.fullmatch(name)
        if match is not None:
            change = changes.setdefault(f"{match[1]}.weight", Change())
            change.factors[_ROLES[match[2]]] = key
        # All tensors of an adapter have peft's prefix, which is missing if the name is the key.
        elif name == key or "lora_" in name:
            raise unusable(
                "this tensor is not one of LoRA, rsLoRA, DoRA or a whole module", where, key
            )
        else:
            # peft wraps a layer that has both a new value and factors.
            change = changes.setdefault(name.replace(".base_layer.", "."), Change())
            change.whole = key
    for name, change in changes.items():
        if change.factors and not {"a", "b"} <= change.factors.keys():
            raise unusable("an adapter lacks one of its two factors", where, name)
    return changes


def expert_changes(
    changes: dict[str, Change],
    module: str,
    experts: Sequence[Experts],
    config: Values,
) -> Iterator[tuple[Experts, Change]]:
    """Remove the changes of the fused *experts* in *module* from *changes*, and yield each parameter with its own.

    peft wraps the module once for each parameter that ``target_parameters`` selects, in the order of the parameters:
    the innermost wrapper belongs to the first (source: peft 0.21, ``BaseTuner._inject_parameters``). Raises ValueError
    if there are other changes than selected parameters.
    """
    wrapper = module
    found = []
    while f"{wrapper}.weight" in changes:
        found.append(changes.pop(f"{wrapper}.weight"))
        wrapper += ".base_layer"
    if not found:
        return
    wanted = config.get("target_parameters")
    suffixes = tuple(f".{name}" for name in wanted) if isinstance(wanted, list) else ()
    selected = [each for each in experts if f".{each.name}".endswith(suffixes)]
    if len(selected) != len(found):
        raise ValueError(f"{len(found)} adapters for {len(selected)} target_parameters in {module}")
    yield from zip(selected, reversed(found), strict=True)


def merged(
    weight: Array,
    factors: Mapping[str, Array],
    config: Values,
    *,
    name: str,
    transposed: bool,
    experts: ExpertRange | None = None,
) -> Array:
    """Return the *weight* of a layer or of fused experts merged with its adapter, of the same shape and dtype.

    Args:
        weight: The weight [outputs, inputs, ...], or if *transposed* [inputs, outputs] (transformers' Conv1D). With
            *experts*, the tensor in files that they describe: a matrix, or a stack of the matrices of all experts.
        factors: The arrays a, b and, for DoRA, m, of the weight's dtype. With experts, a is [rank * experts, inputs],
            in which the rank varies fastest, and b [outputs, rank * experts], in which the expert does (source: peft
            0.21, ``lora.layer.ParamWrapper``).
        config: The content of adapter_config.json.
        name: The name of the module, or of the experts' parameter, in memory.

    Raises:
        ValueError: The shapes do not match, or the config gives no scale.
    """
    a, b = _as_matrix(factors["a"]), _as_matrix(factors["b"])
    num_experts = 1 if experts is None else experts.num_experts
    rank, rest = divmod(len(a), num_experts)
    if rest or rank == 0 or b.shape[1] != len(a):
        raise ValueError(f"A {a.shape}, B {b.shape} for {num_experts} experts")
    scale = np.asarray(scale_of(config, rank, name), weight.dtype)
    a = a.reshape(num_experts, rank, -1)
    b = b.reshape(len(b), rank, num_experts)
    result = weight.copy()
    columns = () if experts is None else experts.columns
    numbers, matrices = [*range(num_experts)], result
    if experts is None:
        matrices = (result if transposed else _as_matrix(result))[None]
    elif experts.expert is not None:
        numbers, matrices = [experts.expert], result[None]
    if len(matrices) != len(numbers):
        raise ValueError(f"weight {weight.shape} for {num_experts} experts")
    for matrix, number in zip(matrices, numbers, strict=True):
        product = b[:, :, number] @ a[number]
        change = (product.T if transposed else product)[columns]
        if change.shape != matrix.shape:
            raise ValueError(f"weight {matrix.shape}, A and B {change.shape}")
        matrix += scale * change
    if "m" in factors:
        rows = result.T if transposed else _as_matrix(result)
        rows *= (factors["m"].reshape(-1) / np.linalg.norm(rows, axis=1))[:, None]
    return result


def scale_of(config: Values, rank: int, module: str) -> float:
    """Return the scale of the adapter of that *rank* on a *module*.

    The module's entry of ``alpha_pattern`` takes precedence over ``lora_alpha`` (source: peft, LoraConfig). Raises
    ValueError if the content of adapter_config.json gives no scale.
    """
    alpha: Any = config.get("lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise ValueError(f"alpha_pattern is {str(patterns)[:50]}")
    for pattern, value in patterns.items():
        if _names_module(str(pattern), module):
            alpha = value
            break
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    # The comparison is false for NaN.
    if not is_number or not abs(alpha) <= _LARGEST_ALPHA:
        raise ValueError(f"lora_alpha is {str(alpha)[:50]}")
    if config.get("use_rslora"):
        return float(alpha / math.sqrt(rank))
    return float(alpha / rank)


def _names_module(pattern: str, module: str) -> bool:
    # peft takes it as a regular expression, which can take forever to match.
    name = pattern.removeprefix("^")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"alpha_pattern has a regular expression: {pattern[:50]}")
    return module == name or (name == pattern and module.endswith(f".{name}"))


def _as_matrix(array: Array) -> Array:
    """Return an array of shape [len(array), rest]: a convolution's kernel becomes a row per output."""
    return array.reshape(len(array), -1)


def unusable(what: str, where: str, value: str) -> CheckpointUnusable:
    """Return the error for an adapter that cannot be merged."""
    return CheckpointUnusable(what, where, value, MERGE_WITH_PEFT)
