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
from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import archive_ranges
from automodel_ckpt.convert.formats.format import Counters
from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp, plain_model_names
from automodel_ckpt.convert.formats.torch.dcp_directory import DcpContent, read_content
from automodel_ckpt.convert.formats.torch.dcp_training_state import read_optimizer
from automodel_ckpt.convert.formats.torch.nested_state import without_wrappers
from automodel_ckpt.convert.formats.torch.torch_files import (
    LIGHTNING_VERSION,
    TorchFile,
    attribute_prefix,
    faults_of,
    read_archive,
)
from automodel_ckpt.convert.formats.torch.torch_training_state import (
    counters_of,
    finished_epochs,
    other_keys,
    read_counters,
    scheduler_values,
)
from automodel_ckpt.convert.formats.torch.training_state import Parameters, TrainingState
from automodel_ckpt.errors import CheckpointUnusable

META_FILE = "meta.pt"
_PROGRAM = "data.pkl"
_OPTIMIZER_KEY = re.compile(r"optimizer_[0-9]+", re.ASCII)
_USED_META = ("epoch", "global_step", "lr_schedulers", LIGHTNING_VERSION)


class LightningFile(TorchFile):
    """A file that Lightning's Trainer saved (``.ckpt``)."""

    name = "PyTorch Lightning checkpoint"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        return super().detect(path, follow_links=follow_links) and _states_version(path)


class LightningDistributed(PyTorchDcp):
    """A directory that Lightning's strategies for sharded models saved."""

    name = "PyTorch Lightning distributed checkpoint"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        meta = path / META_FILE
        if meta.is_symlink() or not meta.is_file():
            return False
        return super().detect(path, follow_links=follow_links) and _states_version(meta)

    def names(self, content: DcpContent) -> Mapping[str, str]:
        prefix = _prefix(content)
        return {
            stored: name.removeprefix(prefix) for stored, name in plain_model_names(content).items()
        }

    def counters(self, path: Path) -> Counters:
        return read_counters(path / META_FILE)

    def has_training_state(self, path: Path) -> bool:
        try:
            content = read_content(path)
        except CheckpointUnusable:
            return False
        return bool(_optimizer_keys(content))

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return the training state. The optimizer names its parameters: *parameters* is not called.

        The counters, the progress of the loops and the schedule are in ``meta.pt``.
        """
        source = self.open(path)
        content = read_content(path)
        meta = read_archive(path / META_FILE).value
        if not isinstance(meta, dict):
            meta = {}
        omitted = list(other_keys(meta, {*_USED_META}))
        keys = _optimizer_keys(content)
        optimizer = None
        if len(keys) == 1:
            prefix = _prefix(content)
            optimizer = read_optimizer(
                path,
                content,
                keys[0],
                source.tensors,
                rename=lambda name: without_wrappers(name).removeprefix(prefix),
            )
        elif keys:
            omitted.append(f"{len(keys)} optimizers; only one can be transferred")
        with faults_of(path / META_FILE):
            counters = counters_of(meta)
            scheduler, reason = scheduler_values(meta.get("lr_schedulers"))
            epoch = finished_epochs(meta.get("loops"), counters.epoch)
        if reason:
            omitted.append(f"lr_schedulers ({reason})")
        return TrainingState(counters.step, epoch, None, optimizer, scheduler, tuple(omitted))


def _prefix(content: DcpContent) -> str:
    """Return the attribute of the LightningModule that all names of the model begin with, with a dot."""
    names = list(plain_model_names(content).values())
    return attribute_prefix(names) if names else ""


def _optimizer_keys(content: DcpContent) -> list[str]:
    """Return the keys of all optimizers in the state dict: ``optimizer_0`` and so on."""
    found: dict[str, None] = {}
    for fqn in (*content.tensors, *content.values):
        first = str(content.paths.get(fqn, (fqn,))[0])
        if _OPTIMIZER_KEY.fullmatch(first):
            found[first] = None
    return list(found)


def _states_version(path: Path) -> bool:
    """Return whether the pickle in a file of ``torch.save`` contains the text of Lightning's key.

    The pickle is searched, not read: this is fast for any size, and a damaged file is reported when it is opened.
    """
    try:
        descriptor = open_regular(Path(os.path.realpath(path)))
    except OSError:
        return False
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
            with memoryview(content) as data:
                begin, end = archive_ranges(data).get(_PROGRAM, (0, 0))
            return content.find(LIGHTNING_VERSION.encode(), begin, end) >= 0
    except Exception:  # a damaged directory makes struct raise anything
        return False
    finally:
        os.close(descriptor)
