"""The limit on open files, before a run starts: raised as far as the system allows, or reported."""

from __future__ import annotations

import contextlib
import resource

from automodel_ckpt.errors import SystemLimit

LEAST_FILES = 128
"""A rank has some dozens of files and sockets open; with fewer it would fail in a place that cannot tell why."""
_WANTED_FILES = 65536


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files, which the ranks inherit, up to the hard limit.

    Raises :class:`SystemLimit` where the hard limit is too low for a run.
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
