"""Triton's kernels of optimizers, each tried once before an optimizer uses it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

import torch

log = logging.getLogger("automodel_ckpt")


def tried(module_name: str, device: torch.device, without: str) -> Any:
    """The module *module_name* of this package, after its ``try_once`` ran on *device*; None where Triton is absent.

    It is also None where that fails, because Triton needs a C compiler, so that it can be installed and fail. The
    reason is logged with *without*: what the optimizer does without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        module = importlib.import_module(f"{__package__}.{module_name}")
        module.try_once(device)
    except Exception as error:
        log.debug("%s fails", module_name, exc_info=True)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log.info("%s without Triton, whose kernel fails here: %s", without, reason)
        return None
    return module
