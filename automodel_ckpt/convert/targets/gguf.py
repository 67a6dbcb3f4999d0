"""A checkpoint's model as one GGUF file, for llama.cpp and programs based on it: verified, staged, published.

The ``gguf`` package (the extra of that name) writes the header and quantizes. The data of tensors are written here, in
blocks of rows. Memory: some blocks; for a checkpoint of several shards, the largest tensor.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.base.units import counted_are
from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.export.files import unwritable
from automodel_ckpt.checkpoint.export.next_steps import gguf_lines
from automodel_ckpt.checkpoint.export.plan import ExportTensor
from automodel_ckpt.checkpoint.files.safe_open import read_model_file
from automodel_ckpt.checkpoint.files.type_aliases import Strings, ValueDict
from automodel_ckpt.checkpoint.sources.model_files import GENERATION_CONFIG
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.box_reader import whole_checked
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast
from automodel_ckpt.convert.formats.files import faults_of, library, read_json
from automodel_ckpt.convert.formats.gguf.header import (
    F32,
    Q8_0,
    QUANTIZATION_VERSION,
    WRITABLE,
    Kind,
)
from automodel_ckpt.convert.formats.gguf.model import (
    GgufModel,
    GgufTensor,
    layers_fault,
    name_faults,
    read_model,
)
from automodel_ckpt.convert.formats.gguf.positions import rotary_order
from automodel_ckpt.convert.formats.gguf.tokenizer import convert_tokenizer
from automodel_ckpt.convert.formats.gguf.values import KeyValue
from automodel_ckpt.convert.publishing import published_file
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.tensor_blocks import is_copy
from automodel_ckpt.errors import RecipeError, unusable

# Rows are cast, reordered and quantized in blocks of about this many bytes in single precision.
_BLOCK_BYTES = 16 << 20
# llama.cpp requires each tensor to begin at a multiple (general.alignment, by default).
_ALIGNMENT = 32
_OUTPUT = "output.weight"
_EMBEDDING = "token_embd.weight"
# The same two in config.json's model.
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
# Computed from config.json. Earlier versions of transformers stored it in each layer.
_FORMER_BUFFER = ".rotary_emb.inv_freq"
_MAX_TEMPLATE_BYTES = 1 << 20
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file: what it is, where its values come from, and its type."""

    target: GgufTensor
    source: ExportTensor
    kind: Kind

    @property
    def nbytes(self) -> int:
        numel = int(np.prod(self.target.shape, dtype=np.int64))
        return numel // self.kind.block_size * self.kind.block_bytes


def write(export: Export, *, tensor_type: str | None = None, num_threads: int = 5) -> ExportReport:
    """Write the model as a GGUF file.

    Vectors (norms, biases) are written as F32, other tensors as *tensor_type*: a name in ``WRITABLE`` of
    ``convert/formats/gguf/header.py``, in any case, for example ``Q8_0``. By default they have the dtype of the
    checkpoint, which may be cast to bf16, fp16 or fp32.
    """
    gguf = library("gguf", "writing GGUF", "ckpt export --to gguf", "gguf")
    wanted = _wanted_kind(tensor_type, export.cast_code)
    if wanted is not None:
        # Quantized values are computed from the stored ones: a cast before would only lose precision.
        export.cast_code = wanted.dtype or "F32"
    # Before the digests are verified, which reads the complete source.
    export.file(".gguf")
    export.check(reads_parts=True, num_threads=num_threads)
    tensors = {}
    for file in export.plan().files:
        for tensor in file.tensors:
            tensors[tensor.fqn] = tensor
            if tensor.dtype not in WRITABLE:
                raise unusable(
                    f"a tensor of dtype {tensor.dtype} is not written as GGUF",
                    export.where,
                    tensor.fqn,
                    "F64 weights can be cast: --cast-dtype fp32 or --type F32",
                )
    model, keys, tokenizer_warnings = _described(export, tensors)
    entries = []
    for target in model.tensors():
        tensor = tensors[target.fqn]
        kind = _kind(target, WRITABLE[tensor.dtype], wanted, is_tied=model.is_tied)
        entries.append(_Entry(target, tensor, kind))
    export.warn(*tokenizer_warnings, *_warnings(model, entries, wanted))
    export.log_casts((entry.source.stored.dtype, entry.kind.name) for entry in entries)
    with published_file(export.target, export.log, what="the GGUF file") as path:
        _write_file(gguf, path, export.source, keys, model, entries)
    for line in gguf_lines(export.target, _write_modelfile(export.target)):
        export.log(line)
    kinds = Counter(entry.kind.name for entry in entries)
    summary = ", ".join(f"{count} {name}" for name, count in kinds.items())
    return export.report(len(entries), summary, kinds=dict(kinds))


