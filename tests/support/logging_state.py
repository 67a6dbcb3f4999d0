"""What a test changes about logging, undone."""

import contextlib
import logging
from collections.abc import Iterator

_PACKAGE = "automodel_ckpt"


def reset_logging() -> None:
    """Put the logger of this package into the state of a new process."""
    logger = logging.getLogger(_PACKAGE)
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
    logger.propagate = True


@contextlib.contextmanager
def kept_logging() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger(_PACKAGE)]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
            logger.propagate = propagate
