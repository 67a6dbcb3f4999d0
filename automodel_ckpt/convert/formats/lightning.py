"""PyTorch Lightning (2.6): a file, or a directory that several ranks wrote, with the model and the state of a run.

The file is one of ``torch.save`` with the keys ``state_dict``, ``optimizer_states``, ``lr_schedulers``, ``loops``,
``callbacks``, ``hyper_parameters``, ``epoch``, ``global_step`` and ``pytorch-lightning_version``. The names of the
model begin with the attribute of the LightningModule that it is stored in, often ``model.``; this prefix is removed if
all names have the same one.

ModelParallelStrategy (FSDP2) and FSDPStrategy save a directory of PyTorch DCP. It contains ``state_dict`` and
``optimizer_0``, both by name, and ``meta.pt``, a file of ``torch.save`` with the other keys.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.safe_open import open_regular, without_links
from automodel_ckpt.checkpoint.files.type_aliases import Texts
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import archive_ranges
from automodel_ckpt.convert.formats.files import faults_of
from automodel_ckpt.convert.formats.format import Counters, Parameters, TrainingState
from automodel_ckpt.convert.formats.nested_state import without_wrappers
from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp, plain_model_names, read_optimizer
from automodel_ckpt.convert.formats.torch.dcp_directory import DcpContent, read_content
from automodel_ckpt.convert.formats.torch.numbered_optimizer import optimizer_state
from automodel_ckpt.convert.formats.torch.torch_files import (
    LIGHTNING_VERSION,
    TorchFile,
    attribute_prefix,
    plain_names,
    read_archive,
)
from automodel_ckpt.convert.formats.torch.torch_objects import plain_values

META_FILE = "meta.pt"
_PROGRAM = "data.pkl"
_OPTIMIZER_KEY = re.compile(r"optimizer_[0-9]+", re.ASCII)
_MODEL, _OPTIMIZERS, _SCHEDULES = "state_dict", "optimizer_states", "lr_schedulers"
_USED = (_MODEL, _OPTIMIZERS, _SCHEDULES, "epoch", "global_step", LIGHTNING_VERSION)
# More than this many keys that are not transferred are counted.
_MAX_NAMED = 12
_EMPTY: tuple[Any, ...] = (None, {}, [])


class LightningFile(TorchFile):
    """A file that Lightning's Trainer saved (``.ckpt``)."""

    name = "PyTorch Lightning checkpoint"

    def detect(self, path: Path) -> bool:
        return super().detect(path) and _states_version(path)

    def training_left(self, path: Path) -> str:
        return ""

    def counters(self, path: Path) -> Counters:
        return _counters(read_archive(without_links(path)).value)

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return the counters, the optimizer, which numbers its parameters, and the schedule."""
        path = without_links(path)
        archive = read_archive(path)
        value = archive.value
        model = value.get(_MODEL) if isinstance(value, dict) else None
        if not isinstance(model, dict):
            return None
        found = _state_beside(value, path)
        state, reason = _only_item(value.get(_OPTIMIZERS) or None)
        if reason:
            return replace(found, omitted=(*found.omitted, f"{_OPTIMIZERS} ({reason})"))
        if state is None:
            return found
        plain = plain_names(value, [name for name in model if isinstance(name, str)])
        optimizer = optimizer_state(
            state,
            archive,
            parameters,
            root=path.parent,
            file=path.name,
            rename=lambda name: plain.get(name, without_wrappers(name)),
        )
        return replace(found, optimizer=optimizer)


class LightningDistributed(PyTorchDcp):
    """A directory that Lightning's strategies for sharded models saved."""

    name = "PyTorch Lightning distributed checkpoint"

    def detect(self, path: Path) -> bool:
        meta = path / META_FILE
        if meta.is_symlink() or not meta.is_file():
            return False
        return super().detect(path) and _states_version(meta)

    def names(self, content: DcpContent) -> Texts:
        prefix = _prefix(content)
        return {
            stored: name.removeprefix(prefix) for stored, name in plain_model_names(content).items()
        }

    def counters(self, path: Path) -> Counters:
        return _counters(read_archive(path / META_FILE).value)

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return the training state. The optimizer names its parameters: *parameters* is not called.

        The counters, the progress of the loops and the schedule are in ``meta.pt``.
        """
        content = read_content(path)
        meta = read_archive(path / META_FILE).value
        found = _state_beside(meta if isinstance(meta, dict) else {}, path / META_FILE)
        keys = _optimizer_keys(content)
        if len(keys) > 1:
            others = f"{len(keys)} optimizers; only one can be transferred"
            return replace(found, omitted=(*found.omitted, others))
        if not keys:
            return found
        prefix = _prefix(content)
        optimizer = read_optimizer(
            path,
            content,
            keys[0],
            self.open(path).tensors,
            rename=lambda name: without_wrappers(name).removeprefix(prefix),
        )
        return replace(found, optimizer=optimizer)


def _state_beside(value: Mapping[Any, Any], path: Path) -> TrainingState:
    """Return the counters and the schedule in the object *value* of the file *path*, without the optimizer."""
    with faults_of(path):
        counters = _counters(value)
        schedule, reason = _only_item(value.get(_SCHEDULES) or None)
        plain = None
        if isinstance(schedule, dict):
            plain = {
                key: item for key, item in plain_values(schedule).items() if isinstance(key, str)
            }
        epoch = finished_epochs(value.get("loops"), counters.epoch)
    omitted = [*_other_keys(value), *([f"{_SCHEDULES} ({reason})"] if reason else [])]
    return TrainingState(counters.step, epoch, None, None, plain, tuple(omitted))


def _only_item(value: Any) -> tuple[Any, str]:
    """Return the only item of a list, or *value* if it is not a list; and why there is none, in words."""
    if not isinstance(value, list):
        return value, ""
    if len(value) != 1:
        return None, f"{len(value)} of them; only one can be transferred"
    return value[0], ""


def _counters(value: object) -> Counters:
    """Return the counters in the object of a file."""
    stated = value if isinstance(value, dict) else {}
    return Counters.of(stated.get("global_step"), stated.get("epoch"))


def finished_epochs(loops: Any, epoch: int | None) -> int | None:
    """Return the number of epochs that Lightning has finished, from the progress of its loops.

    ``epoch`` is the number of the current epoch. A file that is saved after the last batch of an epoch, and before
    Lightning counts the epoch as completed, has all of its samples (source: FitLoop, lightning 2.6). Returns *epoch*
    if *loops* has another form.
    """
    try:
        loop = loops["fit_loop"]
        current = loop["epoch_progress"]["current"]
        is_last_batch = loop["epoch_loop.batch_progress"].get("is_last_batch") is True
        counters = Counters.of(current["completed"], current["ready"])
    except (AttributeError, KeyError, TypeError):
        return epoch
    completed, ready = counters.step, counters.epoch
    if completed is None or ready is None:
        return epoch
    return completed + (ready > completed and is_last_batch)


def _other_keys(value: Mapping[Any, Any]) -> list[str]:
    """Return the keys of what is not transferred."""
    items = value.items()
    others = [str(key)[:100] for key, item in items if key not in _USED and item not in _EMPTY]
    if len(others) > _MAX_NAMED:
        return [*others[:_MAX_NAMED], f"{len(others) - _MAX_NAMED} other entries"]
    return others


def _prefix(content: DcpContent) -> str:
    """Return the attribute of the LightningModule that all names of the model begin with, with a dot."""
    names = list(plain_model_names(content).values())
    return attribute_prefix(names) if names else ""


def _optimizer_keys(content: DcpContent) -> list[str]:
    """Return the keys of all optimizers in the state dict: ``optimizer_0`` and so on."""
    firsts = (str(content.paths.get(fqn, (fqn,))[0]) for fqn in (*content.tensors, *content.values))
    return list(dict.fromkeys(filter(_OPTIMIZER_KEY.fullmatch, firsts)))


def _states_version(path: Path) -> bool:
    """Return whether the pickle in a file of ``torch.save`` contains the text of Lightning's key.

    The pickle is searched, not read: this is fast for any size, and a damaged file is reported when it is opened.
    """
    try:
        with (
            os.fdopen(open_regular(without_links(path)), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            with memoryview(content) as data:
                begin, end = archive_ranges(data).get(_PROGRAM, (0, 0))
            return content.find(LIGHTNING_VERSION.encode(), begin, end) >= 0
    except Exception:  # a damaged directory makes struct raise anything
        return False
