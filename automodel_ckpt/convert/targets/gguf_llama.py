"""The config and tensors of a Llama model under GGUF's names. Pure functions: no file is opened.

Sources: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) for the keys and tensor
names; llama.cpp's ``llama`` architecture for the order of the rotary dimensions: it rotates adjacent elements where
transformers rotates halves, so the rows of the query and key projections are interleaved (:func:`rotary_order`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.errors import CheckpointUnusable

ARCHITECTURE = "LlamaForCausalLM"
KeyValue = tuple[str, str, Any]
"""Key, the GGUF type's name as in ``GGUFWriter.add_<type>``, value."""

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The numbers that each kind of scaling of positions needs.
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_LAYER_NUMBER = re.compile(r"model\.layers\.([0-9]+)\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class Llama:
    """The config of a Llama model, sizes in elements. *rope_scaling* is empty if positions are not scaled."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    tied: bool

    def key_values(self) -> list[KeyValue]:
        """Return the ``llama.*`` keys."""
        found: list[KeyValue] = [
            ("llama.vocab_size", "uint32", self.vocab_size),
            ("llama.context_length", "uint32", self.context_length),
            ("llama.embedding_length", "uint32", self.hidden_size),
            ("llama.block_count", "uint32", self.num_layers),
            ("llama.feed_forward_length", "uint32", self.intermediate_size),
            ("llama.attention.head_count", "uint32", self.num_heads),
            ("llama.attention.head_count_kv", "uint32", self.num_kv_heads),
            ("llama.attention.key_length", "uint32", self.head_dim),
            ("llama.attention.value_length", "uint32", self.head_dim),
            ("llama.attention.layer_norm_rms_epsilon", "float32", self.rms_norm_eps),
            ("llama.rope.dimension_count", "uint32", self.head_dim),
            ("llama.rope.freq_base", "float32", self.rope_theta),
        ]
        if self.rope_scaling.get("rope_type") == "linear":
            factor = float(self.rope_scaling["factor"])
            found.append(("llama.rope.scaling.type", "string", "linear"))
            found.append(("llama.rope.scaling.factor", "float32", factor))
        return found

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return {Hugging Face's name: (GGUF's name, shape)}. A tied head is not a tensor."""
        heads = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        wide = self.intermediate_size
        hidden = self.hidden_size
        shapes = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (heads, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, heads),
            "ffn_gate": (wide, hidden),
            "ffn_up": (wide, hidden),
            "ffn_down": (hidden, wide),
        }
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for fqn, name in _TOP.items():
            if self.tied and fqn == "lm_head.weight":
                continue
            is_norm = name == "output_norm.weight"
            found[fqn] = (name, (hidden,) if is_norm else (self.vocab_size, hidden))
        for layer in range(self.num_layers):
            for fqn, name in _LAYER.items():
                gguf_name = f"blk.{layer}.{name}.weight"
                found[f"model.layers.{layer}.{fqn}.weight"] = (gguf_name, shapes[name])
        return found

    def heads_of(self, name: str) -> int | None:
        """Return the number of heads in the rotated rows of the GGUF tensor *name*; None if it has no such rows."""
        kind = name.split(".")[2] if name.startswith("blk.") else ""
        return {"attn_q": self.num_heads, "attn_k": self.num_kv_heads}.get(kind)

    def rope_factors(self) -> list[float]:
        """Return the divisor of each rotary frequency (``rope_freqs.weight``); empty if frequencies are not scaled.

        Llama 3.1's scaling: long waves are divided by the factor, short ones are unchanged, and those between are
        interpolated.
        """
        scaling = self.rope_scaling
        if scaling.get("rope_type") != "llama3":
            return []
        factor = float(scaling["factor"])
        low = float(scaling["low_freq_factor"])
        high = float(scaling["high_freq_factor"])
        original_length = float(scaling["original_max_position_embeddings"])
        factors = []
        for index in range(0, self.head_dim, 2):
            # The number of waves in the context of pretraining.
            waves = original_length * self.rope_theta ** (-index / self.head_dim) / (2 * math.pi)
            smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
        return factors


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


