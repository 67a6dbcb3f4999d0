"""Planning an export as Hugging Face files. Pure functions: no file is opened.

The plan determines the content of an export: names, dtypes, files, headers, and the offset of every tensor.
``blocks.py`` determines which bytes of which slices fill a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from automodel_ckpt.base.units import counted_are
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.parts.slices import Tensor, nbytes_of
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

_MAX_FILE_BYTES = 5_000_000_000
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
class BaseMaps:
    """The file (from 1), dtype and shape of each tensor of the base model; None when unknown.

    For an adapter, they describe the adapter, which is a single file.
    """

    file_index: Mapping[str, int] | None = None
    dtype: Mapping[str, str] | None = None
    shape: Mapping[str, tuple[int, ...]] | None = None
    tie_word_embeddings: bool = False
    is_adapter: bool = False
    float32_in: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The dtypes (safetensors codes) to which an export does not cast a tensor: the model keeps it in float32."""

    @property
    def names(self) -> frozenset[str] | None:
        """The names of exactly the tensors of an export; None when the base is unknown."""
        if self.shape is not None:
            return frozenset(self.shape)
        if self.file_index is not None:
            return frozenset(self.file_index)
        return None


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A tensor of the export: its name, the stored tensor that it is made from, and its dtype in the export."""

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
        """Yield each tensor and the byte where it begins."""
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
        """Return the content of ``model.safetensors.index.json``."""
        weight_map: dict[str, str] = {}
        total = 0
        for file in self.files:
            for tensor in file.tensors:
                weight_map[tensor.fqn] = file.name
                total += tensor.nbytes
        document = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return json.dumps(document, indent=2).encode() + b"\n"


def numbered_file(number: int, count: int) -> str:
    """Return Hugging Face's name of file *number* (from 1) of *count*."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def parse_cast_dtype(name: str | None) -> str | None:
    """Return the safetensors code of ``bf16``, ``fp16``, ``fp32``, ``fp64`` or a long name; None for no cast.

    Raises :class:`RecipeError` for any other name.
    """
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
    where: str = "",
) -> Plan:
    """Plan an export. Needs names, dtypes and shapes, but no slices.

    *tied* maps names that were not stored to stored names; *where* is for messages. Raises :class:`CheckpointUnusable`
    if names or shapes differ from the base.
    """
    warnings: list[str] = []
    stored = export_names(tensors, tied, maps, where, warnings)
    exported = [
        ExportTensor(fqn, tensor, _dtype(fqn, tensor, maps, cast_dtype))
        for fqn, tensor in stored.items()
    ]
    warnings += _quantized_warnings(exported, maps)
    if maps.is_adapter:
        # PEFT reads a single file of this name.
        files = [_output_file(exported, layout.ADAPTER_MODEL)]
    else:
        groups = _group(exported, maps)
        names = [numbered_file(number, len(groups)) for number in range(1, len(groups) + 1)]
        files = [_output_file(group, name) for group, name in zip(groups, names, strict=True)]
    return Plan(tuple(files), _counted_casts(files), tuple(warnings))


def _counted_casts(files: Iterable[OutputFile]) -> dict[tuple[str, str], int]:
    """Return the number of tensors that change their dtype, by (from, to)."""
    casts: Counter[tuple[str, str]] = Counter()
    for file in files:
        for tensor in file.tensors:
            if tensor.stored.dtype != tensor.dtype:
                casts[tensor.stored.dtype, tensor.dtype] += 1
    return dict(casts)


def export_names(
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    maps: BaseMaps,
    where: str,
    warnings: list[str],
) -> dict[str, Tensor]:
    """Return the stored tensor of each name in the export: the names of the base if known, or else the stored ones.

    Raises :class:`CheckpointUnusable` if names or shapes differ from the base.
    """
    if maps.names is None:
        return dict(tensors)
    groups = _tie_groups(tied)
    result: dict[str, Tensor] = {}
    missing: list[str] = []
    # Sorted: the order of a set of text differs between processes, and ranks that fill files
    # together must plan the same ones (formats/hf.py).
    for fqn in sorted(maps.names):
        # The same tensor can be stored under another of its tied names.
        stored_names = [name for name in groups.get(fqn, (fqn,)) if name in tensors]
        if stored_names:
            result[fqn] = tensors[stored_names[0]]
        elif maps.shape is None and maps.tie_word_embeddings and fqn.endswith("lm_head.weight"):
            warnings.append(
                f"{fqn} is left out: the shards lack it, and config.json ties it to the embedding"
            )
        else:
            missing.append(fqn)
    extra = [fqn for fqn in tensors if not maps.names & {fqn, *groups.get(fqn, ())}]
    _check_tensor_names(missing, extra, where)
    for fqn, shape in (maps.shape or {}).items():
        if result[fqn].shape != shape:
            what = f"the tensor {fqn!r} has another shape than it should"
            raise _not_the_base(what, where, f"{result[fqn].shape}, not {shape}")
    return result


