"""Weights in checkpoints of DeepSpeed: ZeRO stages 1, 2 and 3, the weights of stage 0, and universal checkpoints.

A run's directory has the file ``latest``, which names the directory of the newest save (its tag). With ZeRO, the
float32 master weights are in the ranks' files of optimizer states (source: deepspeed/utils/zero_to_fp32.py, 0.19):

* Stages 1 and 2: the parameters of a group are concatenated in the order of ``param_shapes``, padded at the end, and
  each rank has a range of the result.
* Stage 3: every parameter is padded and divided among the ranks, and each rank has the concatenation of its parts.

Everything else of the model is in the files of model states: buffers, frozen parameters, names of tied parameters, and
the weights in the dtype that computed them, which are used without files of optimizer states. DeepSpeed's conversion
to a universal checkpoint writes a directory ``zero/`` with a file for each parameter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.convert.sources.deepspeed_files import (
    Partition,
    RankFiles,
    Shape,
    StateFile,
    check_partitions,
    check_ranks,
    is_tag_directory,
    parallelism_error,
    rank_files,
    read_partition,
)
from automodel_ckpt.convert.sources.deepspeed_optimizer import (
    partitioned_optimizer,
    universal_optimizer,
)
from automodel_ckpt.convert.sources.deepspeed_partitions import (
    ParameterSet,
    add_from,
    add_parameters,
)
from automodel_ckpt.convert.sources.deepspeed_universal import (
    FP32,
    ZERO_DIRECTORY,
    UniversalDirectory,
)
from automodel_ckpt.convert.sources.files import names_in
from automodel_ckpt.convert.sources.flat_vector import FlatVector, Segment
from automodel_ckpt.convert.sources.format import Counters, Format
from automodel_ckpt.convert.sources.plain_values import plain_values
from automodel_ckpt.convert.sources.torch_files import faults_of, plain_names
from automodel_ckpt.convert.sources.torch_objects import StoredView
from automodel_ckpt.convert.training_state import Parameters, TrainingState
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.units import counted

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_MAX_TAG_BYTES = 1024
_UNCHECKED = "these files are unchecked: there is no manifest with their digests"
# What the files of model states contain beside the model, with its name for the user.
_STATE_NAMES = {
    "lr_scheduler": "learning-rate schedule (lr_scheduler)",
    "data_sampler": "data position (data_sampler)",
    "random_ltd": "schedule of random layer token drop (random_ltd)",
    "optimizer": "optimizer state (optimizer)",
}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
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


class DeepSpeed(Format):
    """A run of DeepSpeed (``latest`` and the directories of tags), or the directory of one tag."""

    name = "DeepSpeed"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        names = names_in(path)
        if LATEST not in names and LATEST_UNIVERSAL not in names:
            return is_tag_directory(path)
        return is_tag_directory(path) or any(
            is_tag_directory(path / name) for name in names if not (path / name).is_symlink()
        )

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the model. Links are never followed: DeepSpeed writes all files to one directory."""
        tag = _tag_directory(path)
        side_files = path if (path / "config.json").is_file() else None
        return _described(tag).source(tag, path, side_files)

    def counters(self, path: Path) -> Counters:
        return _counters_of(_states_of(_tag_directory(path)))

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return moments, counters and the LR schedule. DeepSpeed names parameters: *parameters* is not called.

        A checkpoint without files of the optimizer's states has counters only.
        """
        tag = _tag_directory(path)
        model = _described(tag)
        optimizer = None
        if os.path.lexists(tag / ZERO_DIRECTORY):
            optimizer = universal_optimizer(tag, model.groups, model.names())
        elif model.partitions:
            optimizer = partitioned_optimizer(tag, model.groups, model.partitions, model.names())
        omitted = list(_omitted(model.states.value, are_transferred=True))
        if optimizer is None:
            omitted.insert(0, "optimizer state: there are no files with it that can be read")
        else:
            omitted.insert(0, "loss scale")
        counters = _counters_of(model.states)
        return TrainingState(
            step=counters.step,
            epoch=counters.epoch,
            consumed_samples=counters.consumed_samples,
            optimizer=optimizer,
            scheduler=_schedule(model.states),
            omitted=tuple(omitted),
        )

    def parts(self, path: Path) -> frozenset[str]:
        try:
            tag = _tag_directory(path)
        except CheckpointUnusable:
            return frozenset()
        return frozenset() if tag == path else frozenset({tag.name})


class _Model:
    """The model as far as it was described. *states* is rank 0's file of model states.

    *groups* are the shapes of the trained parameters, and *partitions* the ranks' parts of them, if they are stored in
    parts.
    """

    def __init__(self, states: StateFile) -> None:
        self.states = states
        self.parameters = ParameterSet(states.path)
        self.groups: list[dict[str, Shape]] = []
        self.partitions: Mapping[int, Partition] = {}
        self.notes = [_UNCHECKED]
        self.omitted: list[str] = []

    def names(self) -> dict[str, str]:
        """Return {name in the files: name in the model}, which has no prefixes of wrappers."""
        stored = [*self.parameters.tensors, *self._tied()]
        names = plain_names(self.states.value, stored)
        if len(set(names.values())) != len(names):
            names = {name: name for name in names}
        return names

    def _tied(self) -> dict[str, str]:
        """Return {tied name: stored name}, for tied names that have no data in the files."""
        tied: dict[str, str] = {}
        for name, stored in _shared(self.states).items():
            if stored in self.parameters.tensors and name not in self.parameters.tensors:
                tied[name] = stored
        return tied

    def source(self, root: Path, directory: Path, side_files: Path | None) -> Source:
        """Return the description of the complete model, whose files are below *root*."""
        tied = self._tied()
        names = self.names()
        tensors: dict[str, Tensor] = {}
        for fqn, tensor in self.parameters.tensors.items():
            name = names[fqn]
            tensors[name] = tensor.renamed(name)
        if not tensors:
            raise unusable("there are no tensors here", self.states.path, "no parameters")
        omitted = (*self.omitted, *_omitted(self.states.value))
        notes = self.notes
        if omitted:
            notes = [*notes, f"left out: {', '.join(omitted)}"]
        return Source(
            root,
            directory,
            tensors,
            tied={names[name]: names[stored] for name, stored in tied.items()},
            notes=tuple(notes),
            omitted=omitted,
            side_files=side_files,
        )


def _described(tag: Path) -> _Model:
    """Return the model of the save in the directory *tag*."""
    files = rank_files(tag)
    states = _states_of(tag)
    model = _Model(states)
    if os.path.lexists(tag / ZERO_DIRECTORY):
        _add_universal(model, tag)
        _add_frozen(model, tag, files, _num_ranks(states, files))
    else:
        _add_parameters(model, tag, files)
    _add_rest(model, files.is_partitioned)
    return model


# ---------------------------------------------------------------- which directory


def _tag_directory(path: Path) -> Path:
    """Return the directory of the save that *path* is, or that its file ``latest`` names."""
    if is_tag_directory(path):
        return path
    names = names_in(path)
    pointer = LATEST if LATEST in names else LATEST_UNIVERSAL
    try:
        tag = read_safely(path, pointer, limit=_MAX_TAG_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise unusable("this file cannot be read", path / pointer, repr(error)[:200]) from error
    # The tag is a name in this directory. Nothing outside of it is read.
    if not tag.isprintable() or "/" in tag or tag in ("", ".", ".."):
        raise unusable("this file does not name a directory beside it", path / pointer, tag[:200])
    directory = path / tag
    if directory.is_symlink() or not is_tag_directory(directory):
        raise CheckpointUnusable(
            "the directory that this file names has no files of DeepSpeed",
            where=str(path / pointer),
            value=tag,
            hint="name the directory of another save, for example global_step100",
        )
    return directory


def _states_of(tag: Path) -> StateFile:
    """Return the states of the model that rank 0 saved. Raises :class:`CheckpointUnusable`."""
    states = StateFile(tag, rank_files(tag).model[0])
    _check_states(states)
    return states


def _check_states(states: StateFile) -> None:
    """Raise :class:`CheckpointUnusable` if the model was divided by more than ZeRO, as far as its states show."""
    if not isinstance(states.value, dict):
        kind = type(states.value).__name__
        raise unusable("this file has no states of a model", states.path, kind)
    states.mapping("module")
    ranks = states.value.get("mp_world_size")
    if type(ranks) is int and ranks > 1:
        kind = f"tensor parallelism (mp_world_size {ranks})"
        raise parallelism_error(states.path, kind, ranks)
    if states.value.get("ds_autoep_layers"):
        raise parallelism_error(states.path, "expert parallelism", "ds_autoep_layers")


# ---------------------------------------------------------------- parameters


def _add_parameters(model: _Model, tag: Path, files: RankFiles) -> None:
    """Add the parameters that the optimizer trains: the master weights, if there are files with them."""
    states = model.states
    has_shapes = states.value.get("param_shapes") is not None
    if not files.optimizer or not has_shapes:
        if files.is_partitioned:
            raise CheckpointUnusable(
                "the files with the parameters are missing: with ZeRO stage 3, only they have them",
                where=str(tag),
                value="no *_optim_states.pt",
                hint="copy the files *_optim_states.pt of all ranks into this directory",
            )
        model.notes.append(_why_module(has_shapes=has_shapes))
        if files.optimizer:
            model.omitted.append(_optimizer_text(len(files.optimizer)))
        return
    partitions: dict[int, Partition] = {}
    for rank, name in sorted(files.optimizer.items()):
        partitions[rank] = read_partition(tag, name)
    check_partitions(partitions, tag)
    _check_stage(partitions[0], files, tag)
    _check_num_ranks(states, len(partitions))
    model.groups = _param_shapes(states)
    model.partitions = partitions
    add_parameters(model.parameters, model.groups, partitions)
    _add_frozen(model, tag, files, len(partitions) if partitions[0].stage == 3 else 1)
    model.omitted.append(_optimizer_text(len(partitions)))
    model.notes.append(
        f"the weights are the optimizer's master weights, from the files of {counted(len(partitions), 'rank')}"
    )


def _why_module(*, has_shapes: bool) -> str:
    if has_shapes:
        reason = "there are no files with the optimizer's master weights (*_optim_states.pt)"
    else:
        reason = "the run did not use ZeRO"
    return f"the weights are those that computed the model (module): {reason}"


def _optimizer_text(num_ranks: int) -> str:
    return f"optimizer state of {counted(num_ranks, 'rank')} (moments, steps, loss scale)"


def _check_stage(partition: Partition, files: RankFiles, tag: Path) -> None:
    if (partition.stage == 3) != files.is_partitioned:
        what = "the files of the optimizer's and the model's states are of different stages of ZeRO"
        raise unusable(what, tag, f"stage {partition.stage} in {partition.file.name}")


def _check_num_ranks(states: StateFile, num_ranks: int) -> None:
    """Compare the number of data-parallel ranks that saved with that of the parts.

    Ranks that share a sequence count as one in ``dp_world_size``, so that it may be a divisor.
    """
    stated = states.value.get("dp_world_size")
    if type(stated) is int and (stated < 1 or num_ranks % stated):
        what = f"the parameters are divided among {num_ranks} ranks, and the model's states are of another number"
        raise unusable(what, states.path, f"dp_world_size {stated}")


def _num_ranks(states: StateFile, files: RankFiles) -> int:
    """Return the number of ranks among which frozen parameters are divided, in a universal checkpoint."""
    if not files.is_partitioned:
        return 1
    stated = states.value.get("dp_world_size")
    return stated if type(stated) is int and stated > 0 else len(files.model)


def _param_shapes(states: StateFile) -> list[dict[str, Shape]]:
    value = states.value.get("param_shapes")
    if not isinstance(value, (list, tuple)):
        raise unusable("the shapes of the parameters are missing", states.path, "param_shapes")
    return [dict(states.shapes(group)) for group in value]


# ---------------------------------------------------------------- frozen parameters, buffers, tied names


def _add_frozen(model: _Model, tag: Path, files: RankFiles, num_ranks: int) -> None:
    """Add the parameters that the optimizer does not train. With stage 3, each rank's states have a part of them."""
    states = model.states
    fragments = states.optional_mapping("frozen_param_fragments")
    shapes = dict(states.shapes(states.optional_mapping("frozen_param_shapes")))
    if not shapes:
        return
    if not files.is_partitioned:
        for fqn, shape in shapes.items():
            view = fragments.get(fqn)
            if not isinstance(view, StoredView) or view.shape != shape:
                what = f"the frozen parameter {fqn!r} does not have its shape"
                raise unusable(what, states.path, f"{view!r:.100}, not {list(shape)}")
            model.parameters.add(states.tensor(fqn, view))
        return
    check_ranks(files.model, num_ranks, tag)
    parts = {0: fragments}
    ranks = {0: states}
    for rank in range(1, num_ranks):
        ranks[rank] = StateFile(tag, files.model[rank])
        parts[rank] = ranks[rank].mapping("frozen_param_fragments")
    for fqn, shape in shapes.items():
        share = -(-math.prod(shape) // num_ranks)
        vectors: dict[int, FlatVector] = {}
        for rank, file in ranks.items():
            segment = file.segment(f"the part of {fqn!r}", parts[rank].get(fqn))
            _check_fragment(file, fqn, segment, share, vectors)
            vectors[rank] = FlatVector([segment])
        add_from(model.parameters, fqn, shape, vectors, 0, share)


def _check_fragment(
    file: StateFile, fqn: str, segment: Segment, share: int, others: Mapping[int, FlatVector]
) -> None:
    if segment.num_elements != share:
        what = f"the part of the frozen parameter {fqn!r} has another size"
        raise unusable(what, file.path, f"{segment.num_elements} elements, not {share}")
    for other in others.values():
        if other.dtype != segment.dtype:
            what = f"the parts of {fqn!r} have several dtypes"
            raise unusable(what, file.path, f"{segment.dtype}, {other.dtype}")


def _shared(states: StateFile) -> dict[str, str]:
    """Return {name of a tied parameter: name of the parameter that has its data}."""
    found: dict[str, str] = {}
    for name, stored in states.optional_mapping("shared_params").items():
        found[states.checked_name(name)] = states.checked_name(stored)
    return found


def _add_rest(model: _Model, is_partitioned: bool) -> None:
    """Add what only ``module`` has: buffers, and the parameters whose data is nowhere else.

    With *is_partitioned* (stage 3), parameters are empty there.
    """
    states = model.states
    module = states.mapping("module")
    buffers = states.value.get("buffer_names") or ()
    shared = _shared(states)
    for fqn, view in states.views(module):
        stored = model.parameters.tensors.get(fqn)
        is_tied = shared.get(fqn) in model.parameters.tensors or shared.get(fqn) in module
        if stored is None and not is_tied:
            # A buffer may be empty; a parameter that is empty here has no data in this file.
            is_buffer = isinstance(buffers, (list, tuple)) and fqn in buffers
            if is_partitioned and not is_buffer and view.shape == (0,):
                what = f"the data of the parameter {fqn!r} is missing"
                raise unusable(what, states.path, "not in param_shapes or frozen_param_shapes")
            model.parameters.add(states.tensor(fqn, view))
        elif stored is not None and not is_partitioned and stored.shape != view.shape:
            what = f"the shapes of {fqn!r} in param_shapes and module are different"
            raise unusable(what, states.path, f"{list(stored.shape)}, {list(view.shape)}")


# ---------------------------------------------------------------- universal checkpoints


def _add_universal(model: _Model, tag: Path) -> None:
    """Add the parameters of a universal checkpoint: ``zero/NAME/fp32.pt``.

    The conversion also writes buffers there, as float32 whatever they were. They are taken from ``module``.
    """
    model.groups = _param_shapes(model.states)
    zero = UniversalDirectory(tag)
    for shapes in model.groups:
        for fqn, shape in shapes.items():
            model.parameters.add(zero.tensor(fqn, shape, FP32))
    model.notes.append("the weights are the float32 weights of a universal checkpoint")
    model.omitted.append("optimizer state (moments, steps) of each parameter")


# ---------------------------------------------------------------- what is left out


def _counters_of(states: StateFile) -> Counters:
    value = states.value
    return Counters(
        _count(value, "global_steps"), _count(value, "epoch"), _count(value, "global_samples")
    )


def _count(value: Mapping[Any, Any], key: str) -> int | None:
    """Return the counter *key* of the model's states; None if there is none."""
    number = value.get(key)
    return number if type(number) is int and number >= 0 else None


def _schedule(states: StateFile) -> dict[str, Any] | None:
    """Return the plain values of the LR scheduler's state; None if there is no scheduler."""
    state = states.value.get("lr_scheduler")
    if not isinstance(state, dict):
        return None
    with faults_of(states.path):
        return plain_values(state)


def _omitted(value: Mapping[Any, Any], *, are_transferred: bool = False) -> Iterator[str]:
    """Yield what the model's states contain beside the model, in words.

    If the training state is transferred, the schedule and the counters are not among it.
    """
    for key, text in _STATE_NAMES.items():
        if are_transferred and key == "lr_scheduler":
            continue
        if value.get(key) is not None:
            yield text
    counters: list[str] = []
    for key in ("skipped_steps",) if are_transferred else _COUNTERS:
        number = value.get(key)
        if type(number) is int:
            counters.append(f"{key} {number}")
    if counters:
        yield f"counters ({', '.join(counters)})"
    known = {*_STATE_NAMES, *_COUNTERS, *_MODEL_KEYS}
    others = [str(key)[:40] for key in value if key not in known and isinstance(key, str)]
    if others:
        shown = ", ".join(name for name in others[:8] if name.isprintable())
        yield f"entries that the training script added ({shown})"
