"""Leave out warnings of libraries that do not concern the user, or that are reported in another form."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Let the loggers of these *names* report only errors in the context, or what is of *level* or above."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, former in levels.items():
            logging.getLogger(name).setLevel(former)
