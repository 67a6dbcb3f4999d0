"""A model between config.json and the metadata of GGUF: sizes, names and shapes of tensors. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import Shape, ValueDict, Values
from automodel_ckpt.convert.formats.gguf.architectures import (
    ARCHITECTURES,
    SHAPES,
    SIZES,
    TOP,
    Architecture,
)
from automodel_ckpt.convert.formats.gguf.positions import Positions, positions_of, read_positions
from automodel_ckpt.convert.formats.gguf.values import (
    KeyValue,
    NotConvertible,
    positive_integer,
    positive_number,
    reported,
)

_LAYER_NUMBER = re.compile(r"(?:model\.layers|blk)\.([0-9]+)\.", re.ASCII)
_OUTPUT = "output.weight"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the model under both names. *shape* is row-major, as in Hugging Face files.

    *heads* is the number of heads in its rotary rows, which llama.cpp has in another order. None: it has no such
    rows. The values in GGUF are larger by *offset*.
    """

    fqn: str
    name: str
    shape: Shape
    heads: int | None = None
    offset: int = 0


@dataclass(frozen=True)
class GgufModel:
    """The numbers of a model, by their key in config.json, and its positions.

    *context_limit* is the number of tokens up to which llama.cpp computes what transformers does, if that is less than
    the context length: the sliding window of a model for which llama.cpp has none.
    """

    architecture: Architecture
    numbers: Mapping[str, int | float]
    positions: Positions
    is_tied: bool
    context_limit: int | None = None

    @property
    def num_layers(self) -> int:
        return int(self.numbers["num_hidden_layers"])

    @property
    def head_dim(self) -> int:
        return int(self.numbers["head_dim"])

    @property
    def vocab_size(self) -> int:
        return int(self.numbers["vocab_size"])

    def key_values(self) -> list[KeyValue]:
        """Return the keys of the metadata that begin with the architecture's name."""
        prefix = self.architecture.name
        found = []
        for setting in (*SIZES, *self.architecture.settings):
            value = self.numbers.get(setting.config)
            if value is None:
                continue
            if setting.config == "max_position_embeddings" and self.context_limit is not None:
                value = self.context_limit
            found.append((f"{prefix}.{setting.gguf}", setting.kind, value))
        found.append((f"{prefix}.attention.value_length", "uint32", self.head_dim))
        found.append((f"{prefix}.rope.dimension_count", "uint32", self.head_dim))
        return found + self.positions.key_values(prefix)

    def tensors(self) -> list[GgufTensor]:
        """Return all tensors. An output layer that is tied to the embedding is not one of them."""
        architecture, numbers = self.architecture, self.numbers
        num_heads, num_groups = (
            int(numbers["num_attention_heads"]),
            int(numbers["num_key_value_heads"]),
        )
        sizes = {
            "vocabulary": self.vocab_size,
            "hidden": int(numbers["hidden_size"]),
            "inner": int(numbers["intermediate_size"]),
            "head": self.head_dim,
            "queries": num_heads * self.head_dim,
            "keys": num_groups * self.head_dim,
        }
        heads = {}
        if architecture.is_interleaved:
            heads = {"attn_q.weight": num_heads, "attn_k.weight": num_groups}
        names = [
            (fqn, kind, kind) for fqn, kind in TOP.items() if kind != _OUTPUT or not self.is_tied
        ]
        names += [
            (f"model.layers.{number}.{fqn}", f"blk.{number}.{kind}", kind)
            for number in range(self.num_layers)
            for fqn, kind in architecture.layer.items()
        ]
        return [
            GgufTensor(
                fqn,
                name,
                tuple(sizes[word] for word in SHAPES[kind]),
                heads.get(kind),
                architecture.norm_offset if kind.endswith("norm.weight") else 0,
            )
            for fqn, name, kind in names
        ]

    def config(self) -> ValueDict:
        """Return config.json of the model, for transformers."""
        architecture = self.architecture
        found: ValueDict = {
            "architectures": [architecture.model_class],
            "model_type": architecture.model_type,
        }
        found |= {key: value for key, value in architecture.fixed.items() if value is not None}
        found |= self.numbers
        found |= self.positions.config()
        found["tie_word_embeddings"] = self.is_tied
        if architecture.scale_of_hidden_layers:
            found["query_pre_attn_scalar"] = _attention_scale(architecture, self.numbers)
        for setting in architecture.settings:
            found.setdefault(setting.config, None)
        return found


