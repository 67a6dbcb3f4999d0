"""Rotary positions in config.json and in the metadata of GGUF. Pure functions.

Source: llama.cpp's ``ggml_rope_ext`` for YaRN, which computes what transformers does with its default settings; its
``llama`` architecture for ``rope_freqs.weight``, the divisors of frequencies that Llama 3.1 needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.convert.formats.gguf.values import KeyValue, not_convertible, positive_number

# The numbers that each kind of scaling of positions needs.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
# Llama 3.1, 3.2 and 3.3 have these values; their factors differ.
_LLAMA_3_LOW, _LLAMA_3_HIGH = 1.0, 4.0
_ORIGINAL_LENGTHS = tuple(2**power for power in range(3, 24))


@dataclass(frozen=True, slots=True)
class Positions:
    """The base of rotary frequencies, and how they are scaled.

    *scaling* is empty, or has ``rope_type`` and the numbers of this type, as in transformers. *local_theta* is the base
    in layers of sliding attention, which are not scaled; None if all layers have the same.
    """

    theta: float
    scaling: Mapping[str, Any]
    local_theta: float | None = None

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", "default"))

    def key_values(self, prefix: str) -> list[KeyValue]:
        """Return the keys ``PREFIX.rope.*``. Llama 3.1's scaling is a tensor instead (:meth:`factors`)."""
        found: list[KeyValue] = [(f"{prefix}.rope.freq_base", "float32", self.theta)]
        if self.local_theta is not None:
            found.append((f"{prefix}.rope.freq_base_swa", "float32", self.local_theta))
        if self.kind not in ("linear", "yarn"):
            return found
        scaling = f"{prefix}.rope.scaling"
        found.append((f"{scaling}.type", "string", self.kind))
        found.append((f"{scaling}.factor", "float32", float(self.scaling["factor"])))
        if self.kind == "yarn":
            length = int(self.scaling["original_max_position_embeddings"])
            found.append((f"{scaling}.original_context_length", "uint32", length))
            for name in _YARN_BETAS:
                found.append((f"{scaling}.yarn_{name}", "float32", float(self.scaling[name])))
        return found

    def factors(self, head_dim: int) -> list[float]:
        """Return the divisor of each rotary frequency (``rope_freqs.weight``); empty if there is no such tensor.

        Llama 3.1's scaling: long waves are divided by the factor, short ones are unchanged, and those between are
        interpolated.
        """
        if self.kind != "llama3":
            return []
        factor = float(self.scaling["factor"])
        low = float(self.scaling["low_freq_factor"])
        high = float(self.scaling["high_freq_factor"])
        original_length = float(self.scaling["original_max_position_embeddings"])
        factors = []
        for index in range(0, head_dim, 2):
            # The number of waves in the context of pretraining.
            waves = original_length * self.theta ** (-index / head_dim) / (2 * math.pi)
            smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
        return factors

    def config(self) -> dict[str, Any]:
        """Return the keys of config.json, under the names of transformers 4, which version 5 reads as well."""
        found: dict[str, Any] = {"rope_theta": self.theta}
        if self.local_theta is not None:
            found["rope_local_base_freq"] = self.local_theta
        if self.scaling:
            found["rope_scaling"] = dict(self.scaling)
        return found


def rotary_order(num_heads: int, head_dim: int) -> list[int]:
    """Return, for each row of llama.cpp's query or key projection, the number of the row in transformers'."""
    # A wrong order loads without an error in llama.cpp, and generates nonsense.
    half = head_dim // 2
    rows: list[int] = []
    for head in range(num_heads):
        first = head * head_dim
        for pair in range(half):
            rows.append(first + pair)
            rows.append(first + half + pair)
    return rows


