"""A checkpoint as ``checkpoint-N/`` of transformers' Trainer, from which it resumes. Imports no torch.

``Trainer.train(resume_from_checkpoint=DIR)`` loads the weights, ``optimizer.pt``, ``scheduler.pt`` and
``trainer_state.json``; a missing ``rng_state.pth`` is reported and accepted (source: transformers 5.23). The optimizer
has two groups, of parameters with and without weight decay, and numbers the parameters through both of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Counts, ValueDict, Values
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import write_torch_archive
from automodel_ckpt.checkpoint.sources.source import MODEL, is_checkpoint
from automodel_ckpt.convert.formats.format import (
    ModelParameter,
    ParameterGroup,
    Parameters,
)
from automodel_ckpt.convert.formats.torch.run_state import RunState, read_run_state
from automodel_ckpt.convert.formats.trainer import OPTIMIZER_FILE, SCHEDULER_FILE, STATE_FILE
from automodel_ckpt.convert.imports.training_import import lambda_schedule
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.torch_file import numbered_state
from automodel_ckpt.errors import CheckpointUnusable, unusable

NOT_TRANSFERRED = ("random numbers", "order of the data", "best metric")
"""What else the Trainer's checkpoints have, in words."""
_WEIGHTS = ".weights"
# The callbacks of transformers 5.23 that have state.
_CALLBACKS = ("EarlyStoppingCallback",)


# What the Trainer takes from ``trainer_state.json`` instead of its arguments, in steps. The batch size of a rank's
# forward pass is only compared with its arguments.
_INTERVALS = {"logging_steps": 1, "save_steps": 500, "eval_steps": 500, "train_batch_size": 1}


