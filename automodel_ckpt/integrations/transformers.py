"""Checkpoints for transformers' Trainer: :class:`CheckpointCallback` replaces the Trainer's saves.

    checkpoints = CheckpointCallback("run", CheckpointOptions(keep_last=2))
    trainer = Trainer(..., args=TrainingArguments(save_steps=100), callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))

What this module uses of the Trainer was read in transformers 5.23 (trainer.py, trainer_callback.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, HFAssets
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.integrations.state import DeferredRandomState, gloo_group

__all__ = ["CheckpointCallback"]

_ALWAYS_SAVED = ("model", "optimizer", "lr_scheduler", "random_state", "scaler")


class _TrainerStateText:
    """The Trainer's TrainerState as JSON text, the content of its file trainer_state.json."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def state_dict(self) -> dict[str, Any]:
        return {"json": self.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.text = state["json"]


class CheckpointCallback(TrainerCallback):
    """Saves runs of transformers' Trainer in *directory*, whenever the Trainer would save, and resumes them exactly.

    A save has the model, the optimizer, the learning-rate schedule, the gradient scaler, the random state of each rank
    and the TrainerState with the state of other callbacks. It is made after the logs and the evaluation of its step:
    just before the next step or epoch begins, or at the end of training. The metrics of an evaluation in that step rank
    the checkpoint (set ``best_metric_key``, for example to ``eval_loss``). Supports one process, and several with
    DistributedDataParallel; not DeepSpeed and FSDP.
    """

    def __init__(self, directory: str | Path, options: CheckpointOptions | None = None) -> None:
        self._directory = directory
        self._options = options or CheckpointOptions()
        self._trainer: Any = None
        self._checkpointer: Checkpointer | None = None
        self._restore_from: str | None = None
        self._resume_directory: str | None = None
        self._random_state: DeferredRandomState | None = None
        self._is_due = False
        self._metrics: dict[str, float] = {}

    def resume(self, trainer: Any) -> str | None:
        """Prepare *trainer* to continue from the newest checkpoint; return the argument of its ``train``. Collective.

        Call it before each ``trainer.train(resume_from_checkpoint=...)``. Returns None in a new run. Otherwise it
        is a temporary directory with the TrainerState, by which the Trainer finds its position in the data; the other
        state is loaded when training begins. Raises :class:`RecipeError` for settings that are not supported.
        """
        _check(trainer)
        self.close()
        self._trainer = trainer
        saved = _TrainerStateText()
        # Only the TrainerState: the model may be on another device, and wrapped, when training begins.
        only_text = dataclasses.replace(self._options, allow_missing_state=_ALWAYS_SAVED)
        group = gloo_group()
        reader = Checkpointer(self._directory, group=group, options=only_text)
        try:
            resumed = reader.load({"trainer_state": saved})
        finally:
            reader.close()
        options = self._options
        if resumed is not None:
            # Its files were verified a moment ago.
            options = dataclasses.replace(options, restore_from=str(resumed.path), verify="size")
        self._checkpointer = Checkpointer(self._directory, group=group, options=options)
        self._checkpointer.open()
        if resumed is None:
            return None
        self._resume_directory = tempfile.mkdtemp(prefix="automodel-ckpt-")
        Path(self._resume_directory, "trainer_state.json").write_text(saved.text)
        # The Trainer reads weights from the directory before it wraps the model; there are none in it. The callback
        # loads them when training begins.
        trainer._load_from_checkpoint = lambda *_, **__: None
        return self._resume_directory

    def close(self) -> None:
        """Wait for saves in progress and release the run directory. The end of training calls it."""
        if self._resume_directory is not None:
            shutil.rmtree(self._resume_directory)
            self._resume_directory = None
            del self._trainer._load_from_checkpoint
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()

    # ---------------------------------------------------------------- events of the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Load the checkpoint that :meth:`resume` chose."""
        checkpointer = self._open_checkpointer()
        self._random_state = DeferredRandomState(args.seed, args.process_index)
        model = parts["model"]
        if isinstance(model, PreTrainedModel):
            tokenizer = parts["processing_class"]
            checkpointer.assets["model"] = HFAssets.from_model(model, tokenizer=tokenizer)
        if self._resume_directory is None:
            return
        checkpointer.load(self._state(state, parts))
        shutil.rmtree(self._resume_directory)
        self._resume_directory = None
        del self._trainer._load_from_checkpoint

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the last step of the epoch before, or continue from it."""
        self._save_if_due(state, parts)
        is_start_of_epoch = state.epoch is None or state.epoch == int(state.epoch)
        # Within an epoch, what the data loader draws at its start must not follow the restored state.
        if is_start_of_epoch or args.ignore_data_skip:
            self._restore_random_state()

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the step before, or continue from it."""
        self._save_if_due(state, parts)
        self._restore_random_state()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Wait until the save in progress has copied the weights."""
        self._open_checkpointer().await_copies()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """Take over a save that the Trainer is about to make."""
        self._is_due = self._is_due or control.should_save
        control.should_save = False
        return control

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Keep the metrics for a save of this step."""
        self._metrics = dict(parts["metrics"])

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the last step, wait for the save, and release the run directory."""
        self._save_if_due(state, parts, last=True)
        self._open_checkpointer().wait_for_save()
        self.close()

    # ---------------------------------------------------------------- parts of them

    def _open_checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            raise RecipeError(
                "the callback does not know its trainer",
                where="CheckpointCallback",
                value="trainer.train() without resume()",
                hint="trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))",
            )
        return self._checkpointer

    def _restore_random_state(self) -> None:
        if self._random_state is not None:
            self._random_state.restore()

    def _save_if_due(self, state: Any, parts: Mapping[str, Any], *, last: bool = False) -> None:
        metrics, self._metrics = self._metrics, {}
        if not self._is_due:
            return
        self._is_due = False
        self._trainer.store_flos()
        # state.epoch is the number of epochs that are done, with a fraction: 1.0 after the first one.
        self._open_checkpointer().save(
            self._state(state, parts),
            step=state.global_step,
            epoch=max(math.ceil(state.epoch) - 1, 0),
            losses=metrics,
            validated=bool(metrics),
            last=last,
        )

    def _state(self, state: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint contains, by name."""
        found = {
            "model": parts["model"],
            "optimizer": parts["optimizer"],
            "lr_scheduler": parts["lr_scheduler"],
            "random_state": self._random_state,
            "trainer_state": _TrainerStateText(self._state_text(state)),
        }
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is not None:
            found["scaler"] = scaler
        return found

    def _state_text(self, state: Any) -> str:
        """The TrainerState as JSON, with the present state of the callbacks that have state."""
        callbacks: dict[str, Any] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                callbacks.setdefault(type(callback).__name__, []).append(callback.state())
        values = dataclasses.asdict(dataclasses.replace(state, stateful_callbacks=callbacks))
        return json.dumps(values)


def _check(trainer: Any) -> None:
    """Raise :class:`RecipeError` for settings of the Trainer with which a checkpoint would not be complete."""
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        if getattr(trainer, name, False):
            raise RecipeError(
                "CheckpointCallback supports one process, and several with DistributedDataParallel",
                where="Trainer",
                value=f"{name} is true",
                hint="use the Trainer's own checkpoints, and ckpt import --training-state to continue here",
            )
    if trainer.args.save_strategy == SaveStrategy.BEST or trainer.args.load_best_model_at_end:
        raise RecipeError(
            "the callback replaces the Trainer's checkpoints, of which the best one would be chosen",
            where="TrainingArguments",
            value=f"save_strategy={trainer.args.save_strategy}, "
            f"load_best_model_at_end={trainer.args.load_best_model_at_end}",
            hint="use save_strategy='steps' or 'epoch', and "
            "CheckpointOptions(best_metric_key='eval_loss', keep_best=1): LOWEST_VAL is the best checkpoint",
        )