def read_positions(config: Mapping[str, Any], known: frozenset[str], where: str) -> Positions:
    """Return the positions that *config* (of config.json, at *where*) describes.

    *known* are the kinds of scaling that llama.cpp computes for the architecture. Raises :class:`CheckpointUnusable`
    for any other kind, and for unusable numbers.
    """
    theta = positive_number(config, "rope_theta", where, 10_000.0)
    local_theta = None
    if config.get("rope_local_base_freq") is not None:
        local_theta = positive_number(config, "rope_local_base_freq", where)
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found, Mapping) and "sliding_attention" in found:
        # transformers 5: one entry per type of layer.
        local = found["sliding_attention"]
        found = found.get("full_attention")
        if not isinstance(local, Mapping) or not isinstance(found, Mapping):
            raise not_convertible("config.json holds no usable value", where, "rope_parameters")
        if local.get("rope_type", "default") != "default":
            raise not_convertible(
                "GGUF has no scaling of positions for sliding attention", where, local["rope_type"]
            )
        local_theta = positive_number(local, "rope_theta", where)
    settings: dict[str, Any] = {"rope_type": found}
    if isinstance(found, Mapping):
        settings = dict(found)
        settings["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    theta = positive_number(settings, "rope_theta", where, theta)
    return Positions(theta, _scaling(settings, config, known, where), local_theta)


def _scaling(
    settings: Mapping[str, Any], config: Mapping[str, Any], known: frozenset[str], where: str
) -> dict[str, Any]:
    kind = settings["rope_type"]
    if not isinstance(kind, str) or kind not in known or kind not in _NUMBERS:
        raise not_convertible(
            "GGUF has no such scaling of positions for this architecture",
            where,
            f"rope_type: {kind!r:.100}",
        )
    if kind == "default":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in _NUMBERS[kind]:
        default = None
        if name == "original_max_position_embeddings" and kind == "yarn":
            default = positive_number(config, "max_position_embeddings", where)
        scaling[name] = positive_number(settings, name, where, default)
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        value = "low_freq_factor is not below high_freq_factor"
        raise not_convertible("config.json holds no usable value", where, value)
    if kind == "yarn":
        for name, beta in _YARN_BETAS.items():
            scaling[name] = positive_number(settings, name, where, beta)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if settings.get(name) is not None:
                raise not_convertible(
                    "llama.cpp computes YaRN's attention factor from the scaling factor only",
                    where,
                    f"{name}: {settings[name]!r:.100}",
                )
        if settings.get("truncate", True) is not True:
            raise not_convertible("llama.cpp rounds YaRN's range", where, "truncate: false")
    return scaling


def positions_of(
    values: Mapping[str, Any], prefix: str, where: str, factors: Sequence[float], head_dim: int
) -> Positions:
    """Return the positions that the metadata *values* of a GGUF file describe; the inverse of ``key_values``.

    *factors* are the values of ``rope_freqs.weight``, empty if there is no such tensor. Raises
    :class:`CheckpointUnusable` for a scaling that config.json cannot describe.
    """
    theta = positive_number(values, f"{prefix}.rope.freq_base", where, 10_000.0)
    local_theta = None
    if f"{prefix}.rope.freq_base_swa" in values:
        local_theta = positive_number(values, f"{prefix}.rope.freq_base_swa", where)
    if factors:
        return Positions(theta, _llama_3_scaling(factors, theta, head_dim, where), local_theta)
    kind = values.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        return Positions(theta, {}, local_theta)
    if kind not in ("linear", "yarn"):
        raise not_convertible("unknown scaling of positions", where, f"{kind!r:.100}")
    scaling: dict[str, Any] = {"rope_type": kind}
    scaling["factor"] = positive_number(values, f"{prefix}.rope.scaling.factor", where)
    if kind == "yarn":
        length = positive_number(values, f"{prefix}.rope.scaling.original_context_length", where)
        scaling["original_max_position_embeddings"] = int(length)
        for name, beta in _YARN_BETAS.items():
            key = f"{prefix}.rope.scaling.yarn_{name}"
            scaling[name] = positive_number(values, key, where, beta)
    return Positions(theta, scaling, local_theta)


def _llama_3_scaling(
    factors: Sequence[float], theta: float, head_dim: int, where: str
) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 whose divisors are *factors*.

    The tensor has the result only, so the length of pretraining is found by trying powers of two.
    """
    for length in _ORIGINAL_LENGTHS:
        scaling = {
            "rope_type": "llama3",
            "factor": float(round(max(factors), 4)),
            "low_freq_factor": _LLAMA_3_LOW,
            "high_freq_factor": _LLAMA_3_HIGH,
            "original_max_position_embeddings": length,
        }
        expected = Positions(theta, scaling).factors(head_dim)
        if len(expected) != len(factors):
            break
        pairs = zip(expected, factors, strict=True)
        if all(math.isclose(one, other, rel_tol=1e-5) for one, other in pairs):
            return scaling
    raise not_convertible(
        "the scaling of positions is not that of Llama 3.1", where, "rope_freqs.weight"
    )