def _tie_groups(tied: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return all names of the group of each tied name, the stored one first."""
    members: dict[str, list[str]] = {}
    for alias, stored in tied.items():
        members.setdefault(stored, [stored]).append(alias)
    groups: dict[str, tuple[str, ...]] = {}
    for group in members.values():
        for name in group:
            groups[name] = tuple(group)
    return groups


def _check_tensor_names(missing: Sequence[str], extra: Sequence[str], where: str) -> None:
    parts: list[str] = []
    if missing:
        parts.append(f"missing: {_some(missing)}")
    if extra:
        parts.append(f"not in the base: {_some(extra)}")
    if parts:
        what = "the tensors are not those that the base model has"
        raise _not_the_base(what, where, "; ".join(parts))


def _not_the_base(what: str, where: str, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(
        what,
        where=where,
        value=value,
        hint="use another checkpoint; if the model was changed on purpose, .hf_metadata must describe the new one",
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    text = ", ".join(map(repr, names[:limit]))
    if len(names) <= limit:
        return text
    return f"{text} and {len(names) - limit} more"


def _dtype(fqn: str, tensor: Tensor, maps: BaseMaps, cast_dtype: str | None) -> str:
    """Return the dtype of an exported tensor. Only ordinary floats are cast, and only to ordinary floats.

    Tensors that the model keeps in float32 beside others of the dtype *cast_dtype* stay so.
    """
    original = (maps.dtype or {}).get(fqn, tensor.dtype)
    if tensor.dtype not in ORDINARY_FLOATS:
        return tensor.dtype
    if cast_dtype is not None:
        is_kept = cast_dtype in maps.float32_in.get(fqn, ()) and tensor.dtype in ("F32", "F64")
        return "F32" if is_kept else cast_dtype
    if original in ORDINARY_FLOATS:
        return original
    return tensor.dtype


def quantized_in_base(exported: Iterable[ExportTensor], maps: BaseMaps) -> list[ExportTensor]:
    """Return the tensors that are quantized or packed in the base, and ordinary floats in the checkpoint."""
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
    number = counted_are(len(found), "tensor")
    stay = "it stays" if len(found) == 1 else "they stay"
    return [f"{number} quantized in the base and float here; {stay} float: {names}"]


def _group(exported: Sequence[ExportTensor], maps: BaseMaps) -> list[list[ExportTensor]]:
    """Return the tensors of each output file: as in the base's index if it is known, else by size."""
    numbers = maps.file_index
    if numbers is None:
        numbers = file_numbers({tensor.fqn: tensor.nbytes for tensor in exported})
    last = max(numbers.values(), default=1)
    by_number: dict[int, list[ExportTensor]] = {}
    for tensor in exported:
        by_number.setdefault(numbers.get(tensor.fqn, last), []).append(tensor)
    return [by_number[number] for number in sorted(by_number)] or [[]]


def file_numbers(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number (from 1) of each tensor's file, for files of at most 5 GB; *sizes* in bytes, by name."""
    number, nbytes = 1, 0
    result: dict[str, int] = {}
    for fqn, size in sizes.items():
        if nbytes and nbytes + size > _MAX_FILE_BYTES:
            number, nbytes = number + 1, 0
        result[fqn] = number
        nbytes += size
    return result


def _output_file(tensors: Sequence[ExportTensor], name: str) -> OutputFile:
    # Wide elements first: every tensor is then aligned to its elements, which readers that map the file need.
    ordered = tuple(sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype]))
    entries = []
    nbytes = 0
    for tensor in ordered:
        entries.append((tensor.fqn, tensor.dtype, tensor.stored.shape))
        nbytes += tensor.nbytes
    header, _ = build_header(entries, {"format": "pt"})
    return OutputFile(name, header, len(header) + nbytes, ordered)
