"""The files of a checkpoint of DeepSpeed: which ranks wrote them, and what they contain. Imports no torch.

A tag's directory has a file of the model's states for each model-parallel rank (with ZeRO stage 3: for each rank), and
a file of the optimizer's states for each rank. All are files of ``torch.save``, read as descriptions: the classes of
DeepSpeed in them (LossScaler, fragment_address, ZeroStageEnum) are never imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.slices import Tensor, counts
from automodel_ckpt.checkpoint.parts.tiling import shape_fault
from automodel_ckpt.checkpoint.sources.source import check_no_links, unusable
from automodel_ckpt.convert.formats.files import check_regular_files, names_in
from automodel_ckpt.convert.formats.torch.flat_vector import Segment
from automodel_ckpt.convert.formats.torch.torch_files import (
    check_view,
    faults_of,
    read_archive,
    tensor_of_view,
)
from automodel_ckpt.convert.formats.torch.torch_objects import Opaque, StoredView, has_tensor
from automodel_ckpt.errors import CheckpointUnusable

_OPTIMIZER_FILE = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt", re.ASCII
)
_MODEL_FILE = re.compile(
    r"(zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_model_states\.pt", re.ASCII
)
# Files of models that are divided in another way than by ZeRO.
_PIPELINE_FILE = re.compile(r"layer_[0-9]+-model.*_states\.pt", re.ASCII)
_EXPERT_FILE = re.compile(
    r"(layer_-?[0-9]+_)?expert_[0-9]+_mp_rank_.*_states\.pt|expp_rank_.*_states\.pt", re.ASCII
)
_HINT = (
    "convert it to Hugging Face files or to one file of torch.save with the program that trained it, "
    "and use that"
)
_STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
_MAX_DIMENSIONS = 64
_MAX_LISTED = 8
_FLOATS = ("F64", "F32", "F16", "BF16")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The names of the files in a tag's directory, by rank.

    With *is_partitioned* (ZeRO stage 3), the files of the model's states contain parts of parameters, one file for
    each rank; otherwise there is one file for all ranks.
    """

    model: Mapping[int, str]
    optimizer: Mapping[int, str]
    is_partitioned: bool


def is_tag_directory(path: Path) -> bool:
    """Return whether the directory *path* has files of DeepSpeed's model or optimizer states, by their names."""
    names = names_in(path)
    return any(_MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name) for name in names)


def rank_files(directory: Path) -> RankFiles:
    """Return the files in *directory* by rank.

    Raises :class:`CheckpointUnusable` if the model was divided by tensor, pipeline or expert parallelism, if there is
    no file of the model's states, or if a rank has two files.
    """
    names = names_in(directory)
    model: dict[int, str] = {}
    optimizer: dict[int, str] = {}
    kinds: set[bool] = set()
    for name in names:
        _check_parallelism(directory, name)
        if match := _MODEL_FILE.fullmatch(name):
            kinds.add(match[1] is not None)
            _add(model, int(match[2] or 0), name, directory)
        elif match := _OPTIMIZER_FILE.fullmatch(name):
            _add(optimizer, int(match[1]), name, directory)
    if 0 not in model:
        raise unusable(
            "the file of the model's states is missing", directory, "no mp_rank_00_model_states.pt"
        )
    if len(kinds) > 1:
        raise unusable(
            "the directory has the model's states of ZeRO stage 3 and of another stage",
            directory,
            ", ".join(sorted(model.values())[:_MAX_LISTED]),
        )
    used = [*model.values(), *optimizer.values()]
    check_no_links(directory, used)
    check_regular_files(directory, used)
    return RankFiles(model, optimizer, kinds.pop())


def _add(files: dict[int, str], rank: int, name: str, directory: Path) -> None:
    if rank in files:
        value = f"{files[rank]}, {name}"
        raise unusable(f"two files claim to be those of rank {rank}", directory, value)
    files[rank] = name


def _check_parallelism(directory: Path, name: str) -> None:
    """Raise :class:`CheckpointUnusable` for a file of a model that was divided by more than ZeRO."""
    kind = ""
    match = _MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name)
    # The last group of both patterns is the rank of tensor parallelism.
    if match is not None and int(match[match.re.groups]) > 0:
        kind = "tensor parallelism (mp_rank above 00)"
    elif _PIPELINE_FILE.fullmatch(name):
        kind = "pipeline parallelism (a file for each layer)"
    elif _EXPERT_FILE.fullmatch(name):
        kind = "expert parallelism (a file for each expert)"
    if kind:
        raise parallelism_error(directory, kind, name)


