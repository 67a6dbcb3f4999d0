"""Rotary positions in config.json and in the metadata of GGUF. Pure functions.

Source: llama.cpp's ``llama`` architecture for ``rope_freqs.weight``, the divisors of frequencies that Llama 3.1 needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from automodel_ckpt.checkpoint.files.type_aliases import Strings, ValueDict, Values
from automodel_ckpt.convert.formats.gguf.values import KeyValue, NotConvertible, positive_number

_LENGTH = "original_max_position_embeddings"
# The numbers that each kind of scaling of positions needs.
_NUMBERS: Mapping[str, Strings] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}
_ORIGINAL_LENGTHS = tuple(2**power for power in range(3, 24))


@dataclass(frozen=True)
class Positions:
    """The base of rotary frequencies, and how they are scaled.

    *scaling* is empty, or has ``rope_type`` and the numbers of this type, as in transformers. *local_theta* is the base
    in layers of sliding attention, which are not scaled. None: all layers have the same base.
    """

    theta: float
    scaling: Values
    local_theta: float | None = None

    def key_values(self, prefix: str) -> list[KeyValue]:
        """Return the keys ``PREFIX.rope.*``. Llama 3.1's scaling is a tensor instead (:meth:`factors`)."""
        found: list[KeyValue] = [(f"{prefix}.rope.freq_base", "float32", self.theta)]
        if self.local_theta is not None:
            found.append((f"{prefix}.rope.freq_base_swa", "float32", self.local_theta))
        if self.scaling.get("rope_type") == "linear":
            scaling = f"{prefix}.rope.scaling"
            found.append((f"{scaling}.type", "string", "linear"))
            found.append((f"{scaling}.factor", "float32", self.scaling["factor"]))
        return found

    def factors(self, head_dim: int) -> list[float]:
        """Return the divisor of each rotary frequency (``rope_freqs.weight``). Empty if there is no such tensor.

        Llama 3.1's scaling: long waves are divided by the factor, short ones are unchanged, and those between are
        interpolated.
        """
        if self.scaling.get("rope_type") != "llama3":
            return []
        factor, low, high, length = (self.scaling[name] for name in _NUMBERS["llama3"])
        factors = []
        for index in range(0, head_dim, 2):
            # The number of waves in the context of pretraining.
            waves = length * self.theta ** (-index / head_dim) / (2 * math.pi)
            smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
        return factors

    def config(self) -> ValueDict:
        """Return the keys of config.json, under the names of transformers 4, which version 5 reads as well."""
        found: ValueDict = {"rope_theta": self.theta}
        if self.local_theta is not None:
            found["rope_local_base_freq"] = self.local_theta
        if self.scaling:
            found["rope_scaling"] = dict(self.scaling)
        return found


def rotary_order(num_heads: int, head_dim: int) -> list[int]:
    """Return, for each row of llama.cpp's query or key projection, the number of the row in transformers'."""
    # A wrong order loads without an error in llama.cpp, and generates nonsense.
    half = head_dim // 2
    return [
        row
        for first in range(0, num_heads * head_dim, head_dim)
        for pair in range(first, first + half)
        for row in (pair, pair + half)
    ]


def read_positions(config: Values, known: frozenset[str]) -> Positions:
    """Return the positions that *config* (of config.json) describes.

    *known* are the kinds of scaling that llama.cpp computes for the architecture. Raises :class:`NotConvertible`
    for any other kind, and for unusable numbers.
    """
    theta = positive_number(config, "rope_theta", 10_000.0)
    local_theta = None
    if config.get("rope_local_base_freq") is not None:
        local_theta = positive_number(config, "rope_local_base_freq")
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found, Mapping) and "sliding_attention" in found:
        # transformers 5: one entry per type of layer.
        local = found["sliding_attention"]
        found = found.get("full_attention")
        if not isinstance(local, Mapping) or not isinstance(found, Mapping):
            raise NotConvertible("config.json holds no usable value", "rope_parameters")
        if local.get("rope_type", "default") != "default":
            raise NotConvertible(
                "GGUF has no scaling of positions for sliding attention", local["rope_type"]
            )
        local_theta = positive_number(local, "rope_theta")
    settings = found if isinstance(found, Mapping) else {"rope_type": found}
    theta = positive_number(settings, "rope_theta", theta)
    return Positions(theta, _scaling(settings, known), local_theta)


def _scaling(settings: Values, known: frozenset[str]) -> ValueDict:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in known:
        raise NotConvertible(
            "GGUF has no such scaling of positions for this architecture",
            f"rope_type: {kind!r:.100}",
        )
    if kind == "default":
        return {}
    scaling: ValueDict = {"rope_type": kind}
    for name in _NUMBERS[kind]:
        number = positive_number(settings, name)
        scaling[name] = int(number) if name == _LENGTH else number
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise NotConvertible(
            "config.json holds no usable value",
            "low_freq_factor is not below high_freq_factor",
        )
    return scaling


def positions_of(values: Values, prefix: str, factors: Sequence[float], head_dim: int) -> ValueDict:
    """Return the keys of config.json for the metadata *values* of a GGUF file, for :func:`read_positions`.

    *factors* are the values of ``rope_freqs.weight``, empty if there is no such tensor. Raises
    :class:`NotConvertible` for a scaling that config.json cannot describe.
    """
    found = {
        "rope_theta": values.get(f"{prefix}.rope.freq_base"),
        "rope_local_base_freq": values.get(f"{prefix}.rope.freq_base_swa"),
    }
    kind = values.get(f"{prefix}.rope.scaling.type", "none")
    if factors:
        theta = positive_number(found, "rope_theta", 10_000.0)
        found["rope_scaling"] = _llama_3_scaling(factors, theta, head_dim)
    elif kind != "none":
        factor = values.get(f"{prefix}.rope.scaling.factor")
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
    return found


def _llama_3_scaling(factors: Sequence[float], theta: float, head_dim: int) -> ValueDict:
    """Return the scaling of Llama 3.1 with the divisors *factors*.

    The tensor has the result only, so the length of pretraining is found by trying powers of two.
    """
    # A header can state heads of any size. For another one, the lengths differ.
    lengths = _ORIGINAL_LENGTHS if head_dim == 2 * len(factors) else ()
    for length in lengths:
        scaling = {
            "rope_type": "llama3",
            "factor": float(round(max(factors), 4)),
            # Llama 3.1, 3.2 and 3.3 have these values; their factors differ.
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            _LENGTH: length,
        }
        pairs = zip(Positions(theta, scaling).factors(head_dim), factors, strict=True)
        if all(math.isclose(one, other, rel_tol=1e-5) for one, other in pairs):
            return scaling
    raise NotConvertible("the scaling of positions is not Llama 3.1's", "rope_freqs.weight")
