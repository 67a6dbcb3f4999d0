"""Planning an export as Hugging Face files. Pure functions: no file is opened.

The plan determines the content of an export: names, dtypes, files, headers, and the offset of every tensor.
``consolidate.py`` determines which bytes of which slices fill a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from automodel_ckpt.base.units import counted_are, some_of
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS, ORDINARY_FLOATS, dtype_code
from automodel_ckpt.checkpoint.files.safetensors_header import build_header
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Texts
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorDict, TensorMap, nbytes_of
from automodel_ckpt.errors import RecipeError, unusable

_MAX_FILE_BYTES = 5_000_000_000
_NUM_SHOWN = 5
_SHORT_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}


@dataclass(frozen=True)
class BaseMaps:
    """The file (from 1), dtype and shape of each tensor of the base model; None when unknown.

    For an adapter, they describe the adapter, which is a single file.
    """

    file_index: Mapping[str, int] | None = None
    dtype: Texts | None = None
    shape: Mapping[str, Shape] | None = None
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


@dataclass(frozen=True)
class ExportTensor:
    """A tensor of the export: its name, the stored tensor that it is made from, and its dtype in the export."""

    fqn: str
    stored: Tensor
    dtype: str

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.stored.shape)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Plan:
    """The files to write; *warnings* are for the user."""

    files: tuple[OutputFile, ...]
    warnings: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[ExportTensor]:
        return [tensor for file in self.files for tensor in file.tensors]

    @property
    def casts(self) -> dict[tuple[str, str], int]:
        """The number of tensors that change their dtype, by (from, to)."""
        dtypes = [(tensor.stored.dtype, tensor.dtype) for tensor in self.tensors]
        return dict(Counter(pair for pair in dtypes if pair[0] != pair[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of all output files, headers included."""
        return sum(file.nbytes for file in self.files)

    def index(self) -> bytes:
        """Return the content of ``model.safetensors.index.json``."""
        files = {tensor.fqn: file.name for file in self.files for tensor in file.tensors}
        total = sum(tensor.nbytes for tensor in self.tensors)
        document = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(files.items())),
        }
        return json.dumps(document, indent=2).encode() + b"\n"


def parse_cast_dtype(name: str | None) -> str | None:
    """Return the safetensors code of ``bf16``, ``fp16``, ``fp32``, ``fp64`` or a long name; None for no cast.

    Raises :class:`RecipeError` for any other name.
    """
    if not name:
        return None
    lower = name.lower().removeprefix("torch.")
    code = _SHORT_NAMES.get(lower) or dtype_code(lower)
    if code not in ORDINARY_FLOATS:
        raise RecipeError(
            "unknown dtype to cast to",
            where="--cast-dtype (CAST_DTYPE)",
            value=name,
            hint="one of bf16, fp16, fp32, fp64, bfloat16, float16, float32, float64",
        )
    return code


def make_plan(
    tensors: TensorMap,
    tied: Texts,
    maps: BaseMaps,
    *,
    cast_dtype: str | None = None,
    where: str = "",
) -> Plan:
    """Plan an export. Needs names, dtypes and shapes, but no slices.

    *tied* maps names that were not stored to stored names; *where* is for messages. Raises :class:`CheckpointUnusable`
    if names or shapes differ from the base.
    """
    stored = export_names(tensors, tied, maps, where)
    warnings = [
        f"{fqn} is left out: the shards lack it, and config.json ties it to the embedding"
        for fqn in sorted((maps.names or frozenset()) - stored.keys())
    ]
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
        files = [
            _output_file(group, f"model-{number:05}-of-{len(groups):05}.safetensors")
            for number, group in enumerate(groups, start=1)
        ]
    return Plan(tuple(files), tuple(warnings))


