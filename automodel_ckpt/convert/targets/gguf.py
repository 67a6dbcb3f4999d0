"""A checkpoint's model as one GGUF file, for llama.cpp and programs based on it: verified, staged, published.

The ``gguf`` package (the extra of that name) writes the header and quantizes. The data of tensors are written here, in
blocks of rows. Memory: some blocks; for a checkpoint of several shards, the largest tensor.
"""

from __future__ import annotations

import importlib
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
from automodel_ckpt.checkpoint.export.next_steps import modelfile_text
from automodel_ckpt.checkpoint.export.plan import ExportTensor
from automodel_ckpt.checkpoint.files.safe_open import read_model_file
from automodel_ckpt.checkpoint.sources.model_files import GENERATION_CONFIG
from automodel_ckpt.checkpoint.sources.source import Source, Tensors
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast
from automodel_ckpt.checkpoint.tensors.stored import whole_checked
from automodel_ckpt.convert.formats.files import read_json
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
from automodel_ckpt.convert.imports.base_copies import difference
from automodel_ckpt.convert.publishing import published_file
from automodel_ckpt.convert.targets.flow import LOG, Export, ExportReport, Log
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, SaveFailed, os_problem

# Rows are cast, reordered and quantized in blocks of about this many bytes in single precision.
_BLOCK_BYTES = 16 << 20
# llama.cpp requires each tensor to begin at a multiple (general.alignment, by default).
_ALIGNMENT = 32
_CASTS = {"F16": "fp16", "BF16": "bf16"}
_OUTPUT = "output.weight"
_EMBEDDING = "token_embd.weight"
# The same two in config.json's model.
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
# Computed from config.json. Earlier versions of transformers stored it in each layer.
_FORMER_BUFFER = ".rotary_emb.inv_freq"
_MAX_TEMPLATE_BYTES = 1 << 20
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the file: what it is, where its values come from, and its type."""

    target: GgufTensor
    source: ExportTensor
    kind: Kind

    @property
    def nbytes(self) -> int:
        numel = int(np.prod(self.target.shape, dtype=np.int64))
        return numel // self.kind.block_size * self.kind.block_bytes


def export_gguf(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    cast_dtype: str | None = None,
    tensor_type: str | None = None,
    overwrite: bool = False,
    num_threads: int = 5,
    log: Log = LOG,
) -> ExportReport:
    """Write the model in *source* (anything that ``open_source`` of ``convert/open.py`` accepts) as a GGUF file.

    *output* defaults to the source's name with ``.gguf``, next to it. Vectors (norms, biases) are written as F32, other
    tensors as *tensor_type*: a name in ``WRITABLE`` of ``convert/formats/gguf/header.py``, in any case, for example
    ``Q8_0``. By
    default they have the dtype of the checkpoint, which *cast_dtype* changes to bf16, fp16 or fp32.

    Raises :class:`CheckpointUnusable` for a damaged source, and for a model or a tokenizer that GGUF cannot represent;
    :class:`SaveFailed` if the file cannot be written; :class:`RecipeError` for a wrong argument, or if the package gguf
    is missing. In each case nothing was written.
    """
    library = _library()
    wanted = _wanted_kind(tensor_type, cast_dtype)
    if wanted is not None:
        # Quantized values are computed from the stored ones: a cast before would only lose precision.
        cast_dtype = _CASTS.get(wanted.name, "fp32")
    export = Export(source, cast_dtype, log)
    opened = export.source
    # Before the digests are verified, which reads the complete source.
    target = export.file(output, ".gguf", overwrite=overwrite)
    export.check_digests(num_threads)
    tensors = _tensors(export)
    model, keys, tokenizer_warnings = _described(export, tensors)
    entries = _entries(model, tensors, wanted)
    export.warn(*opened.notes, *tokenizer_warnings, *_warnings(model, entries, wanted))
    export.log_casts((entry.source.stored.dtype, entry.kind.name) for entry in entries)
    with published_file(target, log, what="the GGUF file") as path:
        all_keys = [*_general(opened, entries), *keys]
        _write(library, path, opened.root, all_keys, model, entries)
    counts = Counter(entry.kind.name for entry in entries)
    return export.report(target, len(entries), kinds=dict(counts))


def write_modelfile(file: Path) -> Path:
    """Write Ollama's Modelfile next to a GGUF *file*, unless there is one already, and return its path.

    Raises :class:`SaveFailed` if it cannot be written.
    """
    path = file.with_suffix(".Modelfile")
    if not path.exists():
        try:
            replace_file(path, modelfile_text(file).encode())
        except OSError as error:
            hint = "free space, then write it by hand: FROM ./ and the name of the GGUF file"
            problem = os_problem(error, "Ollama's Modelfile cannot be written", hint=hint)
            raise SaveFailed.all_of([problem]) from error
    return path


def _wanted_kind(tensor_type: str | None, cast_dtype: str | None) -> Kind | None:
    if tensor_type is None:
        return None
    if cast_dtype is not None:
        raise RecipeError(
            "--type and --cast-dtype both select the type of tensors",
            where="ckpt export --to gguf",
            value=f"--type {tensor_type} --cast-dtype {cast_dtype}",
            hint="remove --cast-dtype",
        )
    kind = WRITABLE.get(tensor_type.upper())
    if kind is None:
        raise RecipeError(
            "no such type of tensors is written",
            where="ckpt export --to gguf --type",
            value=tensor_type,
            hint=f"use one of {', '.join(WRITABLE)}; llama.cpp's llama-quantize makes others from F16 or F32",
        )
    return kind


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise RecipeError(
            "writing GGUF needs the package gguf",
            where="ckpt export --to gguf",
            value=str(error),
            hint="pip install 'automodel_ckpt[gguf]'",
        ) from error


def _tensors(export: Export) -> dict[str, ExportTensor]:
    found = {tensor.fqn: tensor for file in export.plan().files for tensor in file.tensors}
    for fqn, tensor in found.items():
        if tensor.dtype not in WRITABLE:
            raise CheckpointUnusable(
                f"a tensor of dtype {tensor.dtype} is not written as GGUF",
                where=export.where,
                value=fqn,
                hint="F64 weights can be cast: --cast-dtype fp32 or --type F32",
            )
    return found


def _described(
    export: Export, tensors: Mapping[str, ExportTensor]
) -> tuple[GgufModel, list[KeyValue], tuple[str, ...]]:
    """Return the model that config.json describes, the keys of model and tokenizer, and warnings about the tokenizer.

    Raises :class:`CheckpointUnusable` if config.json and the tensors do not match, or a file is missing.
    """
    source = export.source
    side = export.required_config("GGUF")
    config = _required_json(side, "config.json", source.export)
    tokenizer = _required_json(side, "tokenizer.json", source.export)
    model = read_model(config, str(side / "config.json"))
    shapes = {}
    for fqn, tensor in tensors.items():
        if not fqn.endswith(_FORMER_BUFFER):
            shapes[fqn] = tensor.stored.shape
    if model.is_tied and _HEAD in tensors and _EMBED in tensors:
        if _are_equal(source, tensors[_HEAD], tensors[_EMBED]):
            del shapes[_HEAD]
        else:
            # As transformers reads such files.
            config = {**config, "tie_word_embeddings": False}
            model = read_model(config, str(side / "config.json"))
    fault = layers_fault(model.num_layers, tensors)
    if fault is not None:
        raise CheckpointUnusable(
            "config.json does not fit the tensors",
            where=str(side / "config.json"),
            value=fault,
            hint="restore the file from another copy, or use another checkpoint",
        )
    expected = {tensor.fqn: tensor.shape for tensor in model.tensors()}
    fault = name_faults(expected, shapes)
    if fault is not None:
        raise CheckpointUnusable(
            "the tensors are not those of the config",
            where=str(side / "config.json"),
            value=fault,
            hint="use another checkpoint, or export Hugging Face files (--to hf)",
        )
    settings = read_json(side, "tokenizer_config.json", source.export) or {}
    ends = (read_json(side, GENERATION_CONFIG, source.export) or {}).get("eos_token_id")
    vocabulary = convert_tokenizer(
        tokenizer,
        settings,
        model.vocab_size,
        str(side / "tokenizer.json"),
        _chat_template(side, source.export),
        ends if isinstance(ends, list) else [ends],
    )
    return model, [*model.key_values(), *vocabulary.keys], vocabulary.warnings


def _are_equal(source: Source, one: ExportTensor, other: ExportTensor) -> bool:
    others = Tensors(source.root, {other.fqn: other.stored})
    return not difference(source.root, one.stored, others, [other.fqn])


def _entries(
    model: GgufModel, tensors: Mapping[str, ExportTensor], wanted: Kind | None
) -> list[_Entry]:
    """Return the tensors of the file in order, with the type of each."""
    entries = []
    for target in model.tensors():
        tensor = tensors[target.fqn]
        kind = _kind(target, WRITABLE[tensor.dtype], wanted, is_tied=model.is_tied)
        entries.append(_Entry(target, tensor, kind))
    return entries


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


def _required_json(side: Path, name: str, export: ExportManifest | None) -> dict[str, Any]:
    value = read_json(side, name, export)
    if value is None:
        raise CheckpointUnusable(
            f"GGUF needs the model's {name}",
            where=str(side),
            value="no such file",
            hint="put the file there, or export Hugging Face files (--to hf)",
        )
    return value


def _chat_template(side: Path, export: ExportManifest | None) -> str | None:
    try:
        content = read_model_file(side, _TEMPLATE, limit=_MAX_TEMPLATE_BYTES)
        if export is not None:
            export.check_bytes(_TEMPLATE, content)
        return content.decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointUnusable(
            "the chat template cannot be read",
            where=str(side / _TEMPLATE),
            value=repr(error)[:200],
            hint="restore the file from another copy",
        ) from error


def _general(source: Source, entries: list[_Entry]) -> list[KeyValue]:
    # The type of the file is that of most of its bytes.
    nbytes: dict[Kind, int] = {}
    for entry in entries:
        nbytes[entry.kind] = nbytes.get(entry.kind, 0) + entry.source.nbytes
    most = max(nbytes, key=lambda kind: nbytes[kind])
    # GGUF strings are UTF-8, and the name of a directory can be any bytes.
    name = os.fsencode(source.model_directory.name).decode(errors="replace")
    if source.root != Path("/"):
        name = os.fsencode(source.root.name).decode(errors="replace")
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
    ragged = []
    for entry in entries:
        if len(entry.target.shape) > 1 and not entry.kind.is_quantized:
            ragged.append(entry.target.name)
    if ragged:
        yield (
            f"{counted_are(len(ragged), 'tensor')} written as F16, because rows are not a multiple of "
            f"{wanted.block_size} elements: {', '.join(ragged[:3])}"
        )


def _write(
    library: Any,
    path: Path,
    root: Path,
    keys: list[KeyValue],
    model: GgufModel,
    entries: list[_Entry],
) -> None:
    factors = np.array(model.positions.factors(model.head_dim), np.float32)
    _write_header(library, path, keys, model.architecture.name, factors, entries)
    with open(path, "ab") as file:
        if factors.size:
            _pad(file)
            file.write(factors.tobytes())
        # In the order of the header.
        for entry in entries:
            _pad(file)
            for block in _blocks(library, root, entry, model.head_dim):
                file.write(np.ascontiguousarray(block).data)
        _pad(file)


def _write_header(
    library: Any,
    path: Path,
    keys: list[KeyValue],
    architecture: str,
    factors: Array,
    entries: list[_Entry],
) -> None:
    writer = library.GGUFWriter(None, architecture)
    try:
        for key, kind, value in keys:
            getattr(writer, f"add_{kind}")(key, value)
        if factors.size:
            writer.add_tensor_info(
                "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes
            )
        for entry in entries:
            number = library.GGMLQuantizationType[entry.kind.name]
            # A shape of elements: only for uint8, the library takes it as one of bytes.
            writer.add_tensor_info(
                entry.target.name,
                entry.target.shape,
                np.dtype(np.float32),
                entry.nbytes,
                raw_dtype=number,
            )
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _blocks(library: Any, root: Path, entry: _Entry, head_dim: int) -> Iterator[Array]:
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
    row_bytes = max(4 * values.shape[1], 1)
    rows_per_block = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, num_rows, rows_per_block):
        block = slice(first, first + rows_per_block)
        rows = values[block] if order is None else values[order[block]]
        yield _converted(library, rows, source, entry.kind, target.offset)


def _converted(library: Any, rows: Array, source: ExportTensor, kind: Kind, offset: int) -> Array:
    """Return *rows*, in the dtype of the stored tensor, as values or blocks of *kind*."""
    stored = source.stored.dtype
    if kind.dtype is not None and not offset:
        return cast(rows, stored, kind.dtype)
    wide = cast(rows, stored, "F32")
    if offset:
        wide = wide + np.float32(offset)
    if kind.dtype is not None:
        return cast(wide, "F32", kind.dtype)
    quantized: Array = library.quants.quantize(wide, library.GGMLQuantizationType[kind.name])
    return quantized