def read_llama(config: Mapping[str, Any], where: str) -> Llama:
    """Return the Llama model that *config* (of config.json, at *where*) describes.

    Raises :class:`CheckpointUnusable` for another architecture, and for variants that GGUF's ``llama`` does not have.
    """
    _check_supported(config, where)
    heads = _integer(config, "num_attention_heads", where)
    hidden = _integer(config, "hidden_size", where)
    head_dim = _integer(config, "head_dim", where, default=hidden // heads)
    kv_heads = _integer(config, "num_key_value_heads", where, default=heads)
    if head_dim % 2 or heads % kv_heads:
        value = f"{heads}, {kv_heads} of {head_dim}"
        raise not_convertible("these attention heads do not fit together", where, value)
    scaling = _rope(config)
    default_theta = _number(config, "rope_theta", where, 10_000.0)
    return Llama(
        vocab_size=_integer(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size", where),
        num_layers=_integer(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        # Defaults here and below are those of transformers' LlamaConfig (5.23).
        context_length=_integer(config, "max_position_embeddings", where, default=2048),
        rms_norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        rope_theta=_number(scaling, "rope_theta", where, default_theta),
        rope_scaling=_known_scaling(scaling, where),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _check_supported(config: Mapping[str, Any], where: str) -> None:
    names = config.get("architectures")
    known = names == [ARCHITECTURE] or (not names and config.get("model_type") == "llama")
    if not known:
        architecture = names or config.get("model_type")
        value = f"architectures: {architecture!r:.200}"
        raise not_convertible(f"only {ARCHITECTURE} is written as GGUF so far", where, value)
    required = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    for key, setting in required.items():
        if config.get(key, setting) != setting:
            value = f"{key}: {config[key]!r:.100}"
            raise not_convertible("GGUF's llama has no such variant", where, value)
    if "quantization_config" in config:
        raise not_convertible("quantized weights are not converted", where, "quantization_config")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of positions under transformers 5's names (``rope_parameters``), also from version 4's."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    settings: dict[str, Any] = {"rope_type": found}
    if isinstance(found, Mapping):
        settings = dict(found)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    return settings | {"rope_type": rope_type}


def _known_scaling(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the settings of a scaling that GGUF has; empty for none. Raises :class:`CheckpointUnusable`."""
    rope_type = settings["rope_type"]
    if str(rope_type) not in _ROPE_NUMBERS:
        value = f"{rope_type!r:.100}"
        raise not_convertible("this scaling of positions is not written as GGUF", where, value)
    numbers = {key: _number(settings, key, where) for key in _ROPE_NUMBERS[str(rope_type)]}
    if not numbers:
        return {}
    if rope_type == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        value = "low_freq_factor is not below high_freq_factor"
        raise not_convertible("config.json holds no usable value", where, value)
    return settings


def _integer(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value: Any = config.get(key)
    if value is None:
        value = default
    # type(), because True is an int for isinstance().
    if type(value) is not int or not 0 < value < 2**31:
        raise not_convertible("config.json holds no usable value", where, f"{key}: {value!r:.100}")
    return int(value)


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value: Any = config.get(key)
    if value is None:
        value = default
    # A bool is an int, and the comparison is false for NaN.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e30:
        raise not_convertible("config.json holds no usable value", where, f"{key}: {value!r:.100}")
    return float(value)


def layers_fault(num_layers: int, names: Iterable[str]) -> str | None:
    """Return a text if the config's number of layers is not that of the tensors with these *names*, or None.

    Called before anything is computed for each layer: the number in an untrusted file can be of any size.
    """
    layers: set[str] = set()
    for name in names:
        match = _LAYER_NUMBER.match(name)
        if match is not None:
            layers.add(match[1])
    if num_layers == len(layers):
        return None
    return f"num_hidden_layers: {num_layers}, but there are tensors of {len(layers)} layers"


def name_faults(
    expected: Mapping[str, tuple[str, Sequence[int]]], found: Mapping[str, Sequence[int]]
) -> str | None:
    """Return a text if the exported tensors, *found* (name to shape), are not those of the config, or None."""
    missing = sorted(expected.keys() - found.keys())
    if missing:
        return f"missing: {missing[:3]}"
    extra = sorted(found.keys() - expected.keys())
    if extra:
        return f"not in a Llama: {extra[:3]}"
    for fqn, (_, shape) in expected.items():
        if tuple(found[fqn]) != tuple(shape):
            return f"{fqn!r} has the shape {list(found[fqn])}"
    return None


def not_convertible(what: str, where: str, value: object) -> CheckpointUnusable:
    """Return the error for a model that cannot be converted to GGUF, with an alternative."""
    hint = "export Hugging Face files (--to hf) and convert them with llama.cpp's own convert_hf_to_gguf.py"
    return CheckpointUnusable(what, where=where, value=value, hint=hint)
