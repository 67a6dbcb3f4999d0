"""Weights in checkpoints of DeepSpeed: ZeRO stages 1, 2 and 3, the weights of stage 0, and universal checkpoints.

A run's directory has the file ``latest``, which names the directory of the newest save (its tag). With ZeRO, the
float32 master weights are in the ranks' files of optimizer states (source: deepspeed/utils/zero_to_fp32.py, 0.19):

* Stages 1 and 2: the parameters of a group are concatenated in the order of ``param_shapes``, padded at the end, and
  each rank has a range of the result.
* Stage 3: every parameter is padded and divided among the ranks, and each rank has the concatenation of its parts.

Everything else of the model is in the files of model states: buffers, frozen parameters, names of tied parameters, and
the weights in the dtype that computed them, which are used without files of optimizer states. DeepSpeed's conversion
to a universal checkpoint writes a directory ``zero/`` with a file for each parameter. All are files of ``torch.save``,
read as descriptions: the classes of DeepSpeed in them are never imported. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted, some_of
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import Shape, ValueDict
from automodel_ckpt.checkpoint.parts.slices import (
    Slice,
    Tensor,
    TensorDict,
    counts,
    row_major_boxes,
    shape_fault,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    config_beside,
    faults_of,
    names_in,
    renamed,
    tiled,
)
from automodel_ckpt.convert.formats.format import Counters, Format
from automodel_ckpt.convert.formats.torch.torch_files import (
    is_text_name,
    plain_names,
    read_archive,
    tensor_of_view,
)
from automodel_ckpt.convert.formats.torch.torch_objects import Opaque, StoredView, has_tensor
from automodel_ckpt.errors import CheckpointUnusable, unusable

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_ZERO = "zero"
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
_CONVERTER = "Convert it with the zero_to_fp32.py beside the checkpoint"
_STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
_ALL_RANKS = "copy the files of all ranks into this directory: each node may have written its own"
_MAX_TAG_BYTES = 1024
_MAX_DIMENSIONS = 64
_MAX_LISTED = 8
_FLOATS = ("F64", "F32", "F16", "BF16")
# What the files of model states have for the model itself.
_MODEL_KEYS = {
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
    "num_experts",
    "ds_autoep_layers",
}

Shapes = dict[str, Shape]
Vector = Sequence[Tensor]
"""A flat vector: the concatenation of tensors of one dimension and one dtype."""


class DeepSpeed(Format):
    """A run of DeepSpeed (``latest`` and the directories of tags), or the directory of one tag."""

    name = "DeepSpeed"
    has_own_names = True

    def detect(self, path: Path) -> bool:
        names = names_in(path)
        if LATEST not in names and LATEST_UNIVERSAL not in names:
            return _is_tag(path)
        places = [path, *(path / name for name in names if not (path / name).is_symlink())]
        return any(map(_is_tag, places))

    def open(self, path: Path) -> Source:
        """Describe the model. Links are never followed: DeepSpeed writes all files to one directory."""
        return _Model(_tag_directory(path)).source(path)

    def counters(self, path: Path) -> Counters:
        tag = _tag_directory(path)
        stated = _StateFile(tag, _rank_files(tag)[0][0]).value
        return Counters.of(*map(stated.get, ("global_steps", "epoch", "global_samples")))

    def training_left(self, path: Path) -> str:
        return "only the weights of DeepSpeed's files are read"

    def parts(self, path: Path) -> frozenset[str]:
        try:
            tag = _tag_directory(path)
        except CheckpointUnusable:
            return frozenset()
        return frozenset() if tag == path else frozenset({tag.name})


def _is_tag(path: Path) -> bool:
    return any(map(_RANK_FILE.fullmatch, names_in(path)))


def _tag_directory(path: Path) -> Path:
    """Return the directory of the save that *path* is, or that its file ``latest`` names."""
    if _is_tag(path):
        return path
    pointer = LATEST if LATEST in names_in(path) else LATEST_UNIVERSAL
    with faults_of(path / pointer, "this file does not name the directory of a save beside it"):
        tag = read_safely(path, pointer, limit=_MAX_TAG_BYTES).decode().strip()
        # The tag is a name in this directory. Nothing outside of it is read.
        is_name = tag.isprintable() and "/" not in tag and tag not in ("", ".", "..")
        if not is_name or (path / tag).is_symlink() or not _is_tag(path / tag):
            raise Fault(
                f"{tag[:200]!r}: name the directory of another save, such as global_step100"
            )
    return path / tag


def _rank_files(tag: Path) -> tuple[dict[int, str], dict[int, str], bool]:
    """Return the files of model states and of optimizer states by rank, and whether the model is partitioned.

    If it is (ZeRO stage 3), the files of model states contain parts of parameters, one file for each rank. Otherwise
    there is one file for all ranks.
    """
    files: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    is_partitioned = False
    for name in names_in(tag):
        if _OTHER_FILE.fullmatch(name):
            raise _divided(tag, "pipeline or expert parallelism", name)
        match = _RANK_FILE.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise _divided(tag, "tensor parallelism", name)
        rank = int(match[1] or 0)
        if files[match[3]].setdefault(rank, name) != name:
            raise unusable(f"two files claim to belong to rank {rank}", tag, name)
        is_partitioned |= match[3] == "model" and match[1] is not None
    model, optimizer = files["model"], files["optim"]
    if 0 not in model:
        raise unusable("the file of the model's states is missing", tag, "no rank 0")
    check_regular_files(tag, [*model.values(), *optimizer.values()])
    return model, optimizer, is_partitioned


def _divided(path: Path, kind: str, value: object) -> CheckpointUnusable:
    return unusable(
        f"a checkpoint of DeepSpeed with {kind} cannot be read",
        path,
        value,
        "convert it to Hugging Face files or to one file of torch.save with the program that trained it",
    )


def _check_ranks(ranks: Collection[int], num_ranks: int, tag: Path) -> None:
    """Raise :class:`CheckpointUnusable` unless *ranks* are the ranks from 0 to *num_ranks* - 1."""
    # Counted: a damaged file could claim any number of ranks.
    if not len(ranks) == num_ranks == max(ranks) + 1:
        raise unusable(
            f"files of some of the {counted(num_ranks, 'rank')} are missing, or of more ranks are here",
            tag,
            f"files of {counted(len(ranks), 'rank')}: {some_of([*map(str, sorted(ranks))], _MAX_LISTED)}",
            _ALL_RANKS,
        )


class _StateFile:
    """The mapping in one file. Its methods raise :class:`CheckpointUnusable`, which names the file."""

    def __init__(self, tag: Path, name: str) -> None:
        self.name = name
        self.path = tag / name
        self._archive = read_archive(self.path)
        self.value: Any = self._archive.value
        if not isinstance(self.value, dict | StoredView):
            raise unusable("this file has no states", self.path, type(self.value).__name__)

    def mapping(self, key: str) -> ValueDict:
        """Return the mapping of names of tensors under *key*. Empty if it is None or absent."""
        found = self.value.get(key) if isinstance(self.value, dict) else None
        if not isinstance(found, dict | None) or not all(map(is_text_name, found or ())):
            raise unusable(
                f"the file has no mapping {key!r} with printable names",
                self.path,
                repr(found)[:200],
            )
        return found or {}

    def flat(self, what: str, view: Any) -> Tensor:
        """Return a tensor of one dimension. *what* is its name in errors."""
        is_view = isinstance(view, StoredView) and view.dtype in _FLOATS
        if not is_view or len(view.shape) != 1 or view.num_outer_dimensions:
            raise unusable(f"{what} is not a flat tensor of floats", self.path, repr(view)[:200])
        return self.tensor(what, view)

    def tensor(self, fqn: str, view: StoredView) -> Tensor:
        """Return a complete tensor as slices of this file."""
        with faults_of(self.path):
            return tensor_of_view(fqn, view, self._archive, self.name)

    def shapes(self, mapping: Any) -> Shapes:
        """Return the names and shapes of *mapping*, such as ``param_shapes``."""
        found = {}
        with faults_of(self.path, "the shape of a parameter is damaged"):
            for name, extents in mapping.items():
                shape = counts(extents)
                is_usable = shape is not None and len(shape) <= _MAX_DIMENSIONS
                if shape is None or not is_usable or shape_fault(shape) or not is_text_name(name):
                    raise Fault(f"{name!r:.200}: {extents!r:.200}")
                found[name] = shape
        return found


@dataclass(frozen=True)
class _Partition:
    """One rank's part of the parameters, in the file *path*: a flat tensor for each group.

    All ranks have the same *stage*, and the same *num_ranks* share the groups. *places* has where the file states that
    parameters are, for each group, as stored.
    """

    path: Path
    stage: int
    num_ranks: int
    parts: Sequence[Tensor]
    places: Any


def _read_partition(tag: Path, name: str) -> _Partition:
    """Return one rank's part of the parameters. Raises :class:`CheckpointUnusable` if the file is damaged."""
    file = _StateFile(tag, name)
    with faults_of(file.path, "this rank's part of the parameters cannot be read"):
        state = file.mapping("optimizer_state_dict")
        stage = state.get("zero_stage")
        if isinstance(stage, Opaque) and stage.kind == _STAGE_ENUM:
            (stage,) = stage.arguments
        if type(stage) is not int or stage not in (1, 2, 3):
            raise Fault(f"the stage of ZeRO is unknown: {stage!r:.100}. {_CONVERTER}")
        if any(map(any, state.get("param_alignment_paddings") or ())):
            raise Fault(f"parameters have paddings between them. {_CONVERTER}")
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        parts = [file.flat(key, group) for group in state[key]]
        count = state["partition_count"]
        numbers = counts(count if isinstance(count, (list, tuple)) else [count])
        if not parts or not numbers:
            raise Fault(f"{key} is empty, or there is no partition_count")
    if len(set(numbers)) > 1 or state.get("ds_zero_partition_groups"):
        # Parameters of experts are divided among fewer ranks than the others.
        raise _divided(file.path, "expert parallelism", f"partition_count {count!r:.100}")
    return _Partition(file.path, stage, numbers[0], parts, state.get("param_slice_mappings"))


