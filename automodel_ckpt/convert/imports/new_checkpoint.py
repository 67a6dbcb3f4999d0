"""A checkpoint of weights that is written from files, for ``ckpt import`` and ``ckpt average``. Imports no torch.

It is complete, in the layout ``hf``, written and published as any save: staged, with digests, and renamed once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from automodel_ckpt.checkpoint.export.hf_assets import no_need_script
from automodel_ckpt.checkpoint.export.plan import OutputFile, Plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import json_bytes, parse_json
from automodel_ckpt.checkpoint.files.type_aliases import Files, Strings, TextDict, ValueDict, Values
from automodel_ckpt.checkpoint.jobs.jobs import (
    Blocks,
    Chunk,
    Data,
    FileJob,
    RankManifest,
    merge_files,
    merge_tree,
    readable_bytes,
    run_all,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import (
    Manifest,
    StateRecord,
    Summary,
    Tree,
    environment,
)
from automodel_ckpt.checkpoint.parts.slices import Tensor, whole_tensor
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.resume import metric_of
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.checkpoint.tensors.box_reader import whole_checked
from automodel_ckpt.convert.imports.adapter_import import AdapterModel
from automodel_ckpt.convert.imports.training_import import (
    OPTIMIZER,
    TrainingImport,
    training_jobs,
    written_optimizer,
)
from automodel_ckpt.convert.publishing import held_run
from automodel_ckpt.convert.targets.tensor_blocks import tensor_blocks
from automodel_ckpt.errors import unusable

_FORMAT = "hf"
_CONFIG = "config.json"
_ABSENT = ("optimizer", "learning-rate schedule", "data position", "random numbers", "counters")


@dataclass(frozen=True)
class NewCheckpoint:
    """The checkpoint that is written to ``run/name`` from the weights in *source*.

    *side_files* are written to ``model/``, *other_files* to the checkpoint, each by name. *left_out* lists what exists
    in the source and is not written. *contents*, if given, computes the data of each tensor of *weights*. By default,
    the data is read from the source. *lineage* is recorded in the manifest. *training* is the training state, if it was
    asked for. Without it, *has_training_state* is whether the format has one, and *training_left* why it cannot be
    imported, in words. *position_from* states where step and epoch in the name come from, in words. *adapter* is the
    model of an adapter. *name_notes* state which names of tensors are not in the model, or that this is unknown.
    """

    source: Path
    kind: str
    weights: Tensors
    plan: Plan
    side_files: Files
    other_files: Files
    losses: Values
    run: Path
    name: layout.CheckpointName
    left_out: Strings
    lineage: Values
    contents: Callable[[Tensor], Data] | None = None
    training: TrainingImport | None = None
    has_training_state: bool = False
    training_left: str = ""
    position_from: str = ""
    adapter: AdapterModel | None = None
    name_notes: Strings = ()

    @property
    def absent(self) -> Strings:
        """What the checkpoint does not contain, in words."""
        return _ABSENT if self.training is None else tuple(self.training.absent)

    @property
    def target(self) -> Path:
        return self.run / str(self.name)

    @property
    def is_newest(self) -> bool:
        """Whether no checkpoint of the run is later, so that commands that get the run's directory use this one."""
        return all(name <= self.name for name in resume.checkpoint_names(self.run))

    @property
    def has_config(self) -> bool:
        """Whether the model's config.json is among the side files."""
        return _CONFIG in self.side_files

    @property
    def is_adapter(self) -> bool:
        """Whether the weights belong to an adapter, a single file that PEFT reads."""
        return layout.ADAPTER_CONFIG in self.side_files

    @property
    def has_digests(self) -> bool:
        """Whether the source has digests that its tensors are compared with."""
        tensors = self.weights.tensors.values()
        digests = [each.digest for tensor in tensors for each in tensor.slices if each.nbytes]
        return bool(digests) and None not in digests

    @property
    def nbytes(self) -> int:
        contents = [*self.side_files.values(), *self.other_files.values()]
        training = self.training.nbytes if self.training is not None else 0
        return self.plan.nbytes + training + sum(len(content) for content in contents)


def check_free(run: Path, name: layout.CheckpointName) -> None:
    """Check that the checkpoint *name* can be added to *run*. Raises :class:`CheckpointUnusable`."""
    target = run / str(name)
    if os.path.lexists(target):
        raise unusable(
            "a checkpoint of this step already exists",
            target,
            target.name,
            "choose another run directory, or another --step",
        )
    _check_step_order(run, name)


def _check_step_order(run: Path, name: layout.CheckpointName) -> None:
    """Raise :class:`CheckpointUnusable` if weights would become the newest checkpoint of a training run.

    The run resumes from its newest checkpoint, and weights alone would lose its optimizer state.
    """
    newest = resume.newest(run) if run.is_dir() else None
    if newest is None or (newest.step, newest.epoch) > name:
        return
    if Summary.read(run / newest.name).has_optimizer:
        raise unusable(
            "weights without an optimizer would become the newest checkpoint of an existing training run",
            run,
            newest.name,
            "choose a separate run directory, and start from it with init_from",
        )


