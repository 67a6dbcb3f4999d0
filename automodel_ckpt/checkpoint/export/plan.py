"""From slices to Hugging Face files: pure, no file is touched.

The plan fixes what an export holds: names, dtypes, files, headers, and the place of every tensor. Which bytes of which
slices then fill a file is said by ``blocks.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.slices import Tensor, nbytes_of
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

MAX_FILE_BYTES = 5_000_000_000
_CAST_NAMES = {
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp16": "F16",
    "float16": "F16",
    "half": "F16",
    "fp32": "F32",
    "float32": "F32",
    "float": "F32",
    "fp64": "F64",
    "float64": "F64",
    "double": "F64",
}


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A tensor of the export: its name there, the stored tensor it is made from, and its dtype there."""

    fqn: str
    stored: Tensor
    dtype: str

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.stored.shape)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the export: its header and its size in bytes."""

    name: str
    header: bytes
    nbytes: int
    tensors: tuple[ExportTensor, ...]

    def placed(self) -> Iterator[tuple[ExportTensor, int]]:
        """Each tensor and the byte where it begins."""
        at = len(self.header)
        for tensor in self.tensors:
            yield tensor, at
            at += tensor.nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The files to write: *casts* counts tensors by (from, to); *warnings* are for the user."""

    files: tuple[OutputFile, ...]
    casts: Mapping[tuple[str, str], int]
    warnings: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of all output files, headers included."""
        return sum(file.nbytes for file in self.files)

    def index(self) -> bytes:
        """The content of ``model.safetensors.index.json``."""
        weight_map = {tensor.fqn: file.name for file in self.files for tensor in file.tensors}
        total = sum(tensor.nbytes for file in self.files for tensor in file.tensors)
        document = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return json.dumps(document, indent=2).encode() + b"\n"


def numbered_file(number: int, count: int) -> str:
    """Hugging Face's name of file *number* (from 1) of *count*."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def parse_cast_dtype(name: str | None) -> str | None:
    """The safetensors code of ``bf16``, ``fp16``, ``fp32``, ``fp64`` or a long name; None and "" mean no cast."""
    if not name:
        return None
    code = _CAST_NAMES.get(name.lower().removeprefix("torch."))
    if code is None:
        raise RecipeError(
            "unknown dtype to cast to",
            where="--cast-dtype (CAST_DTYPE)",
            value=name,
            hint="one of bf16, fp16, fp32, fp64, bfloat16, float16, float32, float64",
        )
    return code


def make_plan(
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    maps: BaseMaps,
    *,
    cast_dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    where: str = "",
) -> Plan:
    """The plan of an export. *tied* maps names that were not stored to stored ones; *where* is for messages.

    Raises :class:`CheckpointUnusable` where names or shapes are not those of the base.
    """
    files, warnings = plan_files(
        tensors, tied, maps, cast_dtype=cast_dtype, max_file_bytes=max_file_bytes, where=where
    )
    return Plan(files, counted_casts(files), warnings)


def plan_files(
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    maps: BaseMaps,
    *,
    cast_dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    where: str = "",
    file_name: Callable[[int, int], str] = numbered_file,
) -> tuple[tuple[OutputFile, ...], tuple[str, ...]]:
    """The files of an export and what the user should know, by names, dtypes and shapes alone (no slices needed).

    *file_name* names file I (from 1) of N. Raises as :func:`make_plan`.
    """
    warnings: list[str] = []
    stored = export_names(tensors, tied, maps, where, warnings)
    exported = [
        ExportTensor(fqn, tensor, _dtype(fqn, tensor, maps, cast_dtype))
        for fqn, tensor in stored.items()
    ]
    warnings += _quantized_warnings(exported, maps)
    if maps.is_adapter:
        return tuple(
            _output_files([exported], lambda _number, _count: layout.ADAPTER_MODEL)
        ), tuple(warnings)
    return tuple(_output_files(_group(exported, maps, max_file_bytes), file_name)), tuple(warnings)


def counted_casts(files: Iterable[OutputFile]) -> dict[tuple[str, str], int]:
    """How many tensors change their dtype, by (from, to)."""
    tensors = (tensor for file in files for tensor in file.tensors)
    return dict(Counter((t.stored.dtype, t.dtype) for t in tensors if t.stored.dtype != t.dtype))


