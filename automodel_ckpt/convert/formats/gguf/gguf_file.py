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
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint.export.plan import main_dtype
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, TORCH_NAMES
from automodel_ckpt.checkpoint.files.safe_open import without_links
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.slices import nbytes_of, whole_tensor
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.float_cast import Array, storage_dtype
from automodel_ckpt.convert.decoded import decoded_directory
from automodel_ckpt.convert.formats.files import library
from automodel_ckpt.convert.formats.format import Details, Format, Inventory, TensorSummary
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
from automodel_ckpt.convert.formats.gguf.positions import rotary_order
from automodel_ckpt.convert.formats.gguf.values import NotConvertible
from automodel_ckpt.errors import unusable

_FACTORS = "rope_freqs.weight"
# Head dimensions are at most some hundred.
_MAX_FACTORS = 4096
_VALUES = "values.bin"
_METADATA = "metadata"
# The way of decoding, for directories that several processes share.
_VARIANT = "gguf-1"
# About this many bytes of single precision are decoded at a time.
_BLOCK_BYTES = 16 << 20
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_SHOWN = (
    "general.architecture",
    "general.name",
    "general.file_type",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
)
_NO_TOKENIZER = "the tokenizer, which is in the metadata: use the files of the original model"


@dataclass(frozen=True)
class _Stored:
    """A tensor of the model, and its place in the file."""

    info: TensorInfo
    target: GgufTensor

    @property
    def dtype(self) -> str:
        """The safetensors dtype of the values."""
        return self.info.kind.dtype or F32.name

    @property
    def is_decoded(self) -> bool:
        return bool(self.target.heads or self.target.offset or self.info.kind.is_quantized)


class GgufFile(Format):
    """A file that begins with ``GGUF``. The bytes of tensors are not read, unless they have to be decoded."""

    name = "GGUF"

    def open(self, path: Path) -> Source:
        """Describe the model. Raises :class:`CheckpointUnusable` for an architecture that is not in the table."""
        file, header = _read(path)
        try:
            model = _model_of(file, header)
        except NotConvertible as error:
            raise unusable(
                "this model of llama.cpp cannot be converted to Hugging Face files",
                path,
                f"{error.what} ({error.value})",
                "use the original model; or load the file with from_pretrained(..., gguf_file=...) of transformers, "
                "and save it",
            ) from error
        infos = header.tensors
        targets = {target.name: target for target in model.tensors()}
        # In the order of the file.
        stored = [_Stored(infos[name], targets[name]) for name in infos if name in targets]
        config = _config(model, stored, header.values)
        directory = _decoded(file, stored, config, model.head_dim)
        tensors = {}
        at = 0
        for item in stored:
            place, start = file, item.info.start
            if item.is_decoded:
                place, start = directory / _VALUES, at
                at += nbytes_of(item.dtype, item.info.shape)
            fqn, name = item.target.fqn, str(place.relative_to("/"))
            tensors[fqn] = whole_tensor(fqn, item.dtype, item.info.shape, name, start)
        num_quantized = sum(item.info.kind.is_quantized for item in stored)
        return Source(
            Path("/"),
            file.parent,
            tensors,
            notes=(f"{num_quantized} quantized tensors become F32",) if num_quantized else (),
            omitted=(_NO_TOKENIZER,) if "tokenizer.ggml.model" in header.values else (),
            side_files=directory / _METADATA,
            stated_config=config,
        )

    def details(self, path: Path) -> Details:
        """Return the architecture, the tensor types and the tokenizer, for display."""
        _, header = _read(path)
        kinds = Counter(info.kind.name for info in header.tensors.values())
        types = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
        shown = (
            f"{key}: {header.values[key]!s:.200}"
            for key in _SHOWN
            if isinstance(header.values.get(key), str | int)
        )
        return {"GGUF": (f"version: {header.version}", f"tensor types: {types}", *shown)}

    def inventory(self, path: Path) -> Inventory:
        """Return names, dtypes and shapes by the header alone: nothing is decoded.

        A model that cannot be converted has the names of GGUF.
        """
        file, header = _read(path)
        names = {name: name for name in header.tensors}
        with suppress(NotConvertible):
            names |= {target.name: target.fqn for target in _model_of(file, header).tensors()}
        summaries = {}
        for name, info in header.tensors.items():
            if name != _FACTORS:
                summaries[names[name]] = TensorSummary(info.kind.dtype or F32.name, info.shape, 1)
        return Inventory(summaries, num_values=len(header.values))


