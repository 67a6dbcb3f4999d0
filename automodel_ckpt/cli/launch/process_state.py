"""Whether a process of this node runs, has ended, or is suspended (source: proc(5))."""

from __future__ import annotations

from pathlib import Path


def has_ended(process: int) -> bool:
    """Whether a process has ended, also if its parent has not read its exit status yet."""
    return _state_of(process) in ("", "Z")


def is_suspended(process: int) -> bool:
    """Whether a process exists and is stopped, by SIGSTOP or a debugger."""
    return _state_of(process) in ("T", "t")


def _state_of(process: int) -> str:
    """Return the letter of the process state (source: proc(5)); empty if the process does not exist."""
    try:
        # The name of the command comes first, and may contain spaces and parentheses.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
