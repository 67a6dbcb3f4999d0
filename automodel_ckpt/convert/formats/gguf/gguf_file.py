"""GGUF, the files of llama.cpp: weights under Hugging Face's names, and a config.json made from the metadata.

Tensors that have the same bytes as in Hugging Face files are slices of the file. Others are computed once
(``decoded.py``):

* quantized tensors, which become F32
* query and key projections, because llama.cpp has their rows in another order
* norms of Gemma, which are larger by 1 there

Quantized blocks are decoded with the ``gguf`` library, some rows at a time.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.checkpoint.parts.slices import nbytes_of, whole_tensor
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.convert.decoded import decoded_directory
from automodel_ckpt.convert.formats.format import Format, Inventory, TensorSummary
from automodel_ckpt.convert.formats.gguf.header import (
    F32,
    GgufHeader,
    TensorInfo,
    read_gguf_header,
)
from automodel_ckpt.convert.formats.gguf.model import (
    GgufModel,
    GgufTensor,
    layers_fault,
    model_of_metadata,
    name_faults,
)
from automodel_ckpt.convert.formats.gguf.values import NotConvertible
from automodel_ckpt.convert.type_aliases import TensorDict, ValueDict, Values

_FACTORS = "rope_freqs.weight"
# Head dimensions are at most some hundred.
_MAX_FACTORS = 4096
_VALUES = "values.bin"
_METADATA = "metadata"
# The way of decoding, for directories that several processes share.
_VARIANT = "gguf-1"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_SHOWN = (
    "general.architecture",
    "general.name",
    "general.file_type",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
)
_UNCHECKED = "this file is unchecked: there is no manifest with its digests"
_NO_TOKENIZER = "the tokenizer, which is in the metadata: use the files of the original model"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor under the name that it gets, its place in the file, its dtype, and how its values differ."""

    fqn: str
    info: TensorInfo
    target: GgufTensor | None

    @property
    def dtype(self) -> str:
        """The safetensors dtype of the values."""
        return self.info.kind.dtype or F32.name

    @property
    def is_decoded(self) -> bool:
        is_changed = self.target is not None and bool(self.target.heads or self.target.offset)
        return is_changed or self.info.kind.is_quantized


class GgufFile(Format):
    """A file that begins with ``GGUF``. The bytes of tensors are not read, unless they have to be decoded."""

    name = "GGUF"

    def open(self, path: Path) -> Source:
        """Describe the model. A file of an unknown architecture is described under its own names, with a note."""
        file, header = _read(path)
        model, reason = _model_of(file, header)
        stored = _stored(header, model)
        notes = [_UNCHECKED]
        if model is None:
            notes.append(f"only weights are read, under the names of GGUF: {reason}")
        num_quantized = sum(item.info.kind.is_quantized for item in stored)
        if num_quantized:
            notes.append(f"{num_quantized} quantized tensors become F32")
        config = {} if model is None else _config(model, stored, header.values)
        tensors, side_files = _described(file, stored, config, model)
        return Source(
            Path("/"),
            file.parent,
            tensors,
            notes=tuple(notes),
            omitted=(_NO_TOKENIZER,) if "tokenizer.ggml.model" in header.values else (),
            side_files=side_files,
            stated_config=config,
        )

    def details(self, path: Path) -> Mapping[str, tuple[str, ...]]:
        """Return the architecture, the tensor types and the tokenizer, for display."""
        _, header = _read(path)
        kinds = Counter(info.kind.name for info in header.tensors.values())
        types = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
        lines = [f"version: {header.version}", f"tensor types: {types}"]
        for key in _SHOWN:
            if isinstance(header.values.get(key), str | int):
                lines.append(f"{key}: {header.values[key]!s:.200}")
        return {"GGUF": tuple(lines)}

    def inventory(self, path: Path) -> Inventory:
        """Return names, dtypes and shapes by the header alone: nothing is decoded."""
        file, header = _read(path)
        stored = _stored(header, _model_of(file, header)[0])
        summaries = {item.fqn: TensorSummary(item.dtype, item.info.shape, 1) for item in stored}
        return Inventory(summaries, num_values=len(header.values))


