"""A checkpoint's model as one GGUF file, for llama.cpp and programs based on it: verified, staged, published.

Written with the ``gguf`` package (the extra of that name). Memory: the largest tensor.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.export.plan import ExportTensor, make_plan, parse_cast_dtype
from automodel_ckpt.checkpoint.export_leftovers import Log
from automodel_ckpt.checkpoint.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.sources.base_maps import maps_of
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.float_cast import Array, cast, storage_dtype
from automodel_ckpt.checkpoint.tensors.stored import whole_checked
from automodel_ckpt.checkpoint.verify import verify
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.convert.publishing import check_file_target, published_file
from automodel_ckpt.convert.sources.files import read_json
from automodel_ckpt.convert.targets.gguf_llama import (
    KeyValue,
    Llama,
    layers_fault,
    name_faults,
    read_llama,
    rotary_order,
)
from automodel_ckpt.convert.targets.gguf_tokenizer import tokenizer_keys
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

log_default = logging.getLogger("automodel_ckpt")

# GGML's tensor types, and the file type that says of which most are (source: gguf.md, `general.file_type`).
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
_MAX_TEMPLATE_BYTES = 1 << 20
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class GgufReport:
    """A GGUF file that was published. *checked* says whether the source's digests were known, and so compared."""

    output: Path
    num_tensors: int
    nbytes: int
    seconds: float
    checked: bool
    warnings: tuple[str, ...]


def export_gguf(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    cast_dtype: str | None = None,
    overwrite: bool = False,
    num_threads: int = 5,
    log: Log = log_default.info,
) -> GgufReport:
    """Write the model in *source* (anything that ``open_source`` of ``convert/open.py`` accepts) as a GGUF file.

    *output* defaults to the source's name with ``.gguf``, next to it. Norms are written as F32, other tensors in the
    dtype that an export of Hugging Face files has; *cast_dtype* is bf16, fp16 or fp32.

    Raises :class:`CheckpointUnusable` for a damaged source, and for a model or a tokenizer that GGUF cannot represent;
    :class:`SaveFailed` if the file cannot be written; :class:`RecipeError` for a wrong argument, or if the package gguf
    is missing. In each case nothing was written.
    """
    started = time.monotonic()
    library = _library()
    cast_code = parse_cast_dtype(cast_dtype)
    opened = open_source(Path(source))
    if output is None:
        output = opened.root.with_name(opened.root.name + ".gguf")
    # Publishing renames: without this, it would replace a link instead of its target.
    target = Path(os.path.realpath(output))
    # Before the digests are verified, which reads the complete source.
    check_file_target(target, overwrite=overwrite)
    _check_digests(opened, num_threads)
    tensors = _tensors(opened, cast_code)
    keys, model = _described(opened, tensors)
    warnings = (*opened.notes, *_warnings(keys))
    for text in warnings:
        log(f"warning: {text}")
    with published_file(target, log, what="the GGUF file") as path:
        _write(library, path, opened.root, keys, model, tensors)
    nbytes = target.stat().st_size
    seconds = time.monotonic() - started
    return GgufReport(target, len(tensors), nbytes, seconds, opened.has_digests, warnings)


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


def _check_digests(source: Source, num_threads: int) -> None:
    if source.manifest is None:
        return
    problems = verify(source.root, source.manifest, "digest", num_threads=num_threads)
    if problems:
        raise CheckpointUnusable.all_of(problems)


def _tensors(source: Source, cast_code: str | None) -> dict[str, ExportTensor]:
    where = str(source.model_directory)
    plan = make_plan(
        source.tensors, source.tied, maps_of(source), cast_dtype=cast_code, where=where
    )
    found = {tensor.fqn: tensor for file in plan.files for tensor in file.tensors}
    for fqn, tensor in found.items():
        if tensor.dtype not in _FILE_TYPES:
            raise CheckpointUnusable(
                f"a tensor of dtype {tensor.dtype} is not written as GGUF",
                where=where,
                value=fqn,
                hint="F64 weights can be cast: --cast-dtype fp32",
            )
    return found


