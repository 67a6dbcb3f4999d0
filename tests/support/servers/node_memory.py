"""Nodes with memory of their own on one machine: each rank sees another directory at the same path.

Needs root: a mount namespace. The directories stay when the ranks end, as a tmpfs does; removing the content of one is
the loss of a node.
"""

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE, _MS_BIND = 0x4000, 1 << 18, 0x1000


class NoMountsError(Exception):
    """This machine or this user cannot make mount namespaces."""


def memory_of_node(base: Path, number: int) -> Path:
    """The directory that node *number* sees as ``base/shm``."""
    return base / f"node-{number}"


def make_nodes(base: Path, count: int) -> None:
    (base / "shm").mkdir()
    for number in range(count):
        memory_of_node(base, number).mkdir()


def enter_node(base: Path, number: int) -> Path:
    """Make this process one of node *number*; return the path of its memory. Raises :class:`NoMountsError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    shm = base / "shm"
    source = os.fsencode(memory_of_node(base, number))
    done = [libc.unshare(_CLONE_NEWNS)]
    if done == [0]:
        done.append(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
        done.append(libc.mount(source, os.fsencode(shm), None, _MS_BIND, None))
    if any(done):
        raise NoMountsError(os.strerror(ctypes.get_errno()))
    return shm


def clear(directory: Path) -> None:
    """Lose what a node has; the directory itself may be mounted."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def between(change: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


def can_enter() -> bool:
    """Whether this machine and this user can make mount namespaces."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
                code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
