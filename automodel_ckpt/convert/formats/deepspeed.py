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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, counts, tiling_fault
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.convert.formats.deepspeed_files import (
    NOT_PRINTABLE,
    Partition,
    RankFiles,
    Shape,
    StateFile,
    Vector,
    check_ranks,
    divided_error,
    is_tag_directory,
    length_of,
    read_partition,
    shapes_in,
    slices_of,
)
from automodel_ckpt.convert.formats.files import UNCHECKED, faults_of, names_in
from automodel_ckpt.convert.formats.format import Counters, Format
from automodel_ckpt.convert.formats.torch.torch_files import (
    is_text_name,
    plain_names,
)
from automodel_ckpt.convert.formats.torch.torch_objects import Opaque, StoredView, has_tensor
from automodel_ckpt.errors import CheckpointUnusable

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_ZERO = "zero"
_MAX_TAG_BYTES = 1024
_MAX_LISTED = 8
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# What the files of model states have for the model itself.
_MODEL_KEYS = frozenset(
    [
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
    ]
)


class DeepSpeed(Format):
    """A run of DeepSpeed (``latest`` and the directories of tags), or the directory of one tag."""

    name = "DeepSpeed"
    has_own_names = True

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        names = names_in(path)
        if LATEST not in names and LATEST_UNIVERSAL not in names:
            return is_tag_directory(path)
        places = [path, *(path / name for name in names if not (path / name).is_symlink())]
        return any(map(is_tag_directory, places))

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the model. Links are never followed: DeepSpeed writes all files to one directory."""
        tag = _tag_directory(path)
        side_files = path if (path / "config.json").is_file() else None
        return _Model(tag).source(path, side_files)

    def counters(self, path: Path) -> Counters:
        tag = _tag_directory(path)
        value = StateFile(tag, RankFiles(tag).model[0]).value
        found = [value.get(key) for key in ("global_steps", "epoch", "global_samples")]
        return Counters(*(each if type(each) is int and each >= 0 else None for each in found))

    def training_left(self, path: Path) -> str:
        return "only the weights of DeepSpeed's files are read"

    def parts(self, path: Path) -> frozenset[str]:
        try:
            tag = _tag_directory(path)
        except CheckpointUnusable:
            return frozenset()
        return frozenset() if tag == path else frozenset({tag.name})


def _tag_directory(path: Path) -> Path:
    """Return the directory of the save that *path* is, or that its file ``latest`` names."""
    if is_tag_directory(path):
        return path
    pointer = LATEST if LATEST in names_in(path) else LATEST_UNIVERSAL
    try:
        tag = read_safely(path, pointer, limit=_MAX_TAG_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise unusable("this file cannot be read", path / pointer, repr(error)[:200]) from error
    # The tag is a name in this directory. Nothing outside of it is read.
    if not tag.isprintable() or "/" in tag or tag in ("", ".", ".."):
        raise unusable("this file does not name a directory beside it", path / pointer, tag[:200])
    directory = path / tag
    if directory.is_symlink() or not is_tag_directory(directory):
        raise unusable(
            "the directory that this file names has no files of DeepSpeed",
            path / pointer,
            tag,
            "name the directory of another save, for example global_step100",
        )
    return directory


# ---------------------------------------------------------------- the model


class _Model:
    """The model of the save in the directory *tag*: its tensors by name, notes, and what is left out, in words."""

    def __init__(self, tag: Path) -> None:
        self._tag = tag
        self._files = RankFiles(tag)
        self._states = states = StateFile(tag, self._files.model[0])
        value = states.value
        if not isinstance(value, dict) or "module" not in value:
            raise unusable("this file has no states of a model", states.path, type(value).__name__)
        # The model may be divided by more than ZeRO.
        ranks = value.get("mp_world_size")
        if type(ranks) is int and ranks > 1:
            raise divided_error(states.path, "tensor parallelism", f"mp_world_size {ranks}")
        if value.get("ds_autoep_layers"):
            raise divided_error(states.path, "expert parallelism", "ds_autoep_layers")
        self._tensors: dict[str, Tensor] = {}
        self._notes = [UNCHECKED]
        self._omitted: list[str] = []
        self._tied = states.mapping("shared_params")
        if not all(map(is_text_name, self._tied.values())):
            raise unusable(NOT_PRINTABLE, states.path, "shared_params")
        self._add_parameters()
        self._add_rest()
        self._add_texts()

    def source(self, directory: Path, side_files: Path | None) -> Source:
        """Return the description of the complete model."""
        if not self._tensors:
            raise unusable("there are no tensors here", self._states.path, "no parameters")
        tied = {
            name: stored
            for name, stored in self._tied.items()
            if stored in self._tensors and name not in self._tensors
        }
        stored_names = [*self._tensors, *tied]
        names = plain_names(self._states.value, stored_names)
        if len(set(names.values())) != len(names):
            names = {name: name for name in stored_names}
        return Source(
            self._tag,
            directory,
            {names[fqn]: tensor.renamed(names[fqn]) for fqn, tensor in self._tensors.items()},
            tied={names[name]: names[stored] for name, stored in tied.items()},
            notes=tuple(self._notes),
            omitted=tuple(self._omitted),
            side_files=side_files,
        )

    def _add_texts(self) -> None:
        value = self._states.value
        counters = [f"{key} {value[key]}" for key in _COUNTERS if type(value.get(key)) is int]
        if counters:
            self._omitted.append(f"counters ({', '.join(counters)})")
        used = _MODEL_KEYS.union(_COUNTERS)
        others = [
            key[:40]
            for key, item in value.items()
            if key not in used and item is not None and is_text_name(key)
        ]
        if others:
            self._omitted.append(f"other entries ({', '.join(others[:_MAX_LISTED])})")
        if self._omitted:
            self._notes.append(f"left out: {', '.join(self._omitted)}")

    def _add(self, fqn: str, shape: Shape, vectors: Sequence[Vector], position: int) -> None:
        """Add a parameter that is divided evenly among *vectors*, in each from *position* on.

        The end of the last parts is padding.
        """
        num_elements = math.prod(shape)
        share = -(-num_elements // len(vectors))
        slices: list[Slice] = []
        for rank, vector in enumerate(vectors):
            first = min(rank * share, num_elements)
            last = min(first + share, num_elements)
            if position + share > length_of(vector):
                raise unusable(
                    f"the ranks' parts do not have the size of the parameter {fqn!r}",
                    self._tag,
                    f"{length_of(vector)} elements",
                )
            slices.extend(slices_of(vector, fqn, shape, range(first, last), position))
        self._add_tensor(Tensor(fqn, vectors[0][0].dtype, shape, tuple(slices)))

    def _add_parts(self, fqn: str, shape: Shape, parts: Sequence[tuple[StateFile, Any]]) -> None:
        """Add a parameter of which each file has a flat part, or one file a tensor of its shape."""
        file, view = parts[0]
        if len(parts) == 1 and isinstance(view, StoredView) and view.shape == shape:
            self._add_tensor(file.tensor(fqn, view))
            return
        what = f"the part of the parameter {fqn!r}"
        segments = [file.segment(what, view) for file, view in parts]
        share = -(-math.prod(shape) // len(segments))
        if any((each.dtype, each.length) != (segments[0].dtype, share) for each in segments):
            raise unusable(
                f"the parts of the parameter {fqn!r} do not have its size, or several dtypes",
                file.path,
                f"{len(segments)} parts of {list(shape)}",
            )
        self._add(fqn, shape, [[segment] for segment in segments], 0)

    def _add_tensor(self, tensor: Tensor) -> None:
        fault = tiling_fault([stored.box for stored in tensor.slices], tensor.shape)
        if tensor.fqn in self._tensors:
            fault = "it is stored twice"
        if fault:
            raise unusable(
                f"the slices of the parameter {tensor.fqn!r} do not make it up", self._tag, fault
            )
        self._tensors[tensor.fqn] = tensor

    def _add_parameters(self) -> None:
        """Add the parameters that the optimizer trains: the master weights, if there are files with them."""
        shapes = self._states.value.get("param_shapes")
        zero = self._tag / _ZERO
        if zero.is_dir() and not zero.is_symlink():
            self._add_universal(zero, self._groups(shapes))
            self._notes.append("the weights are the float32 weights of a universal checkpoint")
            self._omitted.append("optimizer state (moments, steps) of each parameter")
            self._add_frozen(len(self._files.model))
            return
        num_ranks = len(self._files.optimizer)
        if num_ranks and shapes is not None:
            self._add_partitions(self._groups(shapes))
            self._add_frozen(num_ranks)
            self._notes.append(
                f"the weights are the optimizer's master weights, from the files of {counted(num_ranks, 'rank')}"
            )
        elif self._files.is_partitioned:
            raise unusable(
                "the files with the parameters are missing: with ZeRO stage 3, only they have them",
                self._tag,
                "no *_optim_states.pt",
                "copy the files *_optim_states.pt of all ranks into this directory",
            )
        else:
            reason = "the run did not use ZeRO"
            if shapes is not None:
                reason = (
                    "there are no files with the optimizer's master weights (*_optim_states.pt)"
                )
            self._notes.append(f"the weights are those that computed the model (module): {reason}")
        if num_ranks:
            ranks = counted(num_ranks, "rank")
            self._omitted.append(f"optimizer state of {ranks} (moments, steps, loss scale)")

    def _groups(self, value: Any) -> list[dict[str, Shape]]:
        if not isinstance(value, (list, tuple)):
            raise unusable(
                "the shapes of the parameters are missing", self._states.path, "param_shapes"
            )
        return [shapes_in(self._states, group) for group in value]

    def _add_partitions(self, groups: Sequence[dict[str, Shape]]) -> None:
        """Add the parameters of *groups*, whose values are in the ranks' files of optimizer states."""
        ranks = [
            read_partition(self._tag, name) for _, name in sorted(self._files.optimizer.items())
        ]
        first = ranks[0]
        for rank in ranks:
            if rank.facts != first.facts:
                raise unusable(
                    "ranks disagree on the stage of ZeRO, the number of ranks, groups, or dtypes",
                    rank.path,
                    f"as in {first.path.name}",
                )
        check_ranks(self._files.optimizer, first.num_ranks, self._tag)
        stated = self._states.value.get("dp_world_size")
        # Ranks that share a sequence count as one there.
        if type(stated) is int and (stated < 1 or first.num_ranks % stated):
            raise unusable(
                "the files of the optimizer's and the model's states are of different numbers of ranks",
                self._tag,
                f"dp_world_size {stated}, not {first.num_ranks}",
            )
        if (first.stage == 3) != self._files.is_partitioned:
            raise unusable(
                "the files of the optimizer's and the model's states are of different stages of ZeRO",
                self._tag,
                f"stage {first.stage} in {first.path.name}",
            )
        if first.stage == 3:
            # All groups follow one another in each rank's part.
            merged = [(name, shape) for shapes in groups for name, shape in shapes.items()]
            self._add_group(merged, [rank.segments for rank in ranks], [0] * len(merged))
            return
        if len(groups) != len(first.segments):
            raise unusable(
                f"the model has {len(groups)} groups of parameters, the optimizer another number",
                first.path,
                len(first.segments),
            )
        for index, shapes in enumerate(groups):
            _check_places(ranks, index)
            paddings: tuple[int, ...] | None = (0,) * len(shapes)
            if first.paddings is not None:
                with faults_of(first.path, "the paddings of the parameters are damaged"):
                    paddings = counts(first.paddings[index])
            if paddings is None or len(paddings) != len(shapes):
                raise unusable(
                    "the paddings of the parameters are damaged",
                    first.path,
                    repr(first.paddings)[:200],
                )
            vector = [rank.segments[index] for rank in ranks]
            self._add_group(list(shapes.items()), [vector], paddings)

    def _add_group(
        self,
        shapes: Sequence[tuple[str, Shape]],
        vectors: Sequence[Vector],
        paddings: Sequence[int],
    ) -> None:
        """Add parameters that follow one another in *vectors*, each with a *padding* after it."""
        position = 0
        for (fqn, shape), padding in zip(shapes, paddings, strict=True):
            self._add(fqn, shape, vectors, position)
            position += -(-math.prod(shape) // len(vectors)) + padding
        # One vector is padded to twice the number of ranks, and that padding is stored only in part.
        unit = 2 * len(self._files.optimizer) if len(vectors) == 1 else 1
        for vector in vectors:
            if length_of(vector) >= position + unit:
                raise unusable(
                    "the ranks' parts do not have the size of the parameters",
                    self._tag,
                    f"{length_of(vector)} elements, not {position}",
                )

    def _add_universal(self, zero: Path, groups: Iterable[dict[str, Shape]]) -> None:
        """Add the parameters in ``zero/NAME/fp32.pt`` (source: deepspeed/checkpoint/ds_to_universal.py, 0.19).

        The conversion also writes buffers there, as float32 whatever they were. They are taken from ``module``.
        """
        # Compared with the listing: a name with a slash or ".." is never in it.
        names = set(names_in(zero))
        for shapes in groups:
            for fqn, shape in shapes.items():
                if fqn not in names or (zero / fqn).is_symlink():
                    raise unusable(
                        f"the file of the parameter {fqn!r} is missing", zero, "no such name"
                    )
                file = StateFile(self._tag, f"{_ZERO}/{fqn}/fp32.pt")
                view = file.value.get("param") if isinstance(file.value, dict) else file.value
                # Converted from ZeRO stage 3, it is flat.
                self._add_parts(fqn, shape, [(file, view)])

    def _add_frozen(self, num_ranks: int) -> None:
        """Add the parameters that the optimizer does not train.

        With stage 3, the model's states of each of *num_ranks* ranks have a part of them.
        """
        shapes = shapes_in(self._states, self._states.mapping("frozen_param_shapes"))
        if not shapes:
            return
        files = [self._states]
        if self._files.is_partitioned:
            check_ranks(self._files.model, num_ranks, self._tag)
            others = (self._files.model[rank] for rank in range(1, num_ranks))
            files += [StateFile(self._tag, name) for name in others]
        parts = [(file, file.mapping("frozen_param_fragments")) for file in files]
        for fqn, shape in shapes.items():
            self._add_parts(fqn, shape, [(file, views.get(fqn)) for file, views in parts])

    def _add_rest(self) -> None:
        """Add what only ``module`` has: buffers, and the parameters whose data is nowhere else."""
        states, is_partitioned = self._states, self._files.is_partitioned
        module, buffers = states.mapping("module"), states.value.get("buffer_names")
        for fqn, view in module.items():
            if not isinstance(view, StoredView):
                # Extra state is no tensor.
                if has_tensor(view):
                    kind = view.kind if isinstance(view, Opaque) else type(view).__name__
                    raise unusable(
                        "a tensor of the model is of a class that is not read",
                        states.path,
                        f"{fqn[:200]}: {kind}",
                    )
                continue
            stored = self._tensors.get(fqn)
            tied_to = self._tied.get(fqn)
            if stored is None and tied_to not in self._tensors and tied_to not in module:
                # With stage 3, a parameter is empty here, and has no data in this file. A buffer may be empty.
                is_buffer = isinstance(buffers, (list, tuple)) and fqn in buffers
                if is_partitioned and not is_buffer and view.shape == (0,):
                    raise unusable(
                        f"the data of the parameter {fqn!r} is missing",
                        states.path,
                        "not in param_shapes",
                    )
                self._add_tensor(states.tensor(fqn, view))
            elif stored is not None and not is_partitioned and stored.shape != view.shape:
                raise unusable(
                    f"the shapes of {fqn!r} in param_shapes and module are different",
                    states.path,
                    f"{list(stored.shape)}, {list(view.shape)}",
                )


def _check_places(ranks: Sequence[Partition], index: int) -> None:
    """Raise :class:`CheckpointUnusable` if the parts of a parameter do not follow one another in group *index*.

    This finds most files under the name of another rank, which have the same sizes. The parts of different parameters
    are not compared: with ``round_robin_gradients``, DeepSpeed states another order than the one that it stores.
    """
    ends: dict[str, int] = {}
    rank_begin = 0
    for rank in ranks:
        for fqn, start, num_elements in rank.place_of(index):
            begin = rank_begin + start
            if ends.setdefault(fqn, begin) != begin:
                raise unusable(
                    f"the part of {fqn!r:.200} does not continue the part of the rank before",
                    rank.path,
                    f"element {begin}, not {ends[fqn]}",
                )
            ends[fqn] = begin + num_elements
        rank_begin += rank.segments[index].length