def _write_modelfile(file: Path) -> Path:
    """Write Ollama's Modelfile next to a GGUF *file*, unless there is one already, and return its path.

    Raises :class:`SaveFailed` if it cannot be written.
    """
    path = file.with_suffix(".Modelfile")
    if not path.exists():
        try:
            # Ollama reads the chat template and the end tokens from the metadata of the GGUF file.
            replace_file(path, f"FROM ./{file.name}\n".encode())
        except OSError as error:
            raise unwritable(error, "Ollama's Modelfile could not be written") from error
    return path


def _wanted_kind(tensor_type: str | None, cast_code: str | None) -> Kind | None:
    if tensor_type is None:
        return None
    if cast_code is not None:
        raise RecipeError(
            "--type and --cast-dtype both select the type of tensors",
            "ckpt export --to gguf",
            f"--type {tensor_type} --cast-dtype {cast_code}",
            "",
        )
    kind = WRITABLE.get(tensor_type.upper())
    if kind is None:
        raise RecipeError(
            "no such type of tensors is written",
            "ckpt export --to gguf --type",
            tensor_type,
            f"use one of {', '.join(WRITABLE)}; llama.cpp's llama-quantize makes others from F16 or F32",
        )
    return kind


def _described(
    export: Export, tensors: Mapping[str, ExportTensor]
) -> tuple[GgufModel, list[KeyValue], Strings]:
    """Return the model that config.json describes, the keys of model and tokenizer, and warnings about the tokenizer.

    Raises :class:`CheckpointUnusable` if config.json and the tensors do not match, or a file is missing.
    """
    source = export.source
    side = export.required_config("GGUF")
    found: ValueDict = {
        name: read_json(side, name, source.export)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", GENERATION_CONFIG)
    }
    config, tokenizer = found["config.json"], found["tokenizer.json"]
    if tokenizer is None:
        raise unusable(
            "GGUF needs the model's tokenizer.json",
            side,
            "no such file",
            "put the file there, or export Hugging Face files (--to hf)",
        )
    where = str(side / "config.json")
    model = read_model(config, where)
    shapes = {fqn: tensor.stored.shape for fqn, tensor in tensors.items()}
    for fqn in tensors:
        if fqn.endswith(_FORMER_BUFFER):
            del shapes[fqn]
    if model.is_tied and _HEAD in tensors and _EMBED in tensors:
        root = source.root
        if is_copy(root, tensors[_HEAD].stored, root, tensors[_EMBED].stored):
            del shapes[_HEAD]
        else:
            # As transformers reads such files.
            model = read_model({**config, "tie_word_embeddings": False}, where)
    fault = layers_fault(model.num_layers, tensors)
    if fault is None:
        fault = name_faults({tensor.fqn: tensor.shape for tensor in model.tensors()}, shapes)
    if fault is not None:
        raise unusable(
            "config.json does not fit the tensors",
            where,
            fault,
            "use another checkpoint, or export Hugging Face files (--to hf)",
        )
    ends = (found[GENERATION_CONFIG] or {}).get("eos_token_id")
    vocabulary = convert_tokenizer(
        tokenizer,
        found["tokenizer_config.json"] or {},
        model.vocab_size,
        str(side / "tokenizer.json"),
        _chat_template(side, source.export),
        ends if isinstance(ends, list) else [ends],
    )
    return model, [*model.key_values(), *vocabulary.keys], vocabulary.warnings


def _kind(target: GgufTensor, native: Kind, wanted: Kind | None, *, is_tied: bool) -> Kind:
    """Return the type of a tensor in the file, as llama.cpp's llama-quantize chooses it."""
    # llama.cpp requires vectors in F32.
    if len(target.shape) < 2:
        return F32
    if wanted is None or not wanted.is_quantized:
        return wanted or native
    # The output layer gets more bits than the rest: there 6 (Q6_K), which the library gguf does not write.
    is_output = target.name == _OUTPUT or (is_tied and target.name == _EMBEDDING)
    kind = Q8_0 if is_output else wanted
    if target.shape[-1] % kind.block_size:
        return WRITABLE["F16"]
    return kind


