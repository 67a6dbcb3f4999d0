"""The files of a checkpoint of DeepSpeed: which ranks wrote them, and what they contain. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.parts.slices import (
    Slice,
    Tensor,
    counts,
    row_major_boxes,
    shape_fault,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import check_no_links, unusable
from automodel_ckpt.convert.formats.files import check_regular_files, faults_of, names_in
from automodel_ckpt.convert.formats.torch.torch_files import (
    is_text_name,
    read_archive,
    tensor_of_view,
)
from automodel_ckpt.convert.formats.torch.torch_objects import Opaque, StoredView
from automodel_ckpt.errors import CheckpointUnusable

_RANK_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_(model|optim)_states\.pt",
    re.ASCII,
)
# Files of models that are divided in another way than by ZeRO: by layer, or by expert.
_OTHER_FILE = re.compile(
    r"layer_[0-9]+-model.*_states\.pt"
    r"|(layer_-?[0-9]+_)?expert_[0-9]+_mp_rank_.*_states\.pt|expp_rank_.*_states\.pt",
    re.ASCII,
)
_STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
_MAX_DIMENSIONS = 64
_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_LISTED = 8
NOT_PRINTABLE = "a name of the model is not printable text"

Shape = tuple[int, ...]


def is_tag_directory(path: Path) -> bool:
    """Return whether the directory *path* has files of DeepSpeed's model or optimizer states, by their names."""
    return any(_RANK_FILE.fullmatch(name) for name in names_in(path))


class RankFiles:
    """The names of the files in a tag's directory by rank: those of *model* states, and those of *optimizer* states.

    With *is_partitioned* (ZeRO stage 3), the files of the model's states contain parts of parameters, one file for
    each rank; otherwise there is one file for all ranks.
    """

    def __init__(self, tag: Path) -> None:
        self.model: dict[int, str] = {}
        self.optimizer: dict[int, str] = {}
        self.is_partitioned = False
        for name in names_in(tag):
            if _OTHER_FILE.fullmatch(name):
                raise divided_error(tag, "pipeline or expert parallelism", name)
            match = _RANK_FILE.fullmatch(name)
            if match is None:
                continue
            if int(match[2]):
                raise divided_error(tag, "tensor parallelism", name)
            files = self.model if match[3] == "model" else self.optimizer
            rank = int(match[1] or 0)
            if rank in files:
                raise unusable(
                    f"two files claim to be those of rank {rank}", tag, f"{files[rank]}, {name}"
                )
            files[rank] = name
            self.is_partitioned |= files is self.model and match[1] is not None
        if 0 not in self.model:
            raise unusable(
                "the file of the model's states is missing", tag, "no mp_rank_00_model_states.pt"
            )
        used = [*self.model.values(), *self.optimizer.values()]
        check_no_links(tag, used)
        check_regular_files(tag, used)


def divided_error(path: Path, kind: str, value: object) -> CheckpointUnusable:
    return unusable(
        f"a checkpoint of DeepSpeed with {kind} cannot be read",
        path,
        value,
        "convert it to Hugging Face files or to one file of torch.save with the program that trained it, "
        "and use that",
    )


