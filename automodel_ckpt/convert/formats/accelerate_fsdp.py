"""What accelerate saves: the model and the optimizer, each in one file or, if FSDP shards them, a DCP directory.

``Accelerator.save_state`` and transformers' Trainer write (source: accelerate/utils/fsdp_utils.py and checkpointing.py,
1.15):

* without FSDP ``model.safetensors`` (or ``pytorch_model.bin``) and ``optimizer.bin``, which numbers the parameters;
* with full state dicts ``pytorch_model_fsdp.bin`` and ``optimizer.bin``, files of ``torch.save``;
* with sharded ones ``pytorch_model_fsdp_0/`` and ``optimizer_0/``, directories of PyTorch DCP, in which the state dicts
  are nested under ``model`` and ``optimizer``;
* ``scheduler.bin``, or ``scheduler.pt`` and ``trainer_state.json`` in a checkpoint of the Trainer.

Only the weights are read. Imports no torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links, unusable
from automodel_ckpt.convert.formats.files import check_regular_files, names_in, read_json
from automodel_ckpt.convert.formats.format import Counters, Format
from automodel_ckpt.convert.formats.hugging_face import HuggingFaceFiles
from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp
from automodel_ckpt.convert.formats.torch.torch_files import TorchFile, TorchModelDirectory

_MODEL_FILE = "pytorch_model_fsdp.bin"
_MODEL_DIRECTORY = "pytorch_model_fsdp_0"
_STATE_OPTIMIZER = "optimizer.bin"
_OPTIMIZER_DIRECTORY = "optimizer_0"
_TRAINER_STATE = "trainer_state.json"
_LEFT = "only the weights of accelerate's files are read"
_OTHER_MODEL = re.compile(
    r"(model_[1-9][0-9]{0,5}\.safetensors|pytorch_model_[1-9][0-9]{0,5}\.bin)", re.ASCII
)
_MAX_COUNT = 2**53


class AccelerateFsdp(Format):
    """A directory of ``Accelerator.save_state``, or a checkpoint of transformers' Trainer, with FSDP."""

    name = "accelerate with FSDP"
    has_own_names = True
    # accelerate saves none, and transformers' Trainer that of its model.
    saves_config = True

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        return _MODEL_FILE in names_in(path) or _is_dcp(path / _MODEL_DIRECTORY)

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the model. Links are never followed: accelerate writes all files to one directory."""
        if _is_dcp(path / _MODEL_DIRECTORY):
            check_no_links(path, [_MODEL_DIRECTORY])
            source = PyTorchDcp().open(path / _MODEL_DIRECTORY)
        else:
            check_no_links(path, [_MODEL_FILE])
            check_regular_files(path, [_MODEL_FILE])
            source = TorchFile().open(path / _MODEL_FILE)
        side_files = path if (path / "config.json").is_file() else None
        return replace(source, side_files=side_files)

    def parts(self, path: Path) -> frozenset[str]:
        return frozenset({_MODEL_DIRECTORY, _OPTIMIZER_DIRECTORY})

    def counters(self, path: Path) -> Counters:
        """Return the steps and epochs of the Trainer, if it saved the files."""
        state = read_json(path, _TRAINER_STATE) or {}
        return Counters(_whole_number(state.get("global_step")), _whole_number(state.get("epoch")))

    def training_left(self, path: Path) -> str:
        return _LEFT


class AccelerateState(Format):
    """A directory of ``Accelerator.save_state`` without FSDP: one process, or DistributedDataParallel."""

    name = "accelerate"
    has_own_names = True

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        # The Trainer writes optimizer.pt, and DeepSpeed writes separate directories.
        if _STATE_OPTIMIZER not in names_in(path):
            return False
        return _weights_of(path, follow_links) is not None

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the weights. Raises :class:`CheckpointUnusable` if there are several models."""
        others = [name for name in names_in(path) if _OTHER_MODEL.fullmatch(name)]
        if others:
            what = "this directory has several models"
            raise unusable(what, path, f"{', '.join(others)}: name the file of one")
        known = _weights_of(path, follow_links)
        assert known is not None, "detect() has found weights"
        return known.open(path, follow_links=follow_links)

    def training_left(self, path: Path) -> str:
        return _LEFT


def _weights_of(path: Path, follow_links: bool) -> Format | None:
    formats: tuple[Format, ...] = (HuggingFaceFiles(), TorchModelDirectory())
    for known in formats:
        if known.detect(path, follow_links=follow_links):
            return known
    return None


def _is_dcp(path: Path) -> bool:
    return layout.DCP_METADATA in names_in(path)


def _whole_number(value: object) -> int | None:
    """Return the integer part of a counter (the Trainer's epoch is a fraction); None for any other value."""
    if type(value) not in (int, float):
        return None
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number) or not 0 <= number < _MAX_COUNT:
        return None
    return int(number)
