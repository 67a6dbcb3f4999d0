"""SIGTERM ends a campaign in order."""

from __future__ import annotations

import signal
import sys
from types import FrameType

_CODE = 128 + signal.SIGTERM
_received = False


def end_in_order_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that a campaign removes what it has made: processes, networks, files."""

    def end(number: int, frame: FrameType | None) -> None:
        global _received
        # Once: another one would interrupt the removal.
        if not _received:
            _received = True
            sys.exit(_CODE)

    signal.signal(signal.SIGTERM, end)


def check_sigterm() -> None:
    """Raise SystemExit after SIGTERM. Python drops what a handler raises in a hook of fork(), for example."""
    if _received:
        sys.exit(_CODE)