def _model_of(path: Path, header: GgufHeader) -> GgufModel:
    """Return the model that the metadata describe. Raises :class:`NotConvertible`."""
    infos = header.tensors
    shapes = {name: info.shape for name, info in infos.items()}
    model = model_of_metadata(header.values, shapes, _factors(path, infos.get(_FACTORS)))
    # First: a number of layers can be of any size, and every layer takes memory.
    fault = layers_fault(model.num_layers, shapes)
    if fault is None:
        shapes.pop(_FACTORS, None)
        fault = name_faults({tensor.name: tensor.shape for tensor in model.tensors()}, shapes)
    if fault is not None:
        raise NotConvertible("the tensors are not the architecture's", fault)
    return model


def _factors(path: Path, info: TensorInfo | None) -> list[float]:
    """Return the divisors of rotary frequencies, which are part of the config. Empty if there are none."""
    if info is None:
        return []
    if info.kind != F32 or len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS:
        raise NotConvertible("the divisors of frequencies are not a vector of F32", _FACTORS)
    factors: list[float] = np.fromfile(path, "<f4", info.shape[0], offset=info.start).tolist()
    return factors


def _config(model: GgufModel, stored: list[_Stored], values: Values) -> ValueDict:
    """Return config.json: what the metadata *values* describe, and the dtype of most of the weights."""
    config = model.config()
    most = main_dtype((item.dtype, nbytes_of(item.dtype, item.info.shape)) for item in stored)
    if most is not None:
        config["dtype"] = TORCH_NAMES[most]
    for key, name in _TOKEN_IDS.items():
        index = values.get(f"tokenizer.ggml.{name}_token_id")
        if type(index) is int and 0 <= index < model.vocab_size:
            config[key] = index
    return config


def _read(path: Path) -> tuple[Path, GgufHeader]:
    """Return the file *path* without links, and its header. Raises :class:`CheckpointUnusable`."""
    real = without_links(path)
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


# ---------------------------------------------------------------- decoding


def _decoded(path: Path, stored: list[_Stored], config: Values, head_dim: int) -> Path:
    """Return a directory with config.json, and the values of the tensors that have to be decoded."""
    decoded = [item for item in stored if item.is_decoded]
    gguf = None
    if any(item.info.kind.is_quantized for item in decoded):
        gguf = library("gguf", "decoding quantized tensors of GGUF", "a GGUF file", "gguf")

    def decode(target: Path) -> None:
        (target / _METADATA).mkdir()
        (target / _METADATA / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        with open(target / _VALUES, "wb") as file:
            for item in decoded:
                for block in _blocks(gguf, path, item, head_dim):
                    file.write(block)

    return decoded_directory(path, _VARIANT, decode)


def _blocks(gguf: Any, path: Path, item: _Stored, head_dim: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's values in row-major order, about ``_BLOCK_BYTES`` at a time.

    Quantized values are yielded in single precision.
    """
    info, target = item.info, item.target
    rows = _rows(path, info)
    order = np.arange(rows.shape[0])
    if target.heads is not None:
        # The inverse: where each row of transformers is in llama.cpp's.
        order = np.argsort(rotary_order(target.heads, head_dim))
    num_rows = max(1, _BLOCK_BYTES // max(4 * math.prod(info.shape[-1:]), 1))
    for first in range(0, rows.shape[0], num_rows):
        block = rows[order[first : first + num_rows]]
        if info.kind.is_quantized:
            block = gguf.quants.dequantize(block, gguf.GGMLQuantizationType[info.kind.name])
        if target.offset:
            block = block - np.float32(target.offset)
        yield np.ascontiguousarray(block).data


def _rows(path: Path, info: TensorInfo) -> Array:
    """Return the rows of a tensor, mapped: blocks as bytes if it is quantized, else values."""
    if not info.nbytes:
        return np.empty((0, 1), np.float32)
    num_rows = math.prod(info.shape[:-1])
    row_bytes = info.nbytes // num_rows
    dtype = np.dtype(np.uint8)
    if info.kind.dtype is not None:
        dtype = storage_dtype(info.kind.dtype, DTYPE_BITS[info.kind.dtype])
    return np.memmap(path, dtype, "r", info.start, (num_rows, row_bytes // dtype.itemsize))
