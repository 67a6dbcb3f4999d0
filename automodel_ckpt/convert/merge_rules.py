"""What an adapter makes of the tensors of its base: LoRA, rsLoRA, DoRA, and what was trained as a whole. Pure.

With P a layer's weight as (outputs, inputs), A and B the adapter's factors and s its scale, the merged weight is
P' = P + s B A; with DoRA, whose magnitude is m, each row of P' is scaled to the length that m has for it (sources: Hu
et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732: s = alpha / sqrt(r); Liu et al. 2024,
arXiv:2402.09353).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from automodel_ckpt.checkpoint.tensors.float_cast import Array
from automodel_ckpt.errors import CheckpointUnusable

_LARGEST_ALPHA = 1e9
_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)
_PLACES = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "m",
}


@dataclass(slots=True)
class Change:
    """What becomes of a tensor: the adapter's keys of its new value (*whole*), of the factors (a, b) and of the
    magnitude (m)."""

    whole: str | None = None
    factors: dict[str, str] = field(default_factory=dict)


class Naming(Protocol):
    """The base's names: *files* maps names in memory to those in its files, *tied* each further name of a tensor (in
    memory) to its first; the weights of the modules *transposed* have one row for each input."""

    @property
    def files(self) -> Mapping[str, str]: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def transposed(self) -> frozenset[str]: ...


def changes_by(keys: Mapping[str, Any], where: str) -> dict[str, Change]:
    """{name in memory: what becomes of it} for the *keys* of an adapter's file. Raises :class:`CheckpointUnusable` for
    a key of another kind of adapter."""
    changes: dict[str, Change] = {}
    for key in keys:
        name = key.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(name):
            changes.setdefault(f"{match[1]}.weight", Change()).factors[_PLACES[match[2]]] = key
        elif name == key or "lora_" in name:
            raise _unusable(
                "this tensor is not one of LoRA, rsLoRA, DoRA or a whole module", where, key
            )
        else:
            changes.setdefault(name.replace(".base_layer.", "."), Change()).whole = key
    for name, change in changes.items():
        if change.factors and not {"a", "b"} <= change.factors.keys():
            raise _unusable("an adapter lacks one of its two factors", where, name)
    return changes


def scale_of(config: Mapping[str, Any], rank: int) -> float:
    """The scale of an adapter of that *rank* by its adapter_config.json. Raises ValueError where it gives none."""
    alpha = config.get("lora_alpha")
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, (int, float))
        or not abs(alpha) <= _LARGEST_ALPHA
    ):
        raise ValueError(f"lora_alpha is {str(alpha)[:50]}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merged(
    weight: Array, factors: Mapping[str, Array], config: Mapping[str, Any], *, transposed: bool
) -> Array:
    """The *weight* with its adapter, of the same shape: all floats of one width, *factors* by a, b and m."""
    plain = weight.T if transposed else weight.reshape(len(weight), -1)
    a, b = (factors[name].reshape(len(factors[name]), -1) for name in "ab")
    if b.shape[1] != a.shape[0] or plain.shape != (b.shape[0], a.shape[1]):
        raise ValueError(f"weight {weight.shape}, A {factors['a'].shape}, B {factors['b'].shape}")
    result: Array = plain + np.asarray(scale_of(config, len(a)), weight.dtype) * (b @ a)
    if "m" in factors:
        result *= (factors["m"].reshape(-1) / np.linalg.norm(result, axis=1))[:, None]
    return result.T if transposed else result.reshape(weight.shape)


def _unusable(what: str, where: str, value: str) -> CheckpointUnusable:
    hint = "load base and adapter with peft in your own code, and call merge_and_unload"
    return CheckpointUnusable(what, where=where, value=value, hint=hint)
