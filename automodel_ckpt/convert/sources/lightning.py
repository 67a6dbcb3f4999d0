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
from collections.abc import Mapping
from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.files.torch_archive_reading import archive_ranges
from automodel_ckpt.convert.sources.dcp import PyTorchDcp, model_names
from automodel_ckpt.convert.sources.dcp_directory import DcpContent
from automodel_ckpt.convert.sources.format import Counters
from automodel_ckpt.convert.sources.torch_files import (
    LIGHTNING_VERSION,
    TorchFile,
    attribute_prefix,
)
from automodel_ckpt.convert.sources.torch_training_state import read_counters

META_FILE = "meta.pt"
_PROGRAM = "data.pkl"


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
        names = model_names(content)
        if not names:
            return names
        prefix = attribute_prefix(list(names.values()))
        return {stored: name.removeprefix(prefix) for stored, name in names.items()}

    def counters(self, path: Path) -> Counters:
        return read_counters(path / META_FILE)


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