def check_ranks(ranks: Collection[int], num_ranks: int, tag: Path) -> None:
    """Raise :class:`CheckpointUnusable` unless *ranks* are those from 0 to *num_ranks* - 1."""
    # Counted first: a damaged file could claim any number of ranks.
    if len(ranks) == num_ranks == max(ranks) + 1:
        return
    listed = ", ".join(map(str, sorted(ranks)[:_MAX_LISTED]))
    raise unusable(
        f"files of some of the {counted(num_ranks, 'rank')} are missing, or of more ranks are here",
        tag,
        f"files of {counted(len(ranks), 'rank')}: {listed}",
        "copy the files of all ranks into this directory: each node may have written its own",
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """*length* consecutive elements of a flat vector, stored at byte *start* of *file*."""

    dtype: str
    file: str
    start: int
    length: int


Vector = Sequence[Segment]
"""A flat vector: the concatenation of segments, which all have the same dtype."""


class StateFile:
    """The mapping in one file. Its methods raise :class:`CheckpointUnusable`, which names the file."""

    def __init__(self, tag: Path, name: str) -> None:
        self.name = name
        self.path = tag / name
        self._archive = read_archive(self.path)
        self.value: Any = self._archive.value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return the mapping under *key*, whose keys are names of tensors; an empty one if it is None or absent."""
        found = self.value.get(key) if isinstance(self.value, dict) else self.value
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise unusable(f"the file has no mapping {key!r}", self.path, type(found).__name__)
        for name in found:
            if not is_text_name(name):
                raise unusable(NOT_PRINTABLE, self.path, repr(name)[:200])
        return found

    def segment(self, what: str, view: Any) -> Segment:
        """Return the flat tensor *view* as a segment. *what* is its name in errors."""
        is_flat = (
            isinstance(view, StoredView) and len(view.shape) == 1 and not view.num_outer_dimensions
        )
        if not is_flat or view.dtype not in _FLOATS:
            raise unusable(f"{what} is not a flat tensor of floats", self.path, repr(view)[:200])
        stored = self.tensor(what, view)
        start = stored.slices[0].start if stored.slices else 0
        return Segment(view.dtype, self.name, start, view.shape[0])

    def tensor(self, fqn: str, view: StoredView) -> Tensor:
        """Return a complete tensor as slices of this file."""
        with faults_of(self.path):
            return tensor_of_view(fqn, view, self._archive, self.name)


def shapes_in(states: StateFile, mapping: Any) -> dict[str, Shape]:
    """Return the names and shapes of *mapping*, such as ``param_shapes``."""
    found = {}
    for name, extents in mapping.items() if isinstance(mapping, dict) else ():
        shape = counts(extents)
        if (
            not is_text_name(name)
            or shape is None
            or len(shape) > _MAX_DIMENSIONS
            or shape_fault(shape)
        ):
            raise unusable(
                "the shape of a parameter is damaged",
                states.path,
                f"{name!r:.200}: {extents!r:.200}",
            )
        found[name] = shape
    return found


def length_of(vector: Vector) -> int:
    """Return the number of elements of *vector*."""
    return sum(segment.length for segment in vector)


def slices_of(
    vector: Vector, fqn: str, shape: Shape, elements: range, position: int
) -> Iterator[Slice]:
    """Yield the slices that the row-major *elements* of a tensor make up; the first is element *position* of *vector*.

    A range of elements of a row-major tensor is a few boxes, each of which is contiguous in the vector.
    """
    first, begin = elements.start, 0
    for segment in vector:
        end = begin + segment.length
        if position < end and first < elements.stop:
            itemsize = DTYPE_BITS[segment.dtype] // 8
            num_elements = min(end - position, elements.stop - first)
            start = segment.start + (position - begin) * itemsize
            for box in row_major_boxes(shape, first, first + num_elements):
                nbytes = box.numel * itemsize
                where = (box.offsets, box.sizes, segment.file, start, nbytes)
                yield Slice(fqn, segment.dtype, *where)
                start += nbytes
            first += num_elements
            position += num_elements
        begin = end


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's part of the parameters: a segment for each group, and the number of ranks that share the groups.

    *paddings* has the elements after each parameter that belong to none, for each group, and *places* where the file
    states that parameters are, for each group. Both are as stored.
    """

    path: Path
    facts: tuple[object, ...]
    stage: int | None
    segments: Sequence[Segment]
    num_ranks: int
    paddings: Any
    places: Any

    def place_of(self, index: int) -> Iterator[tuple[str, int, int]]:
        """Yield (name, first element, number of elements) of the parameters in segment *index*, if they are stated."""
        groups = self.places if isinstance(self.places, (list, tuple)) else ()
        group = groups[index] if index < len(groups) else None
        for name, address in group.items() if isinstance(group, dict) else ():
            if isinstance(address, Opaque):
                place = counts([address.get("start"), address.get("numel")])
                if place is not None:
                    yield name, place[0], place[1]


def read_partition(tag: Path, name: str) -> Partition:
    """Read the file *name* of a rank's optimizer states. Raises :class:`CheckpointUnusable` if it is damaged."""
    file = StateFile(tag, name)
    with faults_of(file.path, "this rank's part of the parameters cannot be read"):
        state = file.mapping("optimizer_state_dict")
        # An optimizer without ZeRO (BF16_Optimizer) states no stage.
        stage = state.get("zero_stage")
        if isinstance(stage, Opaque) and stage.kind == _STAGE_ENUM:
            (stage,) = stage.arguments
        if stage is not None and (type(stage) is not int or stage not in (0, 1, 2, 3)):
            raise Fault(f"the stage of ZeRO is unknown: {stage!r:.100}")
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        segments = [file.segment(key, group) for group in state[key]]
        if len({segment.dtype for segment in segments}) != 1:
            raise Fault(f"{key} is empty, or has several dtypes")
        count = state["partition_count"]
        numbers = counts(count if isinstance(count, (list, tuple)) else [count])
        if not numbers:
            raise Fault(f"the number of ranks (partition_count) is missing: {count!r:.100}")
        if len(set(numbers)) > 1 or state.get("ds_zero_partition_groups"):
            # Parameters of experts are divided among fewer ranks than the others.
            raise divided_error(file.path, "expert parallelism", f"partition_count {count!r:.100}")
    paddings, places = state.get("param_alignment_paddings"), state.get("param_slice_mappings")
    # What all ranks have in common.
    facts = (stage, numbers[0], len(segments), segments[0].dtype, paddings)
    return Partition(file.path, facts, stage, segments, numbers[0], paddings, places)