def export_names(tensors: TensorMap, tied: Texts, maps: BaseMaps, where: str) -> TensorDict:
    """Return the stored tensor of each name in the export: the names of the base if known, or else the stored ones.

    Without its shapes, the base's output layer is left out if it is not stored, but tied. Raises
    :class:`CheckpointUnusable` if names or shapes differ from the base.
    """
    if maps.names is None:
        return dict(tensors)
    groups = _tie_groups(tied)
    result = {}
    missing = []
    # Sorted: the order of a set of text differs between processes, and ranks that fill files
    # together must plan the same ones (formats/rank_files.py).
    for fqn in sorted(maps.names):
        # The same tensor can be stored under another of its tied names.
        stored_names = [name for name in groups.get(fqn, (fqn,)) if name in tensors]
        if stored_names:
            result[fqn] = tensors[stored_names[0]]
        elif not (
            maps.shape is None and maps.tie_word_embeddings and fqn.endswith("lm_head.weight")
        ):
            missing.append(fqn)
    extra = [fqn for fqn in tensors if not maps.names & {fqn, *groups.get(fqn, ())}]
    what, parts = "the tensors are not those that the base model has", []
    if missing:
        parts.append(f"missing: {some_of([*map(repr, missing)], _NUM_SHOWN)}")
    if extra:
        parts.append(f"not in the base: {some_of([*map(repr, extra)], _NUM_SHOWN)}")
    if not parts:
        for fqn, shape in (maps.shape or {}).items():
            if result[fqn].shape != shape:
                what = f"the tensor {fqn!r} has another shape than it should"
                parts = [f"{result[fqn].shape}, not {shape}"]
                break
    if parts:
        raise unusable(
            what,
            where,
            "; ".join(parts),
            "use another checkpoint; if the model was changed on purpose, .hf_metadata must describe the new one",
        )
    return result


def _tie_groups(tied: Texts) -> dict[str, list[str]]:
    """Return all names of the group of each tied name, the stored one first."""
    groups = {stored: [stored] for stored in tied.values()}
    for alias, stored in tied.items():
        groups[stored].append(alias)
    return {name: group for group in groups.values() for name in group}


def _dtype(fqn: str, tensor: Tensor, maps: BaseMaps, cast_dtype: str | None) -> str:
    """Return the dtype of an exported tensor. Only ordinary floats are cast, and only to ordinary floats.

    Tensors that the model keeps in float32 among others of the dtype *cast_dtype* stay so.
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
    """Return the tensors that are quantized or packed in the base."""
    originals = maps.dtype or {}
    return [t for t in exported if originals.get(t.fqn, "F32") not in ORDINARY_FLOATS]


def _quantized_warnings(exported: Sequence[ExportTensor], maps: BaseMaps) -> list[str]:
    found = [t.fqn for t in quantized_in_base(exported, maps) if t.dtype in ORDINARY_FLOATS]
    if not found:
        return []
    number = counted_are(len(found), "tensor")
    stay = "it stays" if len(found) == 1 else "they stay"
    return [
        f"{number} quantized in the base and float here; {stay} float: {some_of([*map(repr, found)], _NUM_SHOWN)}"
    ]


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
    result = {}
    for fqn, size in sizes.items():
        if nbytes and nbytes + size > _MAX_FILE_BYTES:
            number, nbytes = number + 1, 0
        result[fqn] = number
        nbytes += size
    return result


def _output_file(tensors: Sequence[ExportTensor], name: str) -> OutputFile:
    # Wide elements first: every tensor is then aligned to its elements, which readers that map the file need.
    ordered = tuple(sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype]))
    entries = [(tensor.fqn, tensor.dtype, tensor.stored.shape) for tensor in ordered]
    nbytes = sum(tensor.nbytes for tensor in ordered)
    header, _ = build_header(entries, {"format": "pt"})
    return OutputFile(name, header, len(header) + nbytes, ordered)


def main_dtype(tensors: Iterable[tuple[str, int]]) -> str | None:
    """The ordinary float dtype of most elements of tensors (code, bytes); None where there is none."""
    numels: Counter[str] = Counter()
    for code, nbytes in tensors:
        if code in ORDINARY_FLOATS:
            numels[code] += nbytes * 8 // DTYPE_BITS[code]
    return max(numels, key=lambda code: numels[code], default=None)