def write_checkpoint(planned: NewCheckpoint) -> Path:
    """Write and publish a checkpoint, and return its path.

    ``LATEST`` then points at the newest checkpoint of the run. Raises :class:`SaveFailed` if it cannot be written, and
    :class:`CheckpointUnusable` if the source cannot be read. In both cases nothing of it remains.
    """
    with held_run(planned.run, f"writing {planned.name}") as run:
        _check_step_order(planned.run, planned.name)  # a run may have saved since it was planned
        return _write(planned, run.root)


def _write(planned: NewCheckpoint, run: Path) -> Path:
    staging = commit.reserve(run, str(planned.name))
    try:
        written = RankManifest(0)
        run_all(_jobs(planned), staging, written)
        if planned.training is not None:
            run_all(training_jobs(planned.training), staging, written)
        manifest = _manifest(planned, written)
        commit.finalize(staging, readable_bytes(manifest, run / str(planned.name)))
        published = commit.publish(staging, str(planned.name))
        newest = resume.newest(run)
        assert newest is not None
        # Not to this checkpoint itself: one of an earlier step must not move LATEST back.
        commit.point(run, layout.LATEST, newest.name)
        return published
    finally:
        commit.discard(staging)


def _jobs(planned: NewCheckpoint) -> Iterator[FileJob]:
    for file in planned.plan.files:
        yield FileJob(f"{MODEL}/{file.name}", list(_chunks(planned, file)), MODEL, file.nbytes)
    beside = dict(planned.side_files)
    if not planned.is_adapter:
        beside[layout.HF_INDEX] = planned.plan.index()
        beside[layout.CONSOLIDATE_SCRIPT] = no_need_script().encode()
    contents = {f"{MODEL}/{name}": data for name, data in beside.items()}
    contents.update(planned.other_files)
    contents[layout.LOSSES] = json_bytes(_losses(planned))
    for name, data in contents.items():
        yield FileJob(name, [Chunk(0, data)], nbytes=len(data))


def _chunks(planned: NewCheckpoint, file: OutputFile) -> Iterator[Chunk]:
    """Yield the header and the tensors of a file. A tensor is read when its chunk is written."""
    yield Chunk(0, file.header)
    contents = planned.contents or partial(_data, planned.weights.root)
    for tensor, start in file.placed():
        path = f"{MODEL}/{file.name}"
        entry = whole_tensor(tensor.fqn, tensor.dtype, tensor.stored.shape, path, start)
        yield Chunk(start, contents(tensor.stored), entry)


def _data(root: Path, tensor: Tensor) -> Data:
    """Return a tensor's row-major bytes for a job.

    A tensor that is one range of bytes is mapped. One that has to be gathered, from several slices or through strides,
    is read in blocks: memory does not grow with the tensor.
    """
    filled = [stored for stored in tensor.slices if stored.nbytes]
    if len(filled) > 1 or any(stored.strides is not None for stored in filled):
        return Blocks(tensor.nbytes, partial(tensor_blocks, root, tensor, tensor.dtype))
    return lambda: whole_checked(root, tensor).reshape(-1).view("u1").data


def _losses(planned: NewCheckpoint) -> ValueDict:
    """Return the content of losses.json: the source's losses, null if they are not finite numbers."""
    return {
        "step": planned.name.step,
        "epoch": planned.name.epoch,
        "train_loss": metric_of(planned.losses, "train_loss"),
        "val_loss": metric_of(planned.losses, "val_loss"),
    }


def _manifest(planned: NewCheckpoint, written: RankManifest) -> Manifest:
    model = merge_tree(MODEL, Tree(_FORMAT, {}, {}), [written])
    trees = {MODEL: _without_ties(model, planned.side_files.get(_CONFIG))}
    state = {MODEL: StateRecord("module", "replicated", f"{MODEL}/")}
    lineage = dict(planned.lineage)
    progress = {}
    training = planned.training
    if training is not None:
        state |= training.records()
        lineage["not_transferred"] = [*training.absent, *training.state.omitted]
        if training.state.consumed_samples is not None:
            progress["consumed_samples"] = training.state.consumed_samples
        if training.state.optimizer is not None:
            trees[OPTIMIZER] = written_optimizer(written)
    return Manifest(
        step=planned.name.step,
        epoch=planned.name.epoch,
        created=time.time(),
        world_size=1,
        dp_size=1,
        progress=progress,
        losses=_losses(planned),
        validated=False,
        environment=environment(),
        lineage=lineage,
        state=state,
        trees=trees,
        files=merge_files([written]),
    )


def _without_ties(tree: Tree, config: bytes | None) -> Tree:
    """Record the head as a copy of the embedding, if config.json ties them and both have the same bytes."""
    if config is None or not parse_json(config).get("tie_word_embeddings"):
        return tree

    def content(fqn: str) -> tuple[object, ...]:
        tensor = tree.tensors[fqn]
        return tensor.dtype, tensor.shape, tensor.slices[0].digest

    tied: TextDict = {}
    for head in [fqn for fqn in tree.tensors if fqn.endswith("lm_head.weight")]:
        for fqn in tree.tensors:
            if fqn.endswith("embed_tokens.weight") and content(fqn) == content(head):
                tied.setdefault(head, fqn)
    tensors = {fqn: tensor for fqn, tensor in tree.tensors.items() if fqn not in tied}
    copies = {fqn: tree.tensors[fqn] for fqn in tied}
    return replace(tree, tensors=tensors, tied=tied, copies=copies)