# ---------------------------------------------------------------- the model


class _Model:
    """The model of the save in the directory *tag*: its tensors by name, notes, and what is left out, in words."""

    def __init__(self, tag: Path) -> None:
        self._tag = tag
        self._model_files, self._optimizer_files, self._is_partitioned = _rank_files(tag)
        self._states = states = _StateFile(tag, self._model_files[0])
        if not isinstance(states.value, dict) or "module" not in states.value:
            raise unusable("this file has no states of a model", states.path, "no module")
        # The model may be divided by more than ZeRO.
        for key, kind in (("mp_world_size", "tensor"), ("ds_autoep_layers", "expert")):
            if states.value.get(key) not in (None, 0, 1, (), [], {}):
                raise _divided(states.path, f"{kind} parallelism", key)
        self._tensors: TensorDict = {}
        self._tied = states.mapping("shared_params")
        self._omitted: list[str] = []
        with faults_of(tag, "this checkpoint of DeepSpeed cannot be read"):
            self._origin = self._add_parameters()
            self._add_rest()
            if not self._tensors:
                raise Fault("there are no parameters in it")

    def source(self, directory: Path) -> Source:
        """Return the description of the complete model."""
        tied = {
            name: stored
            for name, stored in self._tied.items()
            if name not in self._tensors and stored in self._tensors
        }
        names = plain_names(self._states.value, [*self._tensors, *tied])
        value = self._states.value
        present = [key for key in value if is_text_name(key) and value[key] is not None]
        others = [key[:40] for key in present if key not in _MODEL_KEYS]
        if others:
            self._omitted.append(f"other entries ({some_of(others, _MAX_LISTED)})")
        return Source(
            self._tag,
            directory,
            renamed(self._tensors, {fqn: names[fqn] for fqn in self._tensors}),
            tied={names[name]: names[stored] for name, stored in tied.items()},
            notes=(f"the weights are {self._origin}",),
            omitted=tuple(self._omitted),
            side_files=config_beside(directory),
        )

    # ---------------------------------------------------------------- parameters

    def _add_parameters(self) -> str:
        """Add the parameters that the optimizer trains. Returns which ones they are, in words."""
        shapes = self._states.value.get("param_shapes")
        num_ranks = len(self._optimizer_files)
        zero = self._tag / _ZERO
        if zero.is_dir() and not zero.is_symlink():
            self._add_universal(zero, self._groups(shapes))
            self._add_frozen(len(self._model_files))
            self._omitted.append("optimizer state (moments, steps) of each parameter")
            return "the float32 weights of a universal checkpoint"
        if num_ranks:
            ranks = counted(num_ranks, "rank")
            self._omitted.append(f"optimizer state of {ranks} (moments, steps, loss scale)")
        if num_ranks and shapes is not None:
            self._add_partitions(self._groups(shapes))
            self._add_frozen(num_ranks)
            return f"the optimizer's master weights, from the files of {ranks}"
        if self._is_partitioned:
            raise unusable(
                "the files with the parameters are missing: with ZeRO stage 3, only they have them",
                self._tag,
                "no *_optim_states.pt",
                _ALL_RANKS,
            )
        reason = "the run did not use ZeRO"
        if shapes is not None:
            reason = "there are no files with the optimizer's master weights (*_optim_states.pt)"
        return f"those that computed the model (module): {reason}"

    def _groups(self, value: Any) -> list[Shapes]:
        if not isinstance(value, (list, tuple)):
            raise Fault("the shapes of the parameters (param_shapes) are missing")
        return [self._states.shapes(group) for group in value]

    def _add_partitions(self, groups: Sequence[Shapes]) -> None:
        """Add the parameters of *groups*. Their values are in the ranks' files of optimizer states."""
        files = sorted(self._optimizer_files.items())
        ranks = [_read_partition(self._tag, name) for _, name in files]
        first = ranks[0]
        dtypes = {part.dtype for rank in ranks for part in rank.parts}
        for rank in ranks:
            facts = [(each.stage, each.num_ranks, len(each.parts)) for each in (rank, first)]
            if facts[0] != facts[1] or len(dtypes) > 1:
                raise Fault(
                    "ranks disagree on the stage of ZeRO, the number of ranks, groups, or dtypes: "
                    f"{rank.path.name}, {first.path.name}"
                )
        _check_ranks(self._optimizer_files, first.num_ranks, self._tag)
        if (first.stage == 3) != self._is_partitioned:
            raise Fault("the optimizer's and the model's states are of different stages of ZeRO")
        if first.stage == 3:
            # All groups follow one another in each rank's part.
            merged = [item for shapes in groups for item in shapes.items()]
            self._add_group(merged, [rank.parts for rank in ranks])
            return
        if len(groups) != len(first.parts):
            raise Fault(f"{len(groups)} groups of parameters, the optimizer has {len(first.parts)}")
        for index, shapes in enumerate(groups):
            _check_places(ranks, index)
            self._add_group(list(shapes.items()), [[rank.parts[index] for rank in ranks]])

    def _add_group(self, shapes: Iterable[tuple[str, Shape]], vectors: Sequence[Vector]) -> None:
        """Add parameters that follow one another in *vectors*.

        Each parameter is divided evenly among the vectors. The end of the last parts is padding.
        """
        position = 0
        dtype = vectors[0][0].dtype
        for fqn, shape in shapes:
            num_elements = math.prod(shape)
            share = -(-num_elements // len(vectors))
            slices: list[Slice] = []
            for rank, vector in enumerate(vectors):
                first = min(rank * share, num_elements)
                elements = range(first, min(first + share, num_elements))
                slices.extend(_slices(vector, fqn, shape, elements, position))
            self._add_tensor(tiled(fqn, dtype, shape, slices, self._tag))
            position += share
        # One vector is padded to twice the number of ranks, and that padding is stored only in part.
        unit = max(1, 2 * len(self._optimizer_files) if len(vectors) == 1 else 1)
        longest = max(sum(part.shape[0] for part in vector) for vector in vectors)
        if longest >= position + unit:
            raise Fault(
                f"the ranks' parts do not have the size of the parameters: {longest}, not {position}"
            )

    def _add_parts(self, fqn: str, shape: Shape, parts: Sequence[tuple[_StateFile, Any]]) -> None:
        """Add a parameter of which each file has a flat part, or one file a tensor of its shape."""
        file, view = parts[0]
        if len(parts) == 1 and isinstance(view, StoredView) and view.shape == shape:
            self._add_tensor(file.tensor(fqn, view))
            return
        flat = [file.flat(f"the part of the parameter {fqn!r}", view) for file, view in parts]
        share = -(-math.prod(shape) // len(flat))
        if any((each.dtype, each.shape) != (flat[0].dtype, (share,)) for each in flat):
            raise Fault(
                f"the parts of the parameter {fqn!r} do not have its size, or several dtypes"
            )
        self._add_group([(fqn, shape)], [[each] for each in flat])

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.fqn in self._tensors:
            raise Fault(f"the parameter {tensor.fqn!r} is stored twice")
        self._tensors[tensor.fqn] = tensor

    def _add_universal(self, zero: Path, groups: Sequence[Shapes]) -> None:
        """Add the parameters in ``zero/NAME/fp32.pt`` (source: deepspeed/checkpoint/ds_to_universal.py, 0.19).

        The conversion also writes buffers there, as float32 whatever they were. They are taken from ``module``.
        """
        # Compared with the listing: a name with a slash or ".." is never in it.
        names = set(names_in(zero))
        for fqn, shape in (item for shapes in groups for item in shapes.items()):
            if fqn not in names or (zero / fqn).is_symlink():
                raise Fault(f"the file of the parameter {fqn!r} is missing")
            file = _StateFile(self._tag, f"{_ZERO}/{fqn}/fp32.pt")
            view = file.value.get("param") if isinstance(file.value, dict) else file.value
            # Converted from ZeRO stage 3, it is flat.
            self._add_parts(fqn, shape, [(file, view)])

    def _add_frozen(self, num_ranks: int) -> None:
        """Add the parameters that the optimizer does not train.

        With stage 3, the model's states of each of *num_ranks* ranks have a part of them.
        """
        shapes = self._states.shapes(self._states.mapping("frozen_param_shapes"))
        if not shapes:
            return
        files = [self._states]
        if self._is_partitioned:
            _check_ranks(self._model_files, num_ranks, self._tag)
            others = (self._model_files[rank] for rank in range(1, num_ranks))
            files += [_StateFile(self._tag, name) for name in others]
        parts = [(file, file.mapping("frozen_param_fragments")) for file in files]
        for fqn, shape in shapes.items():
            self._add_parts(fqn, shape, [(file, views.get(fqn)) for file, views in parts])

    def _add_rest(self) -> None:
        """Add what only ``module`` has: buffers, and the parameters with data that is nowhere else."""
        states, module = self._states, self._states.mapping("module")
        buffers = states.value.get("buffer_names")
        for fqn, view in module.items():
            if not isinstance(view, StoredView):
                # Extra state is no tensor.
                if has_tensor(view):
                    kind = view.kind if isinstance(view, Opaque) else type(view).__name__
                    raise Fault(f"{fqn[:200]!r} is of a class that is not read: {kind}")
                continue
            stored = self._tensors.get(fqn)
            tied_to = self._tied.get(fqn)
            if stored is None and tied_to not in self._tensors and tied_to not in module:
                # With stage 3, a parameter is empty here, and has no data in this file. A buffer may be empty.
                is_buffer = isinstance(buffers, (list, tuple)) and fqn in buffers
                if self._is_partitioned and not is_buffer and view.shape == (0,):
                    raise Fault(f"the data of the parameter {fqn!r} is missing")
                self._add_tensor(states.tensor(fqn, view))
            elif stored is not None and not self._is_partitioned and stored.shape != view.shape:
                raise Fault(f"the shapes of {fqn!r} in param_shapes and module are different")


def _slices(
    vector: Vector, fqn: str, shape: Shape, elements: range, position: int
) -> Iterator[Slice]:
    """Yield the slices that the row-major *elements* of a tensor make up. The first is element *position* of *vector*.

    A range of elements of a row-major tensor is a few boxes, each of which is contiguous in the vector.
    """
    itemsize = DTYPE_BITS[vector[0].dtype] // 8
    first, begin = elements.start, 0
    for part in vector:
        end = begin + part.shape[0]
        if position < end and first < elements.stop:
            (stored,) = part.slices
            num_elements = min(end - position, elements.stop - first)
            start = stored.start + (position - begin) * itemsize
            for box in row_major_boxes(shape, first, first + num_elements):
                nbytes = box.numel * itemsize
                yield Slice(fqn, part.dtype, box.offsets, box.sizes, stored.file, start, nbytes)
                start += nbytes
            first += num_elements
            position += num_elements
        begin = end


def _check_places(ranks: Sequence[_Partition], index: int) -> None:
    """Raise :class:`Fault` if the parts of a parameter do not follow one another in group *index*.

    This finds most files under the name of another rank, which have the same sizes. The parts of different parameters
    are not compared: with ``round_robin_gradients``, DeepSpeed states another order than the one that it stores.
    """
    ends: dict[str, int] = {}
    rank_begin = 0
    for rank in ranks:
        # Versions of DeepSpeed state the places in other forms, or not at all.
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            for fqn, address in rank.places[index].items():
                start, length = counts([address.get("start"), address.get("numel")]) or ()
                begin = rank_begin + start
                if ends.setdefault(fqn, begin) != begin:
                    raise Fault(
                        f"the part of {fqn!r:.200} in {rank.path.name} does not continue the part of the rank before"
                    )
                ends[fqn] = begin + length
        rank_begin += rank.parts[index].shape[0]