def write(
    export: Export,
    *,
    parameters_in: Callable[[Path], Parameters],
    intervals: Counts,
    callbacks: Sequence[str] | None = None,
) -> ExportReport:
    """Write the checkpoint of a run as a checkpoint of transformers' Trainer, by default ``checkpoint-N``.

    *parameters_in* is called with the directory of the exported config.json. The result lists the model's parameters.
    *intervals* replace the values in ``_INTERVALS``. They are stated in ``trainer_state.json``, and so are *callbacks*,
    the classes with state that a script adds to the Trainer. Its next save fails without them. Memory: one block of a
    tensor.
    """
    source, log = export.source.root, export.log
    if not is_checkpoint(source):
        raise _unusable("this is not a checkpoint of a run", source, "no training state")
    manifest = Manifest.read(source)
    run = read_run_state(source)
    what = "there is no training state that the Trainer can load"
    if os.path.lexists(source / MODEL / layout.ADAPTER_MODEL):
        raise _unusable(what, source, "an adapter", merge=True)
    if run is None:
        raise _unusable(what, source, "weights only")
    export.directory("", f"checkpoint-{run.step}")
    with export.published_directory() as directory:
        weights = consolidate(source, directory / _WEIGHTS, keep_dtypes=True, log=log)
        for path in (directory / _WEIGHTS).iterdir():
            path.rename(directory / path.name)
        shutil.rmtree(directory / _WEIGHTS)
        parameters = parameters_in(directory)()
        groups = list(_groups(run, parameters, source))
        _write_archive(directory / OPTIMIZER_FILE, numbered_state(run, groups))
        base_rates = [group.options["initial_lr"] for group in groups]
        last_rates = [group.options.get("lr", 0.0) for group in groups]
        schedule = lambda_schedule(base_rates, last_rates, run.step)
        _write_archive(directory / SCHEDULER_FILE, schedule)
        state = _trainer_state(run, manifest, intervals, (*_CALLBACKS, *(callbacks or ())))
        (directory / STATE_FILE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        stored = read_weight_map(directory / layout.HF_INDEX) or {}
    export.warnings += weights.warnings
    # The Trainer fills its model by name, and ignores tensors with other names (transformers 5.23,
    # `Trainer._load_from_checkpoint`): mixtures have a tensor for each expert in files, and one for all in memory.
    # from_pretrained() converts the names.
    unloaded = [parameter.name for parameter in parameters if parameter.name not in stored]
    if unloaded:
        export.warn(
            f"the Trainer does not load {counted(len(unloaded), 'parameter')} from these files, such as {unloaded[0]}: "
            f"give it a model that from_pretrained({str(export.target)!r}) returns"
        )
    log(f"not transferred: {', '.join(NOT_TRANSFERRED)}")
    log(
        f"the Trainer takes these from the checkpoint: logging_steps {state['logging_steps']}, "
        f"save_steps {state['save_steps']}, eval_steps {state['eval_steps']}"
    )
    num_parameters = len(run.tensors)
    summary = f"state of {counted(num_parameters, 'parameter')}"
    return export.report(weights.num_tensors, summary, step=run.step, num_parameters=num_parameters)


# ---------------------------------------------------------------- the optimizer


def _groups(
    run: RunState, model: Sequence[ModelParameter], where: Path
) -> Iterator[ParameterGroup]:
    """Yield the Trainer's two groups: the trained parameters with weight decay, then those without.

    Raises :class:`CheckpointUnusable` if the options of a group's parameters differ, because the Trainer has only these
    groups, or if the optimizer trains a parameter that the model does not have.
    """
    options_of: dict[str, Values] = {}
    for group in run.groups:
        options_of |= dict.fromkeys(group.parameters, group.options)
    unknown = sorted(options_of.keys() - {parameter.name for parameter in model})
    if unknown:
        raise _unusable(
            "the optimizer trains a parameter that the model of config.json does not have",
            where,
            unknown[0],
        )
    trained = [parameter for parameter in model if parameter.name in options_of]
    for decays in (True, False):
        names = [parameter.name for parameter in trained if parameter.decays == decays]
        options = options_of[names[0]] if names else run.groups[0].options
        for name in names:
            if options_of[name] != options:
                raise unusable(
                    "the parameters have more groups of options than the Trainer's optimizer",
                    where,
                    f"{names[0]} and {name}",
                    "the Trainer has two groups: parameters with weight decay, and norms and biases; export the "
                    "weights with --to hf",
                )
        # The Trainer always has a schedule, which needs the peak rate.
        yield ParameterGroup(tuple(names), {"initial_lr": options.get("lr", 0.0), **options})


def _trainer_state(
    run: RunState, manifest: Manifest, intervals: Counts, callbacks: Iterable[str]
) -> ValueDict:
    """Return the fields of transformers' ``TrainerState`` (5.23)."""
    names = {"train_loss": "loss", "val_loss": "eval_loss"}
    losses = {name: manifest.losses.get(key) for key, name in names.items()}
    line: ValueDict = {"epoch": float(run.epochs_done), "step": run.step}
    line |= {name: loss for name, loss in losses.items() if isinstance(loss, float)}
    control = {
        "should_epoch_stop": False,
        "should_evaluate": False,
        "should_log": False,
        "should_save": True,
        "should_training_stop": False,
    }
    # The Trainer's next save fails if the entry of a callback is missing. It appends to a list; an empty one has no
    # state to restore, while a mapping without values would replace the arguments of the script's callback.
    stateful: ValueDict = {"TrainerControl": {"args": control, "attributes": {}}}
    for name in callbacks:
        stateful.setdefault(name, [])
    return {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": float(run.epochs_done),
        "global_step": run.step,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [line],
        "max_steps": 0,
        "num_input_tokens_seen": 0,
        "num_train_epochs": 0,
        "stateful_callbacks": stateful,
        "total_flos": 0.0,
        "trial_name": None,
        "trial_params": None,
        **_INTERVALS,
        **intervals,
    }


def _write_archive(path: Path, value: Any) -> None:
    with open(path, "wb") as file:
        write_torch_archive(file, value)


def _unusable(what: str, where: Path, value: object, *, merge: bool = False) -> CheckpointUnusable:
    options = "--to hf --merge" if merge else "--to hf"
    return unusable(what, where, value, f"export the weights with {options}")