def export_names(
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    maps: BaseMaps,
    where: str,
    warnings: list[str],
) -> dict[str, Tensor]:
    """The stored tensor of each name that the export holds: those of the base where it is known, tied as it is."""
    if maps.names is None:
        return dict(tensors)
    groups = _tie_groups(tied)
    result, missing = {}, []
    for fqn in sorted(maps.names):
        holder = next((name for name in groups.get(fqn, (fqn,)) if name in tensors), None)
        if holder is not None:
            result[fqn] = tensors[holder]
        elif maps.shape is None and maps.tie_word_embeddings and fqn.endswith("lm_head.weight"):
            warnings.append(
                f"{fqn} is left out: the shards lack it, and config.json ties it to the embedding"
            )
        else:
            missing.append(fqn)
    extra = [fqn for fqn in tensors if not maps.names & {fqn, *groups.get(fqn, ())}]
    if missing or extra:
        _check_tensor_names(missing, extra, where)
    for fqn, shape in (maps.shape or {}).items():
        if result[fqn].shape != shape:
            _refuse(
                f"the tensor {fqn!r} has another shape than it should",
                where,
                f"{result[fqn].shape}, not {shape}",
            )
    return result


def _tie_groups(tied: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """For each name that is tied at all, every name of its group, the stored one first."""
    members: dict[str, list[str]] = {}
    for alias, kept in tied.items():
        members.setdefault(kept, [kept]).append(alias)
    return {name: tuple(group) for group in members.values() for name in group}


def _check_tensor_names(missing: Sequence[str], extra: Sequence[str], where: str) -> NoReturn:
    parts = [
        f"{label}: {_some(names)}"
        for label, names in (("missing", missing), ("not in the base", extra))
        if names
    ]
    _refuse("the tensors are not those that the base model has", where, "; ".join(parts))


def _refuse(what: str, where: str, value: object) -> NoReturn:
    raise CheckpointUnusable(
        what,
        where=where,
        value=value,
        hint="use another checkpoint; if the model was changed on purpose, .hf_metadata must describe the new one",
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(map(repr, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _dtype(fqn: str, tensor: Tensor, maps: BaseMaps, cast_dtype: str | None) -> str:
    """The dtype of an exported tensor: only ordinary floats ever change theirs, and only into another one."""
    original = (maps.dtype or {}).get(fqn, tensor.dtype)
    if tensor.dtype not in ORDINARY_FLOATS:
        return tensor.dtype
    if cast_dtype is not None:
        return cast_dtype
    return original if original in ORDINARY_FLOATS else tensor.dtype


def quantized_in_base(exported: Iterable[ExportTensor], maps: BaseMaps) -> list[ExportTensor]:
    """Tensors that the base holds quantized or packed, and the checkpoint as ordinary floats."""
    originals = maps.dtype or {}
    return [
        tensor
        for tensor in exported
        if tensor.dtype in ORDINARY_FLOATS
        and originals.get(tensor.fqn, "F32") not in ORDINARY_FLOATS
    ]


def _quantized_warnings(exported: Sequence[ExportTensor], maps: BaseMaps) -> list[str]:
    found = quantized_in_base(exported, maps)
    if not found:
        return []
    names = _some([tensor.fqn for tensor in found], 3)
    return [
        f"{len(found)} tensors are quantized in the base and float here; they stay float: {names}"
    ]


def _group(
    exported: Sequence[ExportTensor], maps: BaseMaps, limit: int
) -> list[list[ExportTensor]]:
    """The tensors of each output file: as in the base's index where it is known, else at most *limit* bytes."""
    if maps.file_index is not None:
        last = max(maps.file_index.values(), default=1)
        by_number: dict[int, list[ExportTensor]] = {}
        for tensor in exported:
            by_number.setdefault(maps.file_index.get(tensor.fqn, last), []).append(tensor)
        return [by_number[number] for number in sorted(by_number)]
    groups: list[list[ExportTensor]] = [[]]
    nbytes = 0
    for tensor in exported:
        if groups[-1] and nbytes + tensor.nbytes > limit:
            groups.append([])
            nbytes = 0
        groups[-1].append(tensor)
        nbytes += tensor.nbytes
    return groups


def _output_files(
    groups: Sequence[Sequence[ExportTensor]], file_name: Callable[[int, int], str]
) -> Iterator[OutputFile]:
    for number, group in enumerate(groups, start=1):
        # Wide elements first: then every tensor is aligned to its own element, as readers that map the file want it.
        ordered = tuple(sorted(group, key=lambda tensor: -DTYPE_BITS[tensor.dtype]))
        header, _ = build_header(
            [(t.fqn, t.dtype, t.stored.shape) for t in ordered], {"format": "pt"}
        )
        nbytes = len(header) + sum(tensor.nbytes for tensor in ordered)
        yield OutputFile(file_name(number, len(groups)), header, nbytes, ordered)
