"""The messages of the Hub's libraries about requests that they repeat: one line per minute, not two per attempt."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger("automodel_ckpt")

_NOTICE_SECONDS = 60.0
_RETRY_LOGGERS = ("huggingface_hub.utils._http", "datasets.utils.file_utils")


class _RetryFilter(logging.Filter):
    """Lets one message about retries pass per minute, in one line, instead of two for each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._last = -_NOTICE_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith(("Retrying in", "Rate limited. Waiting")):
            return False
        if "thrown while requesting" not in text:
            return True
        with self._lock:
            now = time.monotonic()
            if now - self._last < _NOTICE_SECONDS:
                return False
            self._last = now
        log.warning("a request to the Hub failed and is repeated: %s", text.splitlines()[0][:200])
        return False


def quiet_retries() -> None:
    """Report the retries of the Hub's libraries in one line per minute. Imports none of them."""
    for name in _RETRY_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _RetryFilter) for each in logger.filters):
            logger.addFilter(_RetryFilter())
