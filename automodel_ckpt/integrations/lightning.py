"""Checkpoints for Lightning's Trainer: :class:`CheckpointCallback` saves runs and resumes them.

    checkpoints = CheckpointCallback("run", every_n_steps=100, options=CheckpointOptions(keep_last=2))
    trainer = lightning.Trainer(callbacks=[checkpoints], enable_checkpointing=False, ...)
    trainer.fit(module)     # continues from the newest checkpoint in the directory

What this module uses of the Trainer was read in lightning 2.6 (pytorch/loops, pytorch/trainer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.integrations.state import DeferredRandomState, gloo_group

__all__ = ["CheckpointCallback"]


class _TrainerState:
    """The progress of the Trainer's loops with the state of its data loaders, and the state of its other parts."""

    checkpoint_scope = "dp_rank"

    def __init__(self, trainer: Any, own: CheckpointCallback) -> None:
        self._trainer = trainer
        self._callbacks = {
            callback.state_key: callback
            for callback in trainer.callbacks
            if callback is not own and type(callback) is not _LastCallback
        }

        self._metrics: Mapping[str, torch.Tensor] = {}

    def restore_metrics(self) -> None:
        """Give the Trainer the metrics that were loaded: EarlyStopping needs them where a resume ends an epoch."""
        self._trainer.callback_metrics.update(self._metrics)
        self._metrics = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        metrics: dict[str, torch.Tensor] = {}
        for name, value in trainer.callback_metrics.items():
            metrics[name] = value.detach().cpu().clone()
        callbacks: dict[str, Any] = {}
        for key, callback in self._callbacks.items():
            callbacks[key] = callback.state_dict()
        state = {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": callbacks,
            "precision": trainer.precision_plugin.state_dict(),
            "metrics": metrics,
        }
        if trainer.datamodule is not None:
            state["datamodule"] = trainer.datamodule.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        fit_loop = trainer.fit_loop
        fit_loop.load_state_dict(state["loops"])

        def load_loaders() -> None:
            states, fit_loop._combined_loader_states_to_load = (
                fit_loop._combined_loader_states_to_load,
                [],
            )
            if states:
                fit_loop._combined_loader._load_state_dicts(states)

        # After the last step of an epoch, Lightning does not load the state of loaders: the next epoch would have the
        # order of the first one.
        fit_loop._load_combined_loader_states = load_loaders
        self._metrics = state["metrics"]
        for key, callback_state in state["callbacks"].items():
            if key in self._callbacks and callback_state:
                self._callbacks[key].load_state_dict(callback_state)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])


class _LastCallback(Checkpoint):  # type: ignore[misc]
    """Calls *save* after validations and epochs, when the module, EarlyStopping and other callbacks have seen them."""

    def __init__(self, save: Callable[[Any], None]) -> None:
        self._save = save

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer)
        # Lightning would not step ReduceLROnPlateau after an epoch that it resumed.
        trainer.fit_loop._restarting = False


