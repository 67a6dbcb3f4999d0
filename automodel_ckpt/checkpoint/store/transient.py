"""Which errors of the libraries of stores may pass, and reads that wait for that."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger("automodel_ckpt")

Value = TypeVar("Value")

PATIENCE_SECONDS = 60.0
"""How long a read is repeated."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 8.0
_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECTION_ERRORS = frozenset(
    {
        ("botocore.exceptions", "HTTPClientError"),
        ("botocore.exceptions", "ConnectionError"),
        ("aiohttp.client_exceptions", "ClientError"),
        ("requests.exceptions", "ConnectionError"),
        ("requests.exceptions", "ProxyError"),
        ("azure.core.exceptions", "ServiceRequestError"),
        ("azure.core.exceptions", "ServiceResponseError"),
    }
)
"""Module and class of errors of connections. The libraries are imported by fsspec, if at all."""


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed: the store is overloaded or fails, or the connection to it."""
    status = _status(error)
    if status is not None:
        return status in _STATUSES
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    return any(
        (each.__module__, each.__name__) in _CONNECTION_ERRORS for each in type(error).__mro__
    )


def patiently(
    read: Callable[[], Value],
    what: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Value:
    """Return what *read* returns; repeat it for :data:`PATIENCE_SECONDS` if it fails with a transient error.

    *what* is the object that is read, for the log: one warning when it fails for the first time. Raises what the last
    attempt raises.
    """
    deadline = clock() + PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    is_logged = False
    while True:
        try:
            return read()
        except Exception as error:  # each library has its own exceptions
            if not is_transient(error) or clock() + pause > deadline:
                raise
            if not is_logged:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("reading %s failed, trying again: %s", what, first[:200])
                is_logged = True
        # Many ranks read at the same time: they must not return together.
        sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error; None if the error is not a reply of the store."""
    response: Any = getattr(error.__cause__, "response", None)
    if isinstance(response, dict):
        # s3fs translates errors of botocore.
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        # Errors of azure, and of gcsfs.
        found = getattr(error, "status_code", None) or getattr(error, "code", None)
    try:
        return int(found)
    except (TypeError, ValueError):
        return None