def _model_of(path: Path, header: GgufHeader) -> tuple[GgufModel | None, str]:
    """Return the model that the metadata describe; or None, and why it is not one that can be converted."""
    infos = header.tensors
    shapes = {name: info.shape for name, info in infos.items()}
    try:
        factors = _factors(path, infos.get(_FACTORS))
        model = model_of_metadata(header.values, shapes, factors)
    except NotConvertible as error:
        return None, f"{error.what} ({error.value})"
    # First: a number of layers can be of any size, and every layer takes memory.
    fault = layers_fault(model.num_layers, shapes)
    if fault is None:
        shapes.pop(_FACTORS, None)
        fault = name_faults({tensor.name: tensor.shape for tensor in model.tensors()}, shapes)
    return (None, fault) if fault is not None else (model, "")


def _factors(path: Path, info: TensorInfo | None) -> list[float]:
    """Return the divisors of rotary frequencies, which are part of the config. Empty if there are none."""
    if info is None:
        return []
    if info.kind != F32 or len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS:
        raise NotConvertible("the divisors of frequencies are not a vector of F32", _FACTORS)
    with open(path, "rb") as file:
        file.seek(info.start)
        return list(struct.unpack(f"<{info.shape[0]}f", file.read(info.nbytes)))


def _stored(header: GgufHeader, model: GgufModel | None) -> list[_Stored]:
    """Return the model's tensors in the order of the file, under the names that they get."""
    if model is None:
        return [_Stored(name, info, None) for name, info in header.tensors.items()]
    targets = {tensor.name: tensor for tensor in model.tensors()}
    found = []
    for name, info in header.tensors.items():
        if name in targets:
            found.append(_Stored(targets[name].fqn, info, targets[name]))
    return found


def _config(model: GgufModel, stored: list[_Stored], values: Values) -> ValueDict:
    """Return config.json: what the metadata *values* describe, and the dtype of most of the weights."""
    nbytes: Counter[str] = Counter()
    for item in stored:
        nbytes[item.dtype] += item.info.nbytes
    config = model.config()
    most = max(nbytes, key=lambda dtype: nbytes[dtype])
    if most in _DTYPES:
        config["dtype"] = _DTYPES[most]
    for key, name in _TOKEN_IDS.items():
        index = values.get(f"tokenizer.ggml.{name}_token_id")
        if type(index) is int and 0 <= index < model.vocab_size:
            config[key] = index
    return config


def _described(
    source: Path, stored: list[_Stored], config: Values, model: GgufModel | None
) -> tuple[TensorDict, Path | None]:
    """Return the tensors as slices of files below ``/``, and the directory with config.json, if there is one."""
    decoded = [item for item in stored if item.is_decoded]
    directory = source.parent
    if decoded or config:
        # numpy is imported only where something is decoded: listing files has to be fast.
        from automodel_ckpt.convert.formats.gguf.decoding import decoded_blocks, require_library

        if any(item.info.kind.is_quantized for item in decoded):
            require_library()
        head_dim = model.head_dim if model is not None else 0

        def decode(target: Path) -> None:
            (target / _METADATA).mkdir()
            if config:
                text = json.dumps(config, indent=2)
                (target / _METADATA / "config.json").write_text(text + "\n")
            with open(target / _VALUES, "wb") as file:
                for item in decoded:
                    for block in decoded_blocks(source, item.info, item.target, head_dim):
                        file.write(block)

        directory = decoded_directory(source, _VARIANT, decode)
    tensors = {}
    at = 0
    for item in stored:
        file, start = source, item.info.start
        if item.is_decoded:
            file, start = directory / _VALUES, at
            at += nbytes_of(item.dtype, item.info.shape)
        name = str(file.relative_to("/"))
        tensors[item.fqn] = whole_tensor(item.fqn, item.dtype, item.info.shape, name, start)
    return tensors, directory / _METADATA if config else None


def _read(path: Path) -> tuple[Path, GgufHeader]:
    """Return the file *path* without links, and its header. Raises :class:`CheckpointUnusable`."""
    real = Path(os.path.realpath(path))
    header = read_gguf_header(real)
    # Source: llama.cpp, tools/gguf-split.
    count = header.values.get("split.count", 1)
    if count not in (0, 1):
        raise unusable(
            "this file is a part of a model in several GGUF files",
            path,
            f"split.count {count!r:.20}",
            "join them with llama.cpp: llama-gguf-split --merge FIRST_PART OUT.gguf",
        )
    return real, header