class CheckpointCallback(Callback):  # type: ignore[misc]
    """Saves runs of Lightning's Trainer in *directory* every *every_n_steps* steps, and resumes them exactly.

    A save has the module, the optimizers, the learning-rate schedules, the random state of each rank, the progress of
    the loops, and the state of other callbacks, of the precision plugin, of the data module and of data loaders that
    have state. The state of the last step of an epoch is saved when the epoch's validation is done; its metrics rank
    the checkpoint (``best_metric_key``). Supports one device and DDP.

    A resume is exact with data loaders that have ``state_dict`` and draw no global random numbers.
    Other loaders begin an epoch again after a resume within it, and shuffle differently. A run that EarlyStopping has
    stopped makes no step when it is started again.
    """

    def __init__(
        self,
        directory: str | Path,
        every_n_steps: int,
        options: CheckpointOptions | None = None,
    ) -> None:
        self._directory = directory
        self._every_n_steps = every_n_steps
        self._options = options or CheckpointOptions()
        self._checkpointer: Checkpointer | None = None
        self._random_state: DeferredRandomState | None = None
        self._trainer_state: _TrainerState | None = None
        self._last_saved = 0

    # ---------------------------------------------------------------- events of the Trainer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Add what saves after validations and epochs."""
        if stage == "fit":
            trainer.callbacks.append(_LastCallback(self._save_if_due))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest checkpoint. Raises :class:`RecipeError` for settings that are not supported."""
        strategy = trainer.strategy
        is_ddp = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
        if not is_ddp and not isinstance(strategy, SingleDeviceStrategy):
            raise RecipeError(
                "CheckpointCallback supports one device, and several with DDP",
                where="Trainer(strategy=...)",
                value=type(strategy).__name__,
                hint="use Lightning's own checkpoints, and ckpt import --training-state to continue here",
            )
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == "step":
                raise RecipeError(
                    "Lightning steps this schedule after a save, so that a resumed run would miss a step",
                    where="configure_optimizers",
                    value="ReduceLROnPlateau with interval='step'",
                    hint="use interval='epoch'",
                )
        self._checkpointer = Checkpointer(
            self._directory, group=gloo_group(), options=self._options
        )
        self._checkpointer.open()
        # The seed matters on another number of ranks only.
        self._random_state = DeferredRandomState(0, trainer.global_rank)
        self._trainer_state = _TrainerState(trainer, self)
        self._checkpointer.load(self._state(trainer))
        self._last_saved = trainer.global_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the metrics, and the random state after the data loader of a resumed epoch has drawn numbers."""
        if self._random_state is not None:
            self._random_state.restore()
        if self._trainer_state is not None:
            self._trainer_state.restore_metrics()
        if trainer.fit_loop.resumed_on_epoch_end:
            self._step_schedules(trainer, pl_module)
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyStopping) and callback.wait_count >= callback.patience:
                # Otherwise, a run that it stopped would continue for an epoch whenever it is started again.
                trainer.should_stop = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Wait until the save in progress has copied the weights."""
        if self._checkpointer is not None:
            self._checkpointer.await_copies()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save within an epoch, where no validation follows."""
        loop = trainer.fit_loop
        is_validated = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        if not trainer.is_last_batch and not is_validated:
            self._save_if_due(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the save in progress. Raises :class:`SaveFailed` where it failed."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_save()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the run directory."""
        trainer.callbacks = [each for each in trainer.callbacks if type(each) is not _LastCallback]
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the run directory."""
        self._close()

    # ---------------------------------------------------------------- parts of them

    def _close(self) -> None:
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()

    def _step_schedules(self, trainer: Any, pl_module: Any) -> None:
        """Step the schedules that follow a metric: Lightning does so after the last hook of an epoch."""
        for config in trainer.lr_scheduler_configs:
            is_due = config.interval == "epoch" and trainer.current_epoch % config.frequency == 0
            if config.reduce_on_plateau and is_due and config.monitor in trainer.callback_metrics:
                metric = trainer.callback_metrics[config.monitor]
                pl_module.lr_scheduler_step(config.scheduler, metric)

    def _save_if_due(self, trainer: Any) -> None:
        step = trainer.global_step
        # With accumulated gradients, several batches have the same step.
        if step % self._every_n_steps != 0 or step == self._last_saved:
            return
        assert self._checkpointer is not None
        self._last_saved = step
        metrics: dict[str, float] = {}
        if trainer.is_last_batch:
            for name, value in trainer.callback_metrics.items():
                metrics[name] = float(value)
        self._checkpointer.save(
            self._state(trainer),
            step=step,
            epoch=trainer.current_epoch,
            losses=metrics,
            validated=self._options.best_metric_key in metrics,
            last=step == trainer.max_steps,
        )

    def _state(self, trainer: Any) -> dict[str, Any]:
        """What a checkpoint contains, by name."""
        state: dict[str, Any] = {"model": trainer.lightning_module}
        for number, optimizer in enumerate(trainer.optimizers):
            name = "optimizer" if number == 0 else f"optimizer_{number}"
            state[name] = optimizer
        for number, config in enumerate(trainer.lr_scheduler_configs):
            name = "lr_scheduler" if number == 0 else f"lr_scheduler_{number}"
            state[name] = config.scheduler
        state["random_state"] = self._random_state
        state["trainer"] = self._trainer_state
        return state
