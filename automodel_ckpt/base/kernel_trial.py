"""Trying Triton's kernels before they are used: Triton needs a C compiler, so that it can be installed and fail."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable

log = logging.getLogger("automodel_ckpt")


@functools.cache
def has_triton() -> bool:
    """Whether Triton could be imported. Does not import it."""
    return importlib.util.find_spec("triton") is not None


def succeeds(trial: Callable[[], object], without: str) -> bool:
    """Whether *trial*, which runs a kernel, raises no exception.

    The reason for a failure is logged with *without*: what computes the same without Triton.
    """
    try:
        trial()
    except Exception as error:
        log.debug("a kernel of Triton fails", exc_info=True)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log.info("%s without Triton, whose kernel fails here: %s", without, reason)
        return False
    return True
