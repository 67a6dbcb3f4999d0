"""What accelerate saves with FSDP: the model and the optimizer, each in one file or, if sharded, a DCP directory.

``Accelerator.save_state`` and transformers' Trainer write (source: accelerate/utils/fsdp_utils.py and checkpointing.py,
1.15):

* with full state dicts ``pytorch_model_fsdp.bin`` and ``optimizer.bin``, files of ``torch.save``;
* with sharded ones ``pytorch_model_fsdp_0/`` and ``optimizer_0/``, directories of PyTorch DCP, in which the state dicts
  are nested under ``model`` and ``optimizer``;
* ``scheduler.bin``, or ``scheduler.pt`` and ``trainer_state.json`` in a checkpoint of the Trainer.

Only the weights are read. Without FSDP, accelerate writes Hugging Face files. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links
from automodel_ckpt.convert.formats.files import check_regular_files, names_in, read_json
from automodel_ckpt.convert.formats.format import Counters, Format
from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp
from automodel_ckpt.convert.formats.torch.torch_files import TorchFile
from automodel_ckpt.convert.formats.trainer import STATE_FILE, count_of, finished_epochs

_MODEL_FILE = "pytorch_model_fsdp.bin"
_MODEL_DIRECTORY = "pytorch_model_fsdp_0"
_OPTIMIZER_DIRECTORY = "optimizer_0"
_LEFT = "only the weights of accelerate's files are read"


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
        state = read_json(path, STATE_FILE) or {}
        return Counters(count_of(state.get("global_step")), finished_epochs(state))

    def training_left(self, path: Path) -> str:
        return _LEFT


def _is_dcp(path: Path) -> bool:
    return layout.DCP_METADATA in names_in(path)