def parallelism_error(path: Path, kind: str, value: object) -> CheckpointUnusable:
    """Return the error for a model that was divided by another kind of parallelism than ZeRO."""
    return CheckpointUnusable(
        f"a checkpoint of DeepSpeed with {kind} cannot be read",
        where=str(path),
        value=value,
        hint=_HINT,
    )


class StateFile:
    """The mapping in one rank's file. Its methods raise :class:`CheckpointUnusable`, which names the file."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.path = directory / name
        self._archive = read_archive(self.path)
        self.value = self._archive.value

    def mapping(self, key: str, value: Any = None) -> dict[Any, Any]:
        """Return the mapping under *key* of *value*, or of the file's own mapping."""
        outer = self.value if value is None else value
        found = outer.get(key) if isinstance(outer, dict) else None
        if not isinstance(found, dict):
            raise unusable(f"the file has no mapping {key!r}", self.path, type(found).__name__)
        return found

    def optional_mapping(self, key: str) -> dict[Any, Any]:
        """Return the mapping under *key* of the file's own mapping, or an empty one if it is None or absent."""
        if not isinstance(self.value, dict) or self.value.get(key) is None:
            return {}
        return self.mapping(key)

    def segment(self, what: str, view: Any) -> Segment:
        """Return the flat tensor *view* as a segment. *what* is its name in errors."""
        if not isinstance(view, StoredView):
            raise unusable(f"{what} is not a tensor", self.path, type(view).__name__)
        with faults_of(self.path):
            check_view(what, view, self._archive)
        is_contiguous = view.strides == (1,) or math.prod(view.shape) <= 1
        is_flat = len(view.shape) == 1 and is_contiguous
        if not is_flat or view.dtype not in _FLOATS:
            found = f"{view.dtype} of shape {list(view.shape)}"
            raise unusable(f"{what} is not a flat tensor of floats", self.path, found)
        begin, _ = self._archive.storages[view.key]
        start = begin + view.offset * DTYPE_BITS[view.dtype] // 8
        return Segment(view.dtype, self.name, start, view.shape[0])

    def tensor(self, fqn: str, view: StoredView, file: str | None = None) -> Tensor:
        """Return a complete tensor as slices of this file, or of *file* if it has another path below the root."""
        with faults_of(self.path):
            check_view(fqn, view, self._archive)
            return tensor_of_view(fqn, view, self._archive, file or self.name)

    def views(self, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, StoredView]]:
        """Yield the tensors of *mapping* by name. Values that are not tensors, such as extra state, are left out."""
        for key, item in mapping.items():
            if isinstance(item, StoredView):
                yield self.checked_name(key), item
            elif has_tensor(item):
                kind = item.kind if isinstance(item, Opaque) else type(item).__name__
                what = "a tensor of the model is of a class that is not read"
                raise unusable(what, self.path, f"{key!r:.200}: {kind}")

    def shapes(self, mapping: Any) -> Iterator[tuple[str, Shape]]:
        """Yield the names and shapes of *mapping*, such as ``param_shapes``."""
        if not isinstance(mapping, dict):
            raise unusable("the shapes of the parameters are missing", self.path, type(mapping))
        for key, item in mapping.items():
            name = self.checked_name(key)
            shape = counts(item)
            if shape is None or len(shape) > _MAX_DIMENSIONS:
                raise unusable(f"the shape of {name!r} is damaged", self.path, repr(item)[:200])
            if fault := shape_fault(shape):
                raise unusable(f"the shape of {name!r} is damaged", self.path, fault)
            yield name, shape

    def checked_name(self, key: Any) -> str:
        """Return *key*, the name of a tensor. A lone surrogate would fail much later, when the name is written."""
        if not isinstance(key, str) or not key.isprintable():
            what = "a name of the model is not printable text"
            raise unusable(what, self.path, repr(key)[:200])
        return key


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's part of the parameters: a segment for each group, and the number of ranks that share the group.

    *addresses* has, for each group, {name: (number of elements, first element in this rank's segment)} of the
    parameters of which this rank has a part, where the file states them. *paddings* are the numbers of elements after
    each parameter that belong to none.
    """

    file: StateFile
    stage: int | None
    num_partitions: int
    segments: tuple[Segment, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    addresses: tuple[Mapping[str, tuple[int, int]], ...]


def read_partition(directory: Path, name: str) -> Partition:
    """Read the description of one rank's part of the parameters in its file of optimizer states."""
    file = StateFile(directory, name)
    state = file.mapping("optimizer_state_dict")
    stage = _stage(state, file)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    groups = state.get(key)
    if not isinstance(groups, (list, tuple)):
        raise unusable(f"the file has no list {key!r}", file.path, type(groups).__name__)
    segments: list[Segment] = []
    for group in groups:
        segments.append(file.segment(key, group))
    return Partition(
        file,
        stage,
        _num_partitions(state, file),
        tuple(segments),
        _paddings(state, file),
        tuple(_addresses(state)),
    )


def _stage(state: Mapping[Any, Any], file: StateFile) -> int | None:
    """Return the stage of ZeRO; None for an optimizer without ZeRO (BF16_Optimizer), which states none."""
    value = state.get("zero_stage")
    if isinstance(value, Opaque) and value.kind == _STAGE_ENUM and len(value.arguments) == 1:
        value = value.arguments[0]
    if value is not None and (type(value) is not int or value not in (0, 1, 2, 3)):
        raise unusable("the stage of ZeRO is unknown", file.path, repr(value)[:100])
    return value


def _num_partitions(state: Mapping[Any, Any], file: StateFile) -> int:
    value = state.get("partition_count")
    numbers = counts(value if isinstance(value, (list, tuple)) else [value])
    if not numbers:
        what = "the number of ranks (partition_count) is missing"
        raise unusable(what, file.path, repr(value)[:100])
    if len(set(numbers)) > 1 or state.get("ds_zero_partition_groups"):
        # Parameters of experts are divided among fewer ranks than the others.
        kind = "expert parallelism (groups with different numbers of ranks)"
        raise parallelism_error(file.path, kind, f"partition_count {list(numbers)[:_MAX_LISTED]}")
    return numbers[0]


def _paddings(state: Mapping[Any, Any], file: StateFile) -> tuple[tuple[int, ...], ...] | None:
    value = state.get("param_alignment_paddings")
    if value is None:
        return None
    found: list[tuple[int, ...]] = []
    for group in value if isinstance(value, (list, tuple)) else [None]:
        paddings = counts(group)
        if paddings is None:
            what = "the paddings of the parameters are damaged"
            raise unusable(what, file.path, repr(value)[:200])
        found.append(paddings)
    return tuple(found)


def _addresses(state: Mapping[Any, Any]) -> Iterator[Mapping[str, tuple[int, int]]]:
    """Yield, for each group, what DeepSpeed states about the place of each parameter in this rank's part."""
    groups = state.get("param_slice_mappings")
    for group in groups if isinstance(groups, (list, tuple)) else ():
        found: dict[str, tuple[int, int]] = {}
        for name, address in group.items() if isinstance(group, dict) else ():
            fields = address.state if isinstance(address, Opaque) else None
            if not isinstance(fields, dict):
                continue
            place = counts([fields.get("numel"), fields.get("start")])
            if place is not None:
                found[name] = (place[0], place[1])
        yield found


def check_partitions(partitions: Mapping[int, Partition], directory: Path) -> None:
    """Raise :class:`CheckpointUnusable` unless the files of all ranks are there, and agree with each other."""
    first = next(iter(partitions.values()))
    for partition in partitions.values():
        mine = (partition.stage, partition.num_partitions, len(partition.segments))
        theirs = (first.stage, first.num_partitions, len(first.segments))
        if mine != theirs:
            what = "ranks disagree on the stage of ZeRO, the number of ranks or of groups"
            value = f"{mine}, not {theirs} as in {first.file.name}"
            raise unusable(what, partition.file.path, value)
        dtypes = {segment.dtype for segment in (*first.segments, *partition.segments)}
        if len(dtypes) > 1:
            what = "the parts of the parameters have several dtypes"
            raise unusable(what, partition.file.path, ", ".join(sorted(dtypes)))
        if partition.paddings != first.paddings:
            what = "ranks disagree on the paddings of the parameters"
            raise unusable(what, partition.file.path, f"as in {first.file.name}")
    check_ranks(partitions, first.num_partitions, directory)


def check_ranks(ranks: Mapping[int, object], num_ranks: int, directory: Path) -> None:
    """Raise :class:`CheckpointUnusable` unless *ranks* are those from 0 to *num_ranks* - 1."""
    # Ranges are compared, not listed: a damaged file could claim any number of ranks.
    extra = sorted(rank for rank in ranks if rank >= num_ranks)
    if extra:
        what = f"the checkpoint is of {counted(num_ranks, 'rank')}, and there are files of more"
        raise unusable(what, directory, f"rank {extra[0]}")
    if len(ranks) == num_ranks:
        return
    missing: list[str] = []
    for rank in range(num_ranks):
        if len(missing) == _MAX_LISTED:
            missing.append("...")
            break
        if rank not in ranks:
            missing.append(str(rank))
    raise CheckpointUnusable(
        f"files of {num_ranks - len(ranks)} of {num_ranks} ranks are missing",
        where=str(directory),
        value=f"rank {', '.join(missing)}",
        hint="copy the files of all ranks into this directory: each node may have written its own",
    )
