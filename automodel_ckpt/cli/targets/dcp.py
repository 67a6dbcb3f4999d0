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


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.dcp import export_dcp

    report = export_dcp(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        cast_dtype=arguments.cast_dtype,
        names=arguments.names,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "dcp",
    "a directory for torch.distributed.checkpoint",
    "NAME-dcp next to the checkpoint",
    _run,
    (CAST_DTYPE, PREFIX, _NAMES),
)