def read_model(config: Values, where: str) -> GgufModel:
    """Return the model that *config* (of config.json, at *where*) describes.

    Raises :class:`CheckpointUnusable` for an architecture that is not in the table, and for a variant that llama.cpp
    does not compute.
    """
    with reported(where):
        return _model_of(config)


def _model_of(config: Values) -> GgufModel:
    architecture = _architecture(config)
    numbers = _numbers(config, architecture)
    if architecture.scale_of_hidden_layers:
        expected = _attention_scale(architecture, numbers)
        scale = config.get("query_pre_attn_scalar", 256)
        if scale != expected:
            raise NotConvertible(
                "llama.cpp scales attention differently",
                f"query_pre_attn_scalar: {scale!r:.100}, llama.cpp: {expected}",
            )
    is_tied = bool(config.get("tie_word_embeddings", architecture.tied_by_default))
    if architecture.must_be_tied and not is_tied:
        raise NotConvertible(
            f"llama.cpp has no {architecture.model_class} with a separate output layer",
            "tie_word_embeddings: false",
        )
    _check_rotation(config, architecture)
    positions = read_positions(config, architecture.positions)
    limit = _context_limit(config, architecture, numbers)
    return GgufModel(architecture, numbers, positions, is_tied, limit)


def model_of_metadata(
    values: Values,
    shapes: Mapping[str, Sequence[int]],
    factors: Sequence[float],
) -> GgufModel:
    """Return the model that the metadata *values* of a GGUF file describe.

    *shapes* has its tensors' shapes, by GGUF's name, row-major. *factors* has the values of ``rope_freqs.weight``.
    Raises :class:`NotConvertible` for an unknown architecture, and for values that config.json cannot describe.
    """
    name = values.get("general.architecture")
    architecture = next((known for known in ARCHITECTURES if known.name == name), None)
    if architecture is None:
        raise NotConvertible("unknown architecture", f"general.architecture: {name!r:.100}")
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise NotConvertible("there is no embedding", "token_embd.weight")
    hidden = positive_integer(values, f"{name}.embedding_length")
    heads = positive_integer(values, f"{name}.attention.head_count")
    config: ValueDict = {
        "architectures": [architecture.model_class],
        "head_dim": hidden // heads,
        "num_key_value_heads": heads,
    }
    for setting in (*SIZES, *architecture.settings):
        key = f"{name}.{setting.gguf}"
        if key in values:
            config[setting.config] = values[key]
    # Padding of the vocabulary is in the tensor, and not always in the key.
    config["vocab_size"] = embedding[0]
    config["tie_word_embeddings"] = _OUTPUT not in shapes
    config["query_pre_attn_scalar"] = _attention_scale(architecture, config)
    config |= positions_of(values, str(name), factors, config["head_dim"])
    return _model_of(config)


def _architecture(config: Values) -> Architecture:
    classes = config.get("architectures")
    model_class = str(classes) if classes else None
    if isinstance(classes, list) and len(classes) == 1:
        model_class = classes[0]
    key, named = "model_class", model_class
    if model_class is None:
        key, named = "model_type", config.get("model_type")
    found = next((each for each in ARCHITECTURES if getattr(each, key) == named), None)
    if found is None:
        known = ", ".join(known.model_class for known in ARCHITECTURES)
        raise NotConvertible(
            "this architecture is not converted to GGUF",
            f"architectures: {named!r:.200} (known: {known})",
        )
    if "quantization_config" in config:
        raise NotConvertible("quantized weights are not converted", "quantization_config")
    for key, setting in found.fixed.items():
        # null and false both mean that a feature is off.
        given = config.get(key, setting)
        if given != setting and (given or setting):
            raise NotConvertible(
                f"GGUF's {found.name} has no such variant", f"{key}: {given!r:.100}"
            )
    return found


