"""A checkpoint as a file of PyTorch Lightning (``.ckpt``), from which its Trainer continues. Imports no torch.

``Trainer.fit(module, ckpt_path=FILE)`` loads the model, the optimizer, the LR schedule and the progress of its loops
(source: lightning 2.6, ``CheckpointConnector`` and the loops in ``lightning.pytorch.loops``). The module must create
the optimizer with the same groups of parameters in the same order: Lightning numbers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from automodel_ckpt.checkpoint.files.type_aliases import Strings, ValueDict
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import ArchiveTensor
from automodel_ckpt.checkpoint.sources.source import is_checkpoint
from automodel_ckpt.convert.formats.torch.run_state import RunState, read_run_state
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.torch_file import (
    numbered_state,
    publish_archive,
    state_dict_of,
)

VERSION = "2.6.0"
"""The files have the format of this version of Lightning. Newer versions migrate it when they load the file."""
_READY = ("ready", "completed")
_STARTED = ("ready", "completed", "started", "processed")


def write(export: Export, *, prefix: str | None = None) -> ExportReport:
    """Write a checkpoint as a file of Lightning. A model of another program has no training state: then the file has
    only the weights.

    *prefix* is the attribute of the LightningModule that has the model, with a dot (default: ``model.``). Only the
    weights are cast, not the optimizer's state.
    """
    prefix = "model." if prefix is None else prefix
    export.file(".ckpt")
    export.check()
    root = export.source.root
    run = read_run_state(root) if is_checkpoint(root) else None
    state_dict = state_dict_of(export, export.source, prefix)
    export.warn(*_warnings(run, state_dict, prefix))
    publish_archive(export, _content(state_dict, run))
    return export.report(len(state_dict))


def _warnings(
    run: RunState | None, state_dict: Mapping[str, ArchiveTensor], prefix: str
) -> Iterator[str]:
    if run is None:
        yield "there is no training state: Lightning starts at step 0 from these weights"
        return
    names = {name.removeprefix(prefix) for name in state_dict}
    trained = (name for group in run.groups for name in group.parameters)
    # Files can have other names: transformers merges the experts of a layer in memory.
    renamed = next((name for name in trained if name not in names), None)
    if renamed is not None:
        yield (
            f"the parameter {renamed!r} has another name in the model's files: load the state dict with a "
            "transformers model of this version"
        )


def _content(state_dict: Mapping[str, ArchiveTensor], run: RunState | None) -> ValueDict:
    step = 0 if run is None else run.step
    epochs_done = 0 if run is None else run.epochs_done
    content = {
        "epoch": epochs_done,
        "global_step": step,
        "pytorch-lightning_version": VERSION,
        "state_dict": state_dict,
        "callbacks": {},
    }
    if run is None:
        return content
    schedule = run.schedule
    content["loops"] = _loops(run)
    content["optimizer_states"] = [numbered_state(run, run.groups)]
    content["lr_schedulers"] = [] if schedule is None else [dict(schedule)]
    return content


# ---------------------------------------------------------------- the progress of Lightning's loops


def _loops(run: RunState) -> ValueDict:
    """Return the progress of the loops, with one batch for each optimizer step.

    Within an epoch, it is what ModelCheckpoint saves after a batch: the batch is processed and not yet completed, which
    Lightning counts when it resumes. Between two epochs, it is what ``Trainer.save_checkpoint`` saves after an epoch.
    """
    in_epoch = run.steps_in_epoch
    epochs = dict.fromkeys(_STARTED, run.epochs_done)
    if in_epoch:
        batches = dict.fromkeys(_STARTED, in_epoch) | {"completed": in_epoch - 1}
        total = dict.fromkeys(_STARTED, run.step) | {"completed": run.step - 1}
        epochs |= {"ready": run.epochs_done + 1, "started": run.epochs_done + 1}
    else:
        batches = dict.fromkeys(_STARTED, run.step // max(run.epochs_done, 1))
        total = dict.fromkeys(_STARTED, run.step)
    is_last = not in_epoch and run.epochs_done > 0
    ended = run.step - 1 if in_epoch else run.step
    fit_loop = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": ended},
        "epoch_loop.batch_progress": {
            "total": total,
            "current": batches,
            "is_last_batch": is_last,
        },
        "epoch_loop.scheduler_progress": _progress(run.step, in_epoch, _READY),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _progress(run.step, in_epoch, _READY),
                "zero_grad": _progress(run.step, in_epoch, ("ready", "completed", "started")),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _progress(0, 0, _READY),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": _no_batches(),
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
    }
    return {
        "fit_loop": fit_loop,
        "validate_loop": {"state_dict": {}, "batch_progress": _no_batches()},
        "test_loop": {"state_dict": {}, "batch_progress": _no_batches()},
        # The loop of predictions has no last batch.
        "predict_loop": {"state_dict": {}, "batch_progress": _progress(0, 0, _STARTED)},
    }


def _progress(total: int, current: int, keys: Strings) -> ValueDict:
    return {"total": dict.fromkeys(keys, total), "current": dict.fromkeys(keys, current)}


def _no_batches() -> ValueDict:
    return {**_progress(0, 0, _STARTED), "is_last_batch": False}
