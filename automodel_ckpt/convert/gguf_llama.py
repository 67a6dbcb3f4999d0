"""A Llama model's config and tensors as GGUF names them: pure, no file is touched.

Sources: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) for the keys and tensor
names; llama.cpp's ``llama`` architecture for the order of the rotary dimensions: it rotates neighbouring elements where
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
_LAYER_NUMBER = re.compile(r"model\.layers\.([0-9]+)\.", re.ASCII)


@dataclass(frozen=True, slots=True)
class Llama:
    """What a Llama config says, sizes in elements. *rope_scaling* is empty where positions are not scaled."""

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
        """The ``llama.*`` keys."""
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
            found.append(("llama.rope.scaling.type", "string", "linear"))
            found.append(
                ("llama.rope.scaling.factor", "float32", float(self.rope_scaling["factor"]))
            )
        return found

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Hugging Face's name of each tensor to GGUF's and its shape; the head only where it is a tensor of its own."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        wide, hidden = self.intermediate_size, self.hidden_size
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
        vocabulary = (self.vocab_size, hidden)
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            fqn: (name, (hidden,) if name == "output_norm.weight" else vocabulary)
            for fqn, name in _TOP.items()
            if not (self.tied and fqn == "lm_head.weight")
        }
        for layer in range(self.num_layers):
            for fqn, name in _LAYER.items():
                found[f"model.layers.{layer}.{fqn}.weight"] = (
                    f"blk.{layer}.{name}.weight",
                    shapes[name],
                )
        return found

    def heads_of(self, name: str) -> int | None:
        """Number of heads in the rotated rows of the GGUF tensor *name*; None for a tensor without such rows."""
        kind = name.split(".")[2] if name.startswith("blk.") else ""
        return {"attn_q": self.num_heads, "attn_k": self.num_kv_heads}.get(kind)

    def rope_factors(self) -> list[float]:
        """By what each rotary frequency is divided (``rope_freqs.weight``); empty where they are left as they are.

        Llama 3.1's scaling: long waves by the whole factor, short ones not at all, those between smoothly.
        """
        scaling = self.rope_scaling
        if scaling.get("rope_type") != "llama3":
            return []
        factor, low, high = (
            float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        old = float(scaling["original_max_position_embeddings"])
        factors = []
        for index in range(0, self.head_dim, 2):
            waves = old * self.rope_theta ** (-index / self.head_dim) / (2 * math.pi)
            smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
        return factors


def rotary_order(num_heads: int, head_dim: int) -> list[int]:
    """The row of transformers' query or key projection that stands at each row of llama.cpp's."""
    half = head_dim // 2
    return [
        head * head_dim + part * half + pair
        for head in range(num_heads)
        for pair in range(half)
        for part in (0, 1)
    ]


def read_llama(config: Mapping[str, Any], where: str) -> Llama:
    """The Llama that *config* (of config.json, at *where*) describes.

    Raises :class:`CheckpointUnusable` for another architecture, and for variants that GGUF's ``llama`` does not have.
    """
    _check_supported(config, where)
    heads, hidden = (
        _integer(config, "num_attention_heads", where),
        _integer(config, "hidden_size", where),
    )
    head_dim = _integer(config, "head_dim", where, default=hidden // heads)
    kv_heads = _integer(config, "num_key_value_heads", where, default=heads)
    if head_dim % 2 or heads % kv_heads:
        raise refused(
            "these attention heads do not fit together", where, f"{heads}, {kv_heads} of {head_dim}"
        )
    scaling = _rope(config)
    return Llama(
        vocab_size=_integer(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size", where),
        num_layers=_integer(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=_integer(config, "max_position_embeddings", where, default=2048),
        rms_norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        rope_theta=_number(
            scaling, "rope_theta", where, _number(config, "rope_theta", where, 10_000.0)
        ),
        rope_scaling=_known_scaling(scaling, where),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _check_supported(config: Mapping[str, Any], where: str) -> None:
    names = config.get("architectures")
    known = names == [ARCHITECTURE] or (not names and config.get("model_type") == "llama")
    if not known:
        shown = names or config.get("model_type")
        raise refused(
            f"only {ARCHITECTURE} is written as GGUF so far",
            where,
            f"architectures: {shown!r:.200}",
        )
    for key, plain in {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}.items():
        if config.get(key, plain) != plain:
            raise refused("GGUF's llama has no such variant", where, f"{key}: {config[key]!r:.100}")
    if "quantization_config" in config:
        raise refused("quantized weights are not converted", where, "quantization_config")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Position settings under transformers 5's names (``rope_parameters``), from either version's."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    settings = dict(found) if isinstance(found, Mapping) else {"rope_type": found}
    return settings | {"rope_type": settings.get("rope_type", settings.get("type", "default"))}


def _known_scaling(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }.get(str(settings["rope_type"]))
    if needed is None:
        raise refused(
            "this scaling of positions is not written as GGUF",
            where,
            f"{settings['rope_type']!r:.100}",
        )
    for key in needed:
        _number(settings, key, where)
    if "factor" not in needed:
        return {}
    if (
        settings["rope_type"] == "llama3"
        and settings["low_freq_factor"] >= settings["high_freq_factor"]
    ):
        raise refused(
            "config.json holds no usable value",
            where,
            "low_freq_factor is not below high_freq_factor",
        )
    return settings


def _integer(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key) if config.get(key) is not None else default
    if type(value) is not int or not 0 < value < 2**31:
        raise refused("config.json holds no usable value", where, f"{key}: {value!r:.100}")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = config.get(key) if config.get(key) is not None else default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
        raise refused("config.json holds no usable value", where, f"{key}: {value!r:.100}")
    return float(value)


def layers_fault(num_layers: int, names: Iterable[str]) -> str | None:
    """Why a config's number of layers cannot be that of the tensors with these names, or None.

    Compared before anything is computed for each layer: the number in the file can be anything.
    """
    found = {match[1] for name in names if (match := _LAYER_NUMBER.match(name))}
    if num_layers == len(found):
        return None
    return f"num_hidden_layers: {num_layers}, but there are tensors of {len(found)} layers"


def name_faults(
    expected: Mapping[str, tuple[str, Sequence[int]]], found: Mapping[str, Sequence[int]]
) -> str | None:
    """What keeps the exported tensors (name to shape) from being those of the config, or None."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        return f"missing: {missing[:3]}" if missing else f"not in a Llama: {extra[:3]}"
    wrong = [fqn for fqn, (_, shape) in expected.items() if tuple(found[fqn]) != tuple(shape)]
    return f"{wrong[0]!r} has the shape {list(found[wrong[0]])}" if wrong else None


def refused(what: str, where: str, value: object) -> CheckpointUnusable:
    """What cannot be GGUF is refused with, and what else to do."""
    hint = "export Hugging Face files (--to hf) and convert them with llama.cpp's own convert_hf_to_gguf.py"
    return CheckpointUnusable(what, where=where, value=value, hint=hint)