def _numbers(config: Values, architecture: Architecture) -> dict[str, int | float]:
    defaults = dict(architecture.defaults)
    heads = positive_integer(config, "num_attention_heads", defaults.get("num_attention_heads"))
    hidden = positive_integer(config, "hidden_size")
    defaults.setdefault("num_key_value_heads", heads)
    defaults.setdefault("head_dim", hidden // heads)
    numbers = {}
    for setting in (*SIZES, *architecture.settings):
        if setting.is_optional and config.get(setting.config) is None:
            continue
        default = defaults.get(setting.config)
        if setting in architecture.settings and setting.config in config:
            # A null would be replaced by the default, which is another model.
            default = None
        read = positive_integer if setting.kind == "uint32" else positive_number
        numbers[setting.config] = read(config, setting.config, default)
    kv_heads, head_dim = int(numbers["num_key_value_heads"]), int(numbers["head_dim"])
    if head_dim % 2 or heads % kv_heads:
        raise NotConvertible(
            "these attention heads do not fit together", f"{heads}, {kv_heads} of {head_dim}"
        )
    return numbers


def _attention_scale(architecture: Architecture, numbers: Values) -> Any:
    """Return a number. llama.cpp divides attention scores of Gemma by its square root."""
    if numbers.get("num_hidden_layers") == architecture.scale_of_hidden_layers:
        return numbers["hidden_size"] // numbers["num_attention_heads"]
    return numbers["head_dim"]


def _check_rotation(config: Values, architecture: Architecture) -> None:
    """Raise :class:`NotConvertible` if other layers have rotary positions than llama.cpp's."""
    period = architecture.no_rotation_period
    if not period:
        return
    flags, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval", period)
    is_equal = isinstance(flags, list) or (flags is None and interval == period)
    for number, flag in enumerate(flags if isinstance(flags, list) else ()):
        # 1 means that the layer has rotary positions, despite the name of the key.
        is_equal &= flag == int((number + 1) % period != 0)
    if not is_equal:
        raise NotConvertible(
            "llama.cpp rotates other layers",
            f"no_rope_layers: {flags!r:.100}, no_rope_layer_interval: {interval!r:.50}",
        )


def _context_limit(
    config: Values,
    architecture: Architecture,
    numbers: Mapping[str, int | float],
) -> int | None:
    """Return the sliding window, if llama.cpp has none for the architecture and the context is longer; else None.

    Raises :class:`NotConvertible` if llama.cpp has a sliding window in other layers than the model.
    """
    types = config.get("layer_types")
    period = architecture.full_attention_period
    if period:
        num_layers = int(numbers["num_hidden_layers"])
        given = [types] if types is not None and not isinstance(types, list) else types or []
        for number, layer_type in enumerate(given[:num_layers]):
            expected = "sliding_attention" if (number + 1) % period else "full_attention"
            if layer_type != expected:
                raise NotConvertible(
                    "llama.cpp has full attention in other layers",
                    f"layer_types[{number}]: {layer_type!r:.50}",
                )
        return None
    if isinstance(types, list):
        slides = "sliding_attention" in types
    else:
        slides = bool(config.get("use_sliding_window", architecture.sliding_by_default))
    if not slides or config.get("sliding_window") is None:
        return None
    window = positive_integer(config, "sliding_window")
    return window if window < numbers["max_position_embeddings"] else None


def layers_fault(num_layers: int, names: Iterable[str]) -> str | None:
    """Return a text if the config's number of layers does not match the tensors with these *names*, or None.

    The names are Hugging Face's or GGUF's. Called before anything is computed for each layer: the number in an
    untrusted file can be of any size.
    """
    matches = [_LAYER_NUMBER.match(name) for name in names]
    layers = {match[1] for match in matches if match is not None}
    if num_layers == len(layers):
        return None
    return (
        f"num_hidden_layers: {num_layers}, but there are tensors of {counted(len(layers), 'layer')}"
    )


def name_faults(
    expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]
) -> str | None:
    """Return a text if the tensors that were *found* (name to shape) are not the *expected* ones, or None."""
    if missing := sorted(expected.keys() - found.keys()):
        return f"missing: {missing[:3]}"
    if extra := sorted(found.keys() - expected.keys()):
        return f"not in this architecture: {extra[:3]}"
    for fqn, shape in expected.items():
        if tuple(found[fqn]) != tuple(shape):
            return f"{fqn!r} has the shape {list(found[fqn])}"
    return None
