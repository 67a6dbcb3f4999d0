"""Raise the limit on open files before a run starts, or report that it is too low."""

from __future__ import annotations

import contextlib
import resource

from automodel_ckpt.errors import SystemLimit

LEAST_FILES = 128
"""A rank opens some dozens of files and sockets. With fewer, it would fail where the cause cannot be determined."""
_WANTED_FILES = 65536


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files, which the ranks inherit, up to the hard limit.

    Raises :class:`SystemLimit` if the hard limit is too low for a run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        raise SystemLimit(
            "the limit on open files is too low",
            where="ulimit -n",
            value=soft,
            hint=f"raise it to {LEAST_FILES} or more: ulimit -n 4096 (as root, or in the settings of the job)",
        )
