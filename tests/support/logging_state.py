"""What a test changes about logging, undone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_PACKAGE = "automodel_ckpt"
_FILTERED = ("huggingface_hub.utils._http", "datasets.utils.file_utils")
"""Loggers of libraries to which commands add filters (``hub_retries.py``)."""


def reset_logging() -> None:
    """Put the logger of this package, and the filters of the Hub's libraries, into the state of a new process."""
    for name in _FILTERED:
        logging.getLogger(name).filters.clear()
    logger = logging.getLogger(_PACKAGE)
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
    logger.propagate = True


@contextlib.contextmanager
def kept_logging() -> Iterator[None]:
    """Restore the root logger and this package's one, and the filters of other ones."""
    loggers = [logging.getLogger(), logging.getLogger(_PACKAGE)]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    filtered = [logging.getLogger(name) for name in _FILTERED]
    filters = [logger.filters[:] for logger in filtered]
    try:
        yield
    finally:
        for logger, before_it in zip(filtered, filters, strict=True):
            logger.filters[:] = before_it
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
            logger.propagate = propagate
