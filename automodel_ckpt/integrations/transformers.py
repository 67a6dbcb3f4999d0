"""Checkpoints for transformers' Trainer: :class:`CheckpointCallback` replaces the Trainer's saves.

    checkpoints = CheckpointCallback("run", CheckpointOptions(keep_last=2))
    trainer = Trainer(..., args=TrainingArguments(save_steps=100), callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))

What this module uses of the Trainer was read in transformers 5.23 (trainer.py, trainer_callback.py).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, HFAssets, Resumed
from automodel_ckpt.checkpoint.saving.adapter_assets import is_exportable
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.integrations.attributes import TrainerAttributes, callback_digests
from automodel_ckpt.integrations.state import DeferredRandomState, gloo_group

__all__ = ["CheckpointCallback"]

log = logging.getLogger("automodel_ckpt")

_ALWAYS_SAVED = (
    "model",
    "optimizer",
    "lr_scheduler",
    "random_state",
    "scaler",
    "attributes",
    "ref_model",
)


class _TrainerStateText:
    """The Trainer's TrainerState as JSON text, the content of its file trainer_state.json, and unknown attributes."""

    def __init__(self, text: str = "", unknown: Mapping[str, bool] | None = None) -> None:
        self.text = text
        self.unknown = dict(unknown or {})

    def state_dict(self) -> dict[str, Any]:
        return {"json": self.text, "unknown": self.unknown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.text = state["json"]
        # Checkpoints of earlier versions do not have it.
        self.unknown = state.get("unknown", {})


class CheckpointCallback(TrainerCallback):
    """Saves runs of transformers' Trainer in *directory*, whenever the Trainer would save, and resumes them exactly.

    A save has the model, the optimizer, the learning-rate schedule, the gradient scaler, the random state of each rank,
    the TrainerState with the state of callbacks (transformers' ExportableState), and the attributes of the Trainer that
    change during training, such as the rollouts of GRPO. It is made after the logs and the evaluation of its step: just
    before the next step or epoch begins, or at the end of training. The metrics of an evaluation in that step rank the
    checkpoint. Supports one process, and several with DistributedDataParallel or FSDP2; not DeepSpeed and FSDP1.

    Args:
        directory: The run directory.
        options: What to keep, and how to save. By default, ``save_total_limit``, ``metric_for_best_model`` and
            ``greater_is_better`` of the TrainingArguments decide what is kept. With ``load_best_model_at_end``, the
            latter two decide in any case which checkpoint is the best one.
        saved: Attributes of a Trainer's subclass that a resume needs, and that :mod:`attributes` does not know.
        not_saved: Attributes that change during training without effect on a resumed run, such as a cache.
    """

    def __init__(
        self,
        directory: str | Path,
        options: CheckpointOptions | None = None,
        *,
        saved: Collection[str] = (),
        not_saved: Collection[str] = (),
    ) -> None:
        self._directory = directory
        self._options = options
        self._saved, self._not_saved = tuple(saved), tuple(not_saved)
        self._trainer: Any = None
        self._checkpointer: Checkpointer | None = None
        self._resumed: Resumed | None = None
        self._unknown_there: frozenset[str] = frozenset()
        self._resume_directory: str | None = None
        self._random_state: DeferredRandomState | None = None
        self._attributes: TrainerAttributes | None = None
        self._callbacks_before: dict[str, str] | None = None
        self._is_due = False
        self._metrics: dict[str, float] = {}
        self._warned: set[str] = set()

    def resume(self, trainer: Any) -> str | None:
        """Prepare *trainer* to continue from the newest checkpoint; return the argument of its ``train``. Collective.

        Call it before each ``trainer.train(resume_from_checkpoint=...)``. Returns None in a new run. Otherwise it
        is a temporary directory with the TrainerState, by which the Trainer finds its position in the data; the other
        state is loaded when training begins.

        Raises:
            RecipeError: for settings that are not supported, and for attributes of the trainer's class that have
                changed during training, but are neither in *saved* nor in *not_saved*.
            CheckpointUnusable: if no checkpoint can be used.
        """
        _check(trainer)
        self.close()
        self._trainer = trainer
        # Of a training that was interrupted in this process.
        self._is_due, self._metrics = False, {}
        options = self._chosen_options()
        saved = _TrainerStateText()
        # Only the TrainerState: the model may be on another device, and wrapped, when training begins.
        only_text = dataclasses.replace(options, allow_missing_state=self._names(options))
        group = gloo_group()
        reader = Checkpointer(self._directory, group=group, options=only_text)
        try:
            self._resumed = reader.load({"trainer_state": saved})
        finally:
            reader.close()
        if self._resumed is not None:
            self._check_attributes(saved.unknown)
            self._unknown_there = frozenset(saved.unknown)
            # Its files were verified a moment ago.
            path = str(self._resumed.path)
            options = dataclasses.replace(options, restore_from=path, verify="size")
        self._checkpointer = Checkpointer(self._directory, group=group, options=options)
        self._checkpointer.open()
        # Callbacks after this one can ask for a save, too.
        trainer._save_checkpoint = self._take_over
        if self._resumed is None:
            return None
        self._resume_directory = tempfile.mkdtemp(prefix="automodel-ckpt-")
        Path(self._resume_directory, "trainer_state.json").write_text(saved.text)
        # The Trainer reads weights from the directory before it wraps the model; there are none in it. The callback
        # loads them when training begins.
        trainer._load_from_checkpoint = lambda *_, **__: None
        return self._resume_directory

    def close(self) -> None:
        """Wait for saves in progress and release the run directory. The end of training calls it."""
        self._remove_resume_directory()
        if self._checkpointer is not None:
            del self._trainer._save_checkpoint
            vars(self._trainer).pop("_run_epoch", None)
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()

    # ---------------------------------------------------------------- events of the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """Load the checkpoint that :meth:`resume` chose."""
        checkpointer = self._open_checkpointer()
        step = 0 if self._resumed is None else self._resumed.step
        if state.global_step != step:
            raise RecipeError(
                "the Trainer continues from another step than the newest checkpoint of the callback",
                where="trainer.train(resume_from_checkpoint=...)",
                value=f"step {state.global_step}, not {step}",
                hint=_TRAIN,
            )
        self._random_state = DeferredRandomState(args.seed, args.process_index)
        self._attributes = TrainerAttributes(self._trainer, self._saved, self._not_saved)
        model = parts["model"]
        if isinstance(model, PreTrainedModel) or is_exportable(model):
            given = {"tokenizer": parts["processing_class"]}
            if is_exportable(model):
                given["run"] = checkpointer.directory
            checkpointer.assets["model"] = HFAssets.from_model(model, **given)
        self._callbacks_before = None
        if self._resumed is None:
            return control
        found = self._state(state, parts)
        # There, modules that were not in *saved* are among the attributes.
        checkpointer.load({name: found[name] for name in found if name not in self._unknown_there})
        self._remove_resume_directory()
        self._restore_callbacks(state.stateful_callbacks)
        if state.global_step >= state.max_steps or _is_stopped_early(self._trainer):
            # The Trainer would make one more step within the epoch.
            self._trainer._run_epoch = lambda **_: None
            control.should_training_stop = True
        return control

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
        if self._callbacks_before is None:
            self._callbacks_before = callback_digests(self._trainer)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Wait until the save in progress has copied the weights."""
        self._open_checkpointer().await_copies()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """Take over a save that the Trainer is about to make."""
        self._is_due = self._is_due or control.should_save
        control.should_save = False
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """Take over a save, and note the order of the next epoch."""
        if self._attributes is not None:
            self._attributes.begin_epoch()
        return self.on_step_end(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Keep the metrics for a save of this step."""
        # There is a call for each of several data sets.
        self._metrics.update(parts["metrics"])

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the last step, wait for the save, load the best model if asked, and release the run directory."""
        self._save_if_due(state, parts, last=True)
        checkpointer = self._open_checkpointer()
        checkpointer.wait_for_save()
        self.close()
        if args.load_best_model_at_end:
            self._load_best(parts["model"], checkpointer.directory)

    # ---------------------------------------------------------------- parts of them

    def _take_over(self, *_: Any, **__: Any) -> None:
        """Save before the next step what the Trainer would save now."""
        self._is_due = True

    def _open_checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            raise RecipeError(
                "the callback does not know its trainer",
                where="CheckpointCallback",
                value="trainer.train() without resume()",
                hint=_TRAIN,
            )
        return self._checkpointer

    def _chosen_options(self) -> CheckpointOptions:
        """The options of the checkpoints: what is not saved may be missing in either direction."""
        options = _options_of(self._trainer.args, self._options)
        allowed = (*options.allow_missing_state, *self._not_saved)
        return dataclasses.replace(options, allow_missing_state=allowed)

    def _names(self, options: CheckpointOptions) -> tuple[str, ...]:
        """The names that a checkpoint can have in addition to the TrainerState."""
        return (*options.allow_missing_state, *_ALWAYS_SAVED, *self._saved)

    def _remove_resume_directory(self) -> None:
        if self._resume_directory is not None:
            shutil.rmtree(self._resume_directory)
            self._resume_directory = None
            del self._trainer._load_from_checkpoint

    def _restore_random_state(self) -> None:
        if self._random_state is not None:
            self._random_state.restore()

    def _restore_callbacks(self, states: Mapping[str, list[dict[str, Any]]]) -> None:
        """Restore the callbacks that have state. *states* has a list for each name of a class."""
        remaining = {name: list(each) for name, each in states.items()}
        for callback in _exportable_callbacks(self._trainer):
            if saved := remaining.get(type(callback).__name__):
                for name, value in saved.pop(0)["attributes"].items():
                    setattr(callback, name, value)

    def _warn_of_callbacks(self) -> None:
        """Warn once of each attribute of a callback that has changed, and that a checkpoint does not have."""
        before, now = self._callbacks_before or {}, callback_digests(self._trainer)
        changed = [name for name, digest in now.items() if digest != before.get(name)]
        if new := [name for name in changed if name not in self._warned]:
            self._warned.update(new)
            message = (
                "checkpoints do not have what callbacks changed: %s. If a resume needs it, "
                "derive their classes from transformers.trainer_callback.ExportableState"
            )
            log.warning(message, ", ".join(new))

    def _load_best(self, model: Any, directory: Path) -> None:
        """Load the weights of the best checkpoint in *directory* into *model*."""
        if not (directory / "LOWEST_VAL").exists():
            log.warning(
                "there is no best model to load: no checkpoint has the metric of an evaluation"
            )
            return
        options = self._chosen_options()
        only_model = dataclasses.replace(
            options,
            restore_from="LOWEST_VAL",
            allow_missing_state=(*self._names(options), "trainer_state"),
        )
        reader = Checkpointer(self._directory, group=gloo_group(), options=only_model)
        try:
            reader.load({"model": model})
        finally:
            reader.close()

    def _check_attributes(self, unknown: Mapping[str, bool]) -> None:
        """Raise :class:`RecipeError` if the class of the trainer has state that is in no table or argument."""
        missing = [name for name in unknown if name not in (*self._saved, *self._not_saved)]
        if missing:
            kind = type(self._trainer).__name__
            raise RecipeError(
                f"the resumed run could differ: attributes of {kind} changed while it trained",
                where="CheckpointCallback",
                value=", ".join(missing),
                hint=_unknown_hint(missing, unknown),
            )

    def _unknown(self) -> dict[str, bool]:
        """Return the attributes that have changed and are in no table or argument; warn of each once."""
        assert self._attributes is not None
        unknown = self._attributes.unknown()
        new = [name for name in unknown if name not in self._warned]
        if new:
            self._warned.update(new)
            message = "%s changes %s while it trains: a resume will ask what they are. %s"
            names = ", ".join(new)
            log.warning(message, type(self._trainer).__name__, names, _unknown_hint(new, unknown))
        return unknown

    def _save_if_due(self, state: Any, parts: Mapping[str, Any], *, last: bool = False) -> None:
        metrics, self._metrics = self._metrics, {}
        if not self._is_due:
            return
        self._is_due = False
        self._warn_of_callbacks()
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
        assert self._attributes is not None
        found = {
            "model": parts["model"],
            "optimizer": parts["optimizer"],
            "lr_scheduler": parts["lr_scheduler"],
            "random_state": self._random_state,
            "trainer_state": _TrainerStateText(self._state_text(state), self._unknown()),
            "attributes": self._attributes,
            **self._attributes.modules(),
        }
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is not None:
            found["scaler"] = scaler
        return found

    def _state_text(self, state: Any) -> str:
        """The TrainerState as JSON, with the present state of the callbacks that have state."""
        callbacks: dict[str, Any] = {}
        for callback in _exportable_callbacks(self._trainer):
            callbacks.setdefault(type(callback).__name__, []).append(callback.state())
        values = dataclasses.asdict(dataclasses.replace(state, stateful_callbacks=callbacks))
        return json.dumps(values)


_TRAIN = "trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))"


def _unknown_hint(names: Collection[str], unknown: Mapping[str, bool]) -> str:
    """Return what to do about attributes *names*. *unknown* states which of them a checkpoint has."""
    stored = tuple(name for name in names if unknown[name])
    others = tuple(name for name in names if not unknown[name])
    hints = [f"CheckpointCallback(..., not_saved={tuple(names)}) continues without them"]
    if stored:
        hints.insert(0, f"CheckpointCallback(..., saved={stored}) restores them")
    if others:
        hints.append(f"to save {', '.join(others)}, give it state_dict and load_state_dict")
    return "; ".join(hints)


def _options_of(args: Any, given: CheckpointOptions | None) -> CheckpointOptions:
    """Return the options *given*, with those that the TrainingArguments ask for."""
    if given is not None and not args.load_best_model_at_end:
        return given
    limit = args.save_total_limit
    if given is None:
        # The Trainer does not remove checkpoints if the limit is 0.
        given = CheckpointOptions(
            keep_last=limit if limit and limit > 0 else None,
            keep_best=int(args.load_best_model_at_end),
        )
    metric = args.metric_for_best_model or "loss"
    return dataclasses.replace(
        given,
        best_metric_key=metric if metric.startswith("eval_") else f"eval_{metric}",
        best_mode="max" if args.greater_is_better else "min",
    )


def _check(trainer: Any) -> None:
    """Raise :class:`RecipeError` for settings of the Trainer with which a checkpoint would not be complete."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    is_fsdp1 = trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2
    if trainer.is_deepspeed_enabled or is_fsdp1:
        raise RecipeError(
            "CheckpointCallback supports one process, and several with DistributedDataParallel or FSDP2",
            where="Trainer",
            value="FSDP1" if is_fsdp1 else "DeepSpeed",
            hint="set version: 2 in fsdp_config (accelerate: fsdp_version: 2), or use the Trainer's own checkpoints",
        )
    if trainer.args.save_strategy == SaveStrategy.BEST:
        raise RecipeError(
            "the callback replaces the Trainer's checkpoints, of which only the best would be saved",
            where="TrainingArguments",
            value="save_strategy=best",
            hint="use save_strategy='steps' and load_best_model_at_end=True: LOWEST_VAL is the best checkpoint",
        )


def _is_stopped_early(trainer: Any) -> bool:
    return any(
        isinstance(callback, EarlyStoppingCallback)
        and callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in _exportable_callbacks(trainer)
    )


def _exportable_callbacks(trainer: Any) -> list[Any]:
    """The callbacks with state that a checkpoint has."""
    callbacks = trainer.callback_handler.callbacks
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]
