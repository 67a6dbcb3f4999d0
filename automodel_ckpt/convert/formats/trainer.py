"""A checkpoint of transformers' Trainer: Hugging Face files or an adapter, next to the training state.

``checkpoint-N/`` has model.safetensors (or shards with an index, or adapter_model.safetensors), ``optimizer.pt`` and
``scheduler.pt`` (state dicts, ``torch.save``), ``trainer_state.json``, ``rng_state*.pth`` and ``training_args.bin``
(source: transformers 5.23, ``Trainer._save_checkpoint``). The last two contain objects of classes: nothing of the
random state is read, and of the arguments only their description (``torch_objects.py``), for the number of
micro-batches.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    config_beside,
    names_in,
    optional_json,
    read_json,
)
from automodel_ckpt.convert.formats.format import (
    Counters,
    Format,
    Parameters,
    TrainingState,
)
from automodel_ckpt.convert.formats.hugging_face import HuggingFaceFiles, PeftAdapter
from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp
from automodel_ckpt.convert.formats.torch.numbered_optimizer import optimizer_state
from automodel_ckpt.convert.formats.torch.torch_files import (
    TorchFile,
    TorchModelDirectory,
    read_archive,
)
from automodel_ckpt.convert.formats.torch.torch_objects import Opaque
from automodel_ckpt.errors import CheckpointUnusable, unusable

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
_ARGUMENTS_FILE = "training_args.bin"
_DEEPSPEED_FILE = "latest"
_RANDOM_FILE = re.compile(r"rng_state(_[0-9]{1,6})?\.pth", re.ASCII)
# The formats of the weights, in order of precedence. An adapter's directory has no other weights.
_WEIGHTS: tuple[Format, ...] = (PeftAdapter(), HuggingFaceFiles(), TorchModelDirectory())
_FSDP_FILE = "pytorch_model_fsdp.bin"
_FSDP_DIRECTORY = "pytorch_model_fsdp_0"
_FSDP_OPTIMIZER = "optimizer_0"
_LEFT = "only the weights of accelerate's files are read"


class TransformersTrainer(Format):
    """The directory of one checkpoint of transformers' Trainer."""

    name = "transformers Trainer"

    def detect(self, path: Path) -> bool:
        names = names_in(path)
        if STATE_FILE not in names:
            return False
        if _DEEPSPEED_FILE in names and layout.ADAPTER_MODEL not in names:
            # Trained with DeepSpeed. DeepSpeed's files have the exact weights and the optimizer.
            return False
        return _weights_of(path) is not None

    def open(self, path: Path) -> Source:
        """Describe the weights."""
        known = _weights_of(path)
        assert known is not None, "detect() has found weights"
        return known.open(path)

    def counters(self, path: Path) -> Counters:
        """Return the steps and finished epochs of the trainer's state."""
        return _counters(path)

    def losses(self, path: Path) -> Values:
        """Return the last logged losses."""
        history = optional_json(path, STATE_FILE).get("log_history")
        # Later lines replace earlier ones.
        return {
            name: line[key]
            for line in (history if isinstance(history, list) else ())
            for key, name in (("loss", "train_loss"), ("eval_loss", "val_loss"))
            if isinstance(line, dict) and key in line
        }

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return the counters, the optimizer and the schedule.

        Raises :class:`CheckpointUnusable` if a file is damaged, or the optimizer does not belong to the model.
        """
        state = read_json(path, STATE_FILE)
        if state is None:
            return None
        names = names_in(path)
        check_regular_files(
            path, [name for name in (OPTIMIZER_FILE, SCHEDULER_FILE) if name in names]
        )
        counters = _counters(path)
        if counters.step is None:
            step = repr(state.get("global_step"))[:100]
            raise unusable("the trainer's state has no step", path / STATE_FILE, step)
        optimizer = None
        if OPTIMIZER_FILE in names:
            archive = read_archive(path / OPTIMIZER_FILE)
            optimizer = optimizer_state(
                archive.value, archive, parameters, root=path, file=OPTIMIZER_FILE
            )
        scheduler = _scheduler(path) if SCHEDULER_FILE in names else None
        omitted = [
            name for name in names if _RANDOM_FILE.fullmatch(name) or name == _ARGUMENTS_FILE
        ]
        if state.get("best_metric") is not None:
            omitted.append("the best metric")
        return TrainingState(
            **vars(counters),
            optimizer=optimizer,
            scheduler=scheduler,
            omitted=tuple(omitted),
        )


def _weights_of(path: Path) -> Format | None:
    return next((each for each in _WEIGHTS if each.detect(path)), None)


def _scheduler(path: Path) -> ValueDict:
    """Return the plain values of the scheduler's state."""
    value = read_archive(path / SCHEDULER_FILE).value
    if not isinstance(value, dict):
        raise unusable(
            "the state of the learning-rate schedule is not a mapping",
            path / SCHEDULER_FILE,
            type(value).__name__,
        )
    return {key: item for key, item in value.items() if isinstance(key, str)}


