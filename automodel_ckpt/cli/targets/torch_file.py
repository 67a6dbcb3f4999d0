"""``ckpt export --to torch``: one state dict for ``torch.load``."""

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
    from automodel_ckpt.convert.targets.torch_file import export_torch

    report = export_torch(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        cast_dtype=arguments.cast_dtype,
        overwrite=arguments.force,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "torch",
    "one state dict for torch.load",
    "NAME.pt next to the checkpoint",
    _run,
    (CAST_DTYPE, FORCE, PREFIX),
)
