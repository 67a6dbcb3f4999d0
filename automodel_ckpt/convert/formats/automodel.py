"""Checkpoints of NeMo AutoModel: the model in ``model/``, the optimizer in ``optim/``, and small files next to them.

``epoch_E_step_S/`` has ``model/`` (shards of safetensors, or PyTorch DCP), ``optim/`` (DCP: the optimizer under
``optim`` with one key per value, the LR schedule under ``sched``), ``step_scheduler.pt`` (``{"step", "epoch"}``), and
``rng/`` and ``dataloader/`` with files for each rank (source: nemo_automodel 0.7, components/checkpoint and
recipes/base_recipe.py). Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.parts.manifest import has_manifest
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links
from automodel_ckpt.convert.formats.files import names_in
from automodel_ckpt.convert.formats.format import (
    Counters,
    Format,
    OptimizerState,
    Parameters,
    TrainingState,
)
from automodel_ckpt.convert.formats.hugging_face import HuggingFaceFiles
from automodel_ckpt.convert.formats.safetensors_shards import SafetensorsShards
from automodel_ckpt.convert.formats.torch.dcp import (
    PyTorchDcp,
    optimizer_key,
    read_optimizer,
    read_scheduler,
)
from automodel_ckpt.convert.formats.torch.dcp_directory import DcpContent, read_content
from automodel_ckpt.convert.formats.torch.torch_files import read_archive

_MODEL = "model"
_OPTIMIZER = "optim"
_COUNTERS = "step_scheduler.pt"
_RANK_STATE = ("rng", "dataloader")
# An adapter is not among them: it cannot be used without its base.
_WEIGHTS: tuple[Format, ...] = (PyTorchDcp(), HuggingFaceFiles(), SafetensorsShards())


class AutoModel(Format):
    """The directory of one checkpoint of NeMo AutoModel."""

    name = "NeMo AutoModel"

    def detect(self, path: Path) -> bool:
        # A checkpoint of this program has the same directories; its optimizer is under another key.
        is_complete = layout.DCP_METADATA in names_in(path / _OPTIMIZER)
        if not is_complete or has_manifest(path):
            return False
        if layout.ADAPTER_MODEL in names_in(path / _MODEL):
            return False
        return _weights_of(path) is not None

    def open(self, path: Path) -> Source:
        """Describe the model in ``model/``. Links are never followed out of the checkpoint."""
        check_no_links(path, (_MODEL, _OPTIMIZER))
        known = _weights_of(path)
        assert known is not None, "detect() has found weights"
        source = known.open(path / _MODEL)
        return replace(source, omitted=(*source.omitted, "optimizer state (optim/)"))

    def counters(self, path: Path) -> Counters:
        """Return the finished steps: one more than the name of the directory states, which counts from 0."""
        if _COUNTERS not in names_in(path):
            return Counters()
        check_no_links(path, [_COUNTERS])
        stated = read_archive(path / _COUNTERS).value
        if not isinstance(stated, dict):
            return Counters()
        return Counters.of(stated.get("step"), stated.get("epoch"))

    def parts(self, path: Path) -> frozenset[str]:
        return frozenset({_MODEL, _OPTIMIZER})

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return the optimizer's state, the counters and the LR schedule, all by name: *parameters* is not called.

        Raises :class:`CheckpointUnusable` if the files are damaged, or the optimizer does not belong to the model.
        """
        check_no_links(path, (_MODEL, _OPTIMIZER))
        directory = path / _OPTIMIZER
        content = read_content(directory)
        if optimizer_key(content) != _OPTIMIZER:
            return None
        optimizer = read_optimizer(directory, content, _OPTIMIZER, self.open(path).tensors)
        return TrainingState(
            **vars(self.counters(path)),
            optimizer=optimizer,
            scheduler=_schedule(directory, content, optimizer),
            omitted=tuple(name for name in _RANK_STATE if os.path.lexists(path / name)),
        )


def _weights_of(path: Path) -> Format | None:
    return next((each for each in _WEIGHTS if each.detect(path / _MODEL)), None)


def _schedule(
    directory: Path, content: DcpContent, optimizer: OptimizerState | None
) -> ValueDict | None:
    """Return the LR scheduler's values, with the peak rates of the groups as ``base_lrs``.

    AutoModel's OptimizerParamScheduler has one peak rate, which each group's ``lr_mult`` multiplies.
    """
    state = read_scheduler(directory, content)
    peak: Any = state.get("max_lr") if state is not None else None
    if state is None or optimizer is None or type(peak) not in (int, float):
        return state
    factors = [group.options.get("lr_mult", 1.0) for group in optimizer.groups]
    rates = [peak * (each if type(each) in (int, float) else 1.0) for each in factors]
    return {**state, "base_lrs": list(map(float, rates))}
