"""``ckpt export --to lightning``: a file that Lightning's Trainer resumes from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import (
    CAST_DTYPE,
    FORCE,
    PREFIX,
    Target,
    finish,
    log,
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.lightning import export_lightning

    prefix = arguments.prefix
    report = export_lightning(
        source,
        arguments.output,
        prefix="model." if prefix is None else prefix,
        cast_dtype=arguments.cast_dtype,
        overwrite=arguments.force,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "lightning",
    "a file that PyTorch Lightning's Trainer resumes from",
    "NAME.ckpt next to the checkpoint",
    _run,
    (CAST_DTYPE, FORCE, PREFIX),
    resumes=True,
)