def _counters(path: Path) -> Counters:
    """Return the steps, samples and finished epochs; the trainer has a fractional ``epoch``."""
    state = read_json(path, STATE_FILE) or {}
    epoch: Any = state.get("epoch")
    is_finite = isinstance(epoch, int | float) and math.isfinite(epoch)
    step = Counters.of(state.get("global_step")).step
    samples = None if step is None else _consumed_samples(path, names_in(path), state, step)
    return Counters.of(step, int(epoch) if is_finite else None, samples)


def _consumed_samples(path: Path, names: list[str], state: Values, step: int) -> int | None:
    """Return the samples of *step* global batches, or None when the files do not state the size of a batch.

    The size is the size of a rank's micro-batch x micro-batches per step x ranks. Each rank saves a file of its random
    state. The last batch of an epoch may have been smaller.
    """
    micro_batch = Counters.of(state.get("train_batch_size")).step
    accumulation = _accumulation_steps(path, names)
    if not micro_batch or not accumulation:
        return None
    num_ranks = max(1, sum(1 for name in names if _RANDOM_FILE.fullmatch(name)))
    return step * micro_batch * accumulation * num_ranks


def _accumulation_steps(path: Path, names: list[str]) -> int | None:
    """Return ``gradient_accumulation_steps`` of the arguments, read from their description."""
    if _ARGUMENTS_FILE not in names or os.path.islink(path / _ARGUMENTS_FILE):
        return None
    try:
        arguments = read_archive(path / _ARGUMENTS_FILE).value
    except CheckpointUnusable:
        # They are only used for this number, and may contain anything.
        return None
    stated = arguments.get("gradient_accumulation_steps") if isinstance(arguments, Opaque) else None
    return Counters.of(stated).step


# ---------------------------------------------------------------- accelerate with FSDP


class AccelerateFsdp(Format):
    """The model and the optimizer with FSDP, each in one file or, if sharded, a DCP directory.

    ``Accelerator.save_state`` and transformers' Trainer write (source: accelerate/utils/fsdp_utils.py and
    checkpointing.py, 1.15):

    * with full state dicts ``pytorch_model_fsdp.bin`` and ``optimizer.bin``, files of ``torch.save``;
    * with sharded ones ``pytorch_model_fsdp_0/`` and ``optimizer_0/``, directories of PyTorch DCP, in which the state
      dicts are nested under ``model`` and ``optimizer``;
    * ``scheduler.bin``, or ``scheduler.pt`` and ``trainer_state.json`` in a checkpoint of the Trainer.

    Only the weights are read. Without FSDP, accelerate writes Hugging Face files.
    """

    name = "accelerate with FSDP"
    has_own_names = True
    # accelerate saves no config, and transformers' Trainer saves its model's.
    saves_config = True

    def detect(self, path: Path) -> bool:
        return _FSDP_FILE in names_in(path) or _is_dcp(path / _FSDP_DIRECTORY)

    def open(self, path: Path) -> Source:
        """Describe the model. Links are never followed: accelerate writes all files to one directory."""
        if _is_dcp(path / _FSDP_DIRECTORY):
            check_no_links(path, [_FSDP_DIRECTORY])
            source = PyTorchDcp().open(path / _FSDP_DIRECTORY)
        else:
            check_regular_files(path, [_FSDP_FILE])
            source = TorchFile().open(path / _FSDP_FILE)
        return replace(source, side_files=config_beside(path))

    def parts(self, path: Path) -> frozenset[str]:
        return frozenset({_FSDP_DIRECTORY, _FSDP_OPTIMIZER})

    def counters(self, path: Path) -> Counters:
        """Return the steps and epochs of the Trainer, if it saved the files."""
        return _counters(path)

    def training_left(self, path: Path) -> str:
        return _LEFT


def _is_dcp(path: Path) -> bool:
    return layout.DCP_METADATA in names_in(path)
