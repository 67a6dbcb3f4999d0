"""``ckpt export --to dcp``: a directory for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import CAST_DTYPE, PREFIX, Option, Target, finish, log

_NAMES = Option(
    "--names",
    "names of the tensors of a Llama: those that torchtitan loads (default: those of Hugging Face)",
    {"choices": ["torchtitan"]},
)

_OPTIMIZER = Option(
    "--optimizer",
    "also export the optimizer, the schedule, step and epoch, as get_state_dict of torch names them; flattened: with "
    "StateDictOptions(flatten_optimizer_state_dict=True)",
    {"choices": ["nested", "flattened"]},
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.dcp import export_dcp

    report = export_dcp(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        cast_dtype=arguments.cast_dtype,
        names=arguments.names,
        optimizer=arguments.optimizer,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "dcp",
    "a directory for torch.distributed.checkpoint",
    "NAME-dcp next to the checkpoint",
    _run,
    (CAST_DTYPE, PREFIX, _NAMES, _OPTIMIZER),
)