def _chat_template(side: Path, export: ExportManifest | None) -> str | None:
    if not os.path.lexists(side / _TEMPLATE):
        return None
    with faults_of(side / _TEMPLATE, "the chat template cannot be read"):
        content = read_model_file(side, _TEMPLATE, limit=_MAX_TEMPLATE_BYTES)
        if export is not None:
            export.check_bytes(_TEMPLATE, content)
        return content.decode()


def _general(source: Source, entries: list[_Entry]) -> list[KeyValue]:
    # The type of the file is the type of most of its bytes.
    nbytes: Counter[Kind] = Counter()
    for entry in entries:
        nbytes[entry.kind] += entry.source.nbytes
    most = max(nbytes, key=lambda kind: nbytes[kind])
    # GGUF strings are UTF-8, and the name of a directory can be any bytes.
    place = source.model_directory if source.root == Path("/") else source.root
    name = os.fsencode(place.name).decode(errors="replace")
    return [
        ("general.type", "string", "model"),
        ("general.name", "string", name),
        ("general.file_type", "uint32", most.file_type),
        ("general.quantization_version", "uint32", QUANTIZATION_VERSION),
    ]


def _warnings(model: GgufModel, entries: list[_Entry], wanted: Kind | None) -> Iterator[str]:
    if model.context_limit is not None:
        yield (
            f"the model's attention slides over {model.context_limit} tokens, and llama.cpp's does not for this "
            f"architecture: the context length is written as {model.context_limit}, up to which both are equal"
        )
    if wanted is None or not wanted.is_quantized:
        return
    matrices = [entry for entry in entries if len(entry.target.shape) > 1]
    ragged = [entry.target.name for entry in matrices if not entry.kind.is_quantized]
    if ragged:
        yield (
            f"{counted_are(len(ragged), 'tensor')} written as F16, because rows are not a multiple of "
            f"{wanted.block_size} elements: {', '.join(ragged[:3])}"
        )


def _write_file(
    gguf: Any,
    path: Path,
    source: Source,
    keys: list[KeyValue],
    model: GgufModel,
    entries: list[_Entry],
) -> None:
    factors = np.array(model.positions.factors(model.head_dim), np.float32)
    writer = gguf.GGUFWriter(None, model.architecture.name)
    try:
        for key, kind, value in [*_general(source, entries), *keys]:
            getattr(writer, f"add_{kind}")(key, value)
        if factors.size:
            writer.add_tensor_info(
                "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes
            )
        for entry in entries:
            number = gguf.GGMLQuantizationType[entry.kind.name]
            # A shape of elements: only for uint8, the library takes it as one of bytes.
            dtype = np.dtype(np.float32)
            target = entry.target
            writer.add_tensor_info(target.name, target.shape, dtype, entry.nbytes, raw_dtype=number)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with open(path, "ab") as file:
        if factors.size:
            _pad(file)
            file.write(factors.tobytes())
        # In the order of the header.
        for entry in entries:
            _pad(file)
            for block in _blocks(gguf, source.root, entry, model.head_dim):
                file.write(np.ascontiguousarray(block).data)
        _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _blocks(gguf: Any, root: Path, entry: _Entry, head_dim: int) -> Iterator[Array]:
    """Yield the rows of a tensor as they are in the file, about ``_BLOCK_BYTES`` at a time."""
    target, source = entry.target, entry.source
    values = whole_checked(root, source.stored)
    if not target.shape or values.ndim == 1:
        values = values.reshape(1, -1)
    order = None
    if target.heads is not None:
        order = np.array(rotary_order(target.heads, head_dim))
    num_rows = values.shape[0]
    # Rows are computed in float32, and can be empty.
    rows_per_block = max(1, _BLOCK_BYTES // max(4 * values.shape[1], 1))
    for first in range(0, num_rows, rows_per_block):
        block = slice(first, first + rows_per_block)
        rows = values[block] if order is None else values[order[block]]
        yield _converted(gguf, rows, source, entry.kind, target.offset)


def _converted(gguf: Any, rows: Array, source: ExportTensor, kind: Kind, offset: int) -> Array:
    """Return *rows*, in the dtype of the stored tensor, as values or blocks of *kind*."""
    stored = source.stored.dtype
    if kind.dtype is not None and not offset:
        return cast(rows, stored, kind.dtype)
    wide = cast(rows, stored, "F32")
    if offset:
        wide = wide + np.float32(offset)
    if kind.dtype is not None:
        return cast(wide, "F32", kind.dtype)
    quantized: Array = gguf.quants.quantize(wide, gguf.GGMLQuantizationType[kind.name])
    return quantized
