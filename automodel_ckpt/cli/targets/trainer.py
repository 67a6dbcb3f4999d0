"""``ckpt export --to trainer``: a directory that transformers' Trainer resumes from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.model_parameters import parameters_in
from automodel_ckpt.cli.common.paths import whole_checkpoint
from automodel_ckpt.cli.targets.target import Option, Target, finish, log

if TYPE_CHECKING:
    from automodel_ckpt.convert.targets.trainer import Intervals

_CALLBACK = Option(
    "--callback",
    "class of a callback with state (ExportableState) that the Trainer will have; repeat for several. "
    "EarlyStoppingCallback is always among them",
    {"metavar": "CLASS", "action": "append"},
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.trainer import export_trainer

    # As the other targets, it accepts the directory model/ of a checkpoint.
    source = whole_checkpoint(source)
    report = export_trainer(
        source,
        arguments.output,
        parameters_in=parameters_in,
        intervals=_intervals(source),
        callbacks=arguments.callback or (),
        log=log,
    )
    return finish(arguments, report, f"state of {counted(report.num_parameters, 'parameter')}")


def _intervals(source: Path) -> Intervals:
    """Return the intervals of the recipe in the checkpoint, and the Trainer's defaults for others."""
    from automodel_ckpt.checkpoint.files.layout import CONFIG
    from automodel_ckpt.config.help.changes import saved_recipe
    from automodel_ckpt.convert.targets.trainer import Intervals

    keys = {
        "micro_batch_size": "local_batch_size",
        "save_steps": "ckpt_every_steps",
        "eval_steps": "val_every_steps",
    }
    recipe = saved_recipe(source / CONFIG)
    found: dict[str, int] = {}
    for name, key in keys.items():
        value = recipe.get(f"step_scheduler.{key}", "")
        # ckpt_every_steps may also be `auto` or null.
        if value.isdecimal() and 0 < int(value) < 2**31:
            found[name] = int(value)
    return Intervals(**found)


TARGET = Target(
    "trainer",
    "a checkpoint that transformers' Trainer resumes from",
    "checkpoint-N next to the checkpoint",
    _run,
    (_CALLBACK,),
    resumes=True,
)
