"""Protect forked processes from the garbage of the process that forked them. Imports no torch.

Objects in reference cycles wait for Python's garbage collector. A forked process inherits them, and must not destroy
them: destructors of process groups and stores wait for threads that only the parent has, those of tensors can use a GPU
that the child cannot, and some destructors abort the process. A collection can begin as soon as the child allocates
objects, which includes the hooks that libraries register with :func:`os.register_at_fork`.
"""

from __future__ import annotations

import gc
import os
import threading

_is_registered = False
_before_fork = threading.local()


def freeze_in_forked_processes() -> None:
    """Let no process that is forked from now on collect what it inherits (:func:`gc.freeze`).

    It concerns all forks of this process and of its children, also those of other libraries, for example the workers of
    a DataLoader. Processes that :mod:`subprocess` starts inherit no objects. Further calls do nothing.
    """
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    os.register_at_fork(
        before=_pause,
        after_in_parent=_resume,
        after_in_child=_freeze_and_resume,
    )


def _pause() -> None:
    """Disable the collector: hooks of other libraries may run in the child before that of this module."""
    _before_fork.was_enabled = gc.isenabled()
    gc.disable()


def _resume() -> None:
    if _before_fork.was_enabled:
        gc.enable()


def _freeze_and_resume() -> None:
    gc.freeze()
    _resume()
