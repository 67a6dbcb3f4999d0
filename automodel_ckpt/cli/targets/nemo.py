"""``ckpt export --to nemo``: a ``.nemo`` file that NeMo restores."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.targets.target import (
    CAST_DTYPE,
    FORCE,
    PREFIX,
    Option,
    Target,
    finish,
    log,
)

MODEL_CONFIG = Option(
    "--model-config",
    "config of the NeMo class, to which references to the tokenizer's files are added",
    {"metavar": "YAML"},
)
NEMO_CLASS = Option(
    "--target",
    "the NeMo class, as the key `target` of the config (default: none; NeMo 3 rejects classes of other packages)",
    {"metavar": "CLASS"},
)

MEGATRON_NAMES = Option(
    "--megatron-names",
    "write the tensors and the config of a GPT model of Megatron-Core, as NeMo 1 has them",
    {"action": "store_true"},
)


def _run(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.nemo import export_nemo

    config = arguments.model_config
    report = export_nemo(
        source,
        arguments.output,
        prefix=arguments.prefix or "",
        model_config=None if config is None else Path(config),
        model_class=arguments.target,
        megatron_names=arguments.megatron_names,
        cast_dtype=arguments.cast_dtype,
        overwrite=arguments.force,
        log=log,
    )
    return finish(arguments, report)


TARGET = Target(
    "nemo",
    "a .nemo file for NeMo",
    "NAME.nemo next to the checkpoint",
    _run,
    (CAST_DTYPE, FORCE, PREFIX, MODEL_CONFIG, NEMO_CLASS, MEGATRON_NAMES),
)
