"""Describe the model in a DeepSpeed checkpoint: its tensors as slices of the ranks' files.

:func:`describe_model` collects the parameters that were trained, the frozen ones, and what only the states of the model
have: buffers and tied names. It reads no tensor data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.convert.formats.deepspeed.deepspeed_files import (
    Partition,
    RankFiles,
    StateFile,
    check_partitions,
    check_ranks,
    rank_files,
    read_partition,
)
from automodel_ckpt.convert.formats.deepspeed.deepspeed_partitions import (
    ParameterSet,
    add_from,
    add_parameters,
)
from automodel_ckpt.convert.formats.deepspeed.deepspeed_states import (
    model_states,
    omitted_entries,
    parameter_shapes,
    tied_parameters,
)
from automodel_ckpt.convert.formats.deepspeed.deepspeed_universal import (
    FP32,
    ZERO_DIRECTORY,
    UniversalDirectory,
)
from automodel_ckpt.convert.formats.torch.flat_vector import FlatVector, Segment
from automodel_ckpt.convert.formats.torch.torch_files import plain_names
from automodel_ckpt.convert.formats.torch.torch_objects import StoredView
from automodel_ckpt.errors import CheckpointUnusable

_UNCHECKED = "these files are unchecked: there is no manifest with their digests"


class DescribedModel:
    """The model as far as it was described. *states* is rank 0's file of model states."""

    def __init__(self, states: StateFile) -> None:
        self.states = states
        self.parameters = ParameterSet(states.path)
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
        for name, stored in tied_parameters(self.states).items():
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
        omitted = (*self.omitted, *omitted_entries(self.states.value))
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


def describe_model(tag: Path) -> DescribedModel:
    """Describe the model of the save in the directory *tag*. Raises :class:`CheckpointUnusable`."""
    files = rank_files(tag)
    states = model_states(tag)
    model = DescribedModel(states)
    if os.path.lexists(tag / ZERO_DIRECTORY):
        _add_universal(model, tag)
        _add_frozen(model, tag, files, _num_frozen_parts(states, files))
    else:
        _add_parameters(model, tag, files)
    _add_rest(model, files.is_partitioned)
    return model


def _add_parameters(model: DescribedModel, tag: Path, files: RankFiles) -> None:
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
    add_parameters(model.parameters, parameter_shapes(states), partitions)
    _add_frozen(model, tag, files, len(partitions))
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


def _add_frozen(model: DescribedModel, tag: Path, files: RankFiles, num_ranks: int) -> None:
    """Add the parameters that the optimizer does not train.

    With stage 3 (``files.is_partitioned``), the states of each of *num_ranks* ranks have a part of them.
    """
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


def _num_frozen_parts(states: StateFile, files: RankFiles) -> int:
    """Return the number of ranks among which stage 3 divides frozen parameters, in a universal checkpoint."""
    stated = states.value.get("dp_world_size")
    return stated if type(stated) is int and stated > 0 else len(files.model)


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


def _add_universal(model: DescribedModel, tag: Path) -> None:
    """Add the parameters of a universal checkpoint: ``zero/NAME/fp32.pt``.

    The conversion also writes buffers there, as float32 whatever they were. They are taken from ``module``.
    """
    zero = UniversalDirectory(tag)
    for shapes in parameter_shapes(model.states):
        for fqn, shape in shapes.items():
            model.parameters.add(zero.tensor(fqn, shape, FP32))
    model.notes.append("the weights are the float32 weights of a universal checkpoint")
    model.omitted.append("optimizer state (moments, steps) of each parameter")


def _add_rest(model: DescribedModel, is_partitioned: bool) -> None:
    """Add what only ``module`` has: buffers, and the parameters whose data is nowhere else.

    With *is_partitioned* (stage 3), parameters are empty there.
    """
    states = model.states
    module = states.mapping("module")
    buffers = states.value.get("buffer_names") or ()
    shared = tied_parameters(states)
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