def _described(source: Source, tensors: Mapping[str, ExportTensor]) -> tuple[list[KeyValue], Llama]:
    """Return all keys of the file, and the model that they describe. The tensors are those of that model.

    Raises :class:`CheckpointUnusable` if config.json and the tensors do not match, or a file is missing.
    """
    side = source.metadata_directory or source.model_directory
    config = _required_json(side, "config.json", source.export)
    tokenizer = _required_json(side, "tokenizer.json", source.export)
    model = read_llama(config, str(side / "config.json"))
    fault = layers_fault(model.num_layers, tensors)
    if fault is not None:
        raise CheckpointUnusable(
            "config.json does not fit the tensors",
            where=str(side / "config.json"),
            value=fault,
            hint="restore the file from another copy, or use another checkpoint",
        )
    shapes = {fqn: tensor.stored.shape for fqn, tensor in tensors.items()}
    fault = name_faults(model.tensors(), shapes)
    if fault is not None:
        raise CheckpointUnusable(
            "the tensors are not those of the config",
            where=str(side / "config.json"),
            value=fault,
            hint="use another checkpoint, or export Hugging Face files (--to hf)",
        )
    settings = read_json(side, "tokenizer_config.json", source.export) or {}
    vocabulary = tokenizer_keys(
        tokenizer,
        settings,
        model.vocab_size,
        str(side / "tokenizer.json"),
        _chat_template(side, source.export),
    )
    return [*_general(source, tensors), *model.key_values(), *vocabulary], model


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
        content = read_safely(side, _TEMPLATE, limit=_MAX_TEMPLATE_BYTES)
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


def _general(source: Source, tensors: Mapping[str, ExportTensor]) -> list[KeyValue]:
    # The type of the file is the dtype of most of its bytes.
    nbytes = dict.fromkeys(_FILE_TYPES, 0)
    for tensor in tensors.values():
        nbytes[tensor.dtype] += tensor.nbytes
    kind = max(nbytes, key=lambda code: nbytes[code])
    # GGUF strings are UTF-8, and the name of a directory can be any bytes.
    name = os.fsencode(source.root.name).decode(errors="replace")
    return [
        ("general.type", "string", "model"),
        ("general.name", "string", name),
        ("general.file_type", "uint32", _FILE_TYPES[kind]),
    ]


def _warnings(keys: list[KeyValue]) -> Iterator[str]:
    if not any(key == "tokenizer.ggml.eos_token_id" for key, _, _ in keys):
        yield "tokenizer_config.json names no end-of-sequence token: llama.cpp takes one of its own"


def _write(
    library: Any,
    path: Path,
    root: Path,
    keys: list[KeyValue],
    model: Llama,
    tensors: Mapping[str, ExportTensor],
) -> None:
    writer = library.GGUFWriter(None, "llama")
    try:
        for key, kind, value in keys:
            getattr(writer, f"add_{kind}")(key, value)
        names = {fqn: name for fqn, (name, _) in model.tensors().items()}
        factors = np.array(model.rope_factors(), np.float32)
        if factors.size:
            writer.add_tensor_info(
                "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes
            )
        for fqn, name in names.items():
            code = _code(tensors[fqn])
            dtype = storage_dtype(code, DTYPE_BITS[code])
            shape = tensors[fqn].stored.shape
            nbytes = int(np.prod(shape)) * dtype.itemsize
            kind = library.GGMLQuantizationType[code]
            writer.add_tensor_info(name, shape, dtype, nbytes, raw_dtype=kind)
        # All descriptions come before the data, which is written tensor by tensor: memory holds one tensor.
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors.size:
            writer.write_tensor_data(factors)
        # In the order of add_tensor_info(): the library matches data to names by order (gguf 0.19).
        for fqn, name in names.items():
            writer.write_tensor_data(_values(root, tensors[fqn], model, name))
    finally:
        writer.close()


def _code(tensor: ExportTensor) -> str:
    """Return the dtype in the file. llama.cpp requires vectors (norms) in F32."""
    if len(tensor.stored.shape) < 2:
        return "F32"
    return tensor.dtype


def _values(root: Path, tensor: ExportTensor, model: Llama, name: str) -> Array:
    values = cast(whole_checked(root, tensor.stored), tensor.stored.dtype, _code(tensor))
    heads = model.heads_of(name)
    if heads is None:
        return values
    return values[rotary_order(heads, model.head_dim)]
