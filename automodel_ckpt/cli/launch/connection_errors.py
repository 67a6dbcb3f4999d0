"""Recognize exceptions that were raised because the connection to another rank broke."""

from __future__ import annotations

import dis
import re

CONNECTION_ERROR = re.compile(
    r"gloo/|NCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|recvValue failed"
    r"|remote worker crashing|Socket (unexpectedly )?closed|Pair is not connected|caused pair closure"
)
BROKEN_CONNECTION = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|recvValue failed|remote worker crashing"
    r"|Socket (unexpectedly )?closed|Pair is not connected|caused pair closure|Failed to recv, got 0 bytes"
)
"""The process at the other end has ended. Other matches of CONNECTION_ERROR may also be faults of this rank."""
TIMED_OUT = re.compile(r"Timed out waiting \d+ms|Watchdog caught collective operation timeout")
PEER_ADDRESS = re.compile(
    r"by peer \[(?:::ffff:)?(?P<gloo>[\w.:]+)\]|by remote peer (?P<nccl>[\w.:-]+)<"
)
"""The address of the other end in messages of gloo and NCCL."""
CONNECTION_ERROR_CLASSES = frozenset(
    {"DistError", "DistNetworkError", "DistStoreError", "DistBackendError"}
)
BACKEND_TEXT = re.compile(r"\[[^\]]*gloo/[\w/]+\.(cc|h):\d+\]|NCCL error|ncclRemoteError")
"""The location in the sources of gloo and NCCL that their messages contain."""
RAISE_STATEMENTS = frozenset({"RAISE_VARARGS", "RERAISE"})


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, was raised because the connection to another rank broke.

    The text alone is not sufficient: a database client or a web service also reports "Connection reset by peer".
    """
    while error is not None:
        for base in type(error).__mro__:
            is_of_torch = base.__module__.partition(".")[0] == "torch"
            if is_of_torch and base.__name__ in CONNECTION_ERROR_CLASSES:
                return True
        is_candidate = isinstance(error, RuntimeError) and CONNECTION_ERROR.search(str(error))
        if is_candidate and _is_raised_by_backend(error):
            return True
        error = error.__cause__
    return False


def _is_raised_by_backend(error: BaseException) -> bool:
    """Whether gloo, NCCL or torch.distributed raised a RuntimeError, judged by the end of its traceback.

    Backends raise in C++, so the innermost Python frame ends in a call and not in a ``raise`` statement. If that frame
    is neither torch's nor this package's, the text must also have the form of a backend's message.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__"))
    # co_code has the original instructions, also where Python 3.11 has specialized them.
    instruction = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    if instruction in RAISE_STATEMENTS:
        return f"{module}.".startswith("torch.distributed.")
    if module.partition(".")[0] in ("torch", "automodel_ckpt"):
        return True
    return bool(BACKEND_TEXT.search(str(error)))
