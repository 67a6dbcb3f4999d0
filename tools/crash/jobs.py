"""The tasks of the ranks in a campaign; each function runs on every rank of a pair."""

import contextlib
import functools
import itertools
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tools.crash import state
from tools.crash.pair import progress
from tools.crash.subjects import BASELINES, OURS, Loaded, Options, Session, Subject


@dataclass(frozen=True)
class Run:
    """A run of a program in *root*: it resumes, then saves *steps*."""

    subject: Subject
    root: Path
    steps: tuple[int, ...] = ()
    options: Options = field(default_factory=Options)


_sessions: list[Session] = []


@functools.cache
def warm_up() -> None:
    """Pay for what the first save and load import, once and before the ranks are forked: two seconds for each else."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for subject in (*OURS, *BASELINES):
            with tempfile.TemporaryDirectory() as root:
                for step in (1, 2):
                    whole(Run(subject, Path(root) / "run", (step,)))
    finally:
        dist.destroy_process_group()
        state.forget()


def begin(run: Run) -> Loaded | None:
    """Start anew: load what is there; the session stays open for :func:`save` and :func:`end`."""
    logging.getLogger("automodel_ckpt").setLevel(logging.CRITICAL)
    end()
    _sessions.append(run.subject.session(run.root, run.options, run.subject))
    return _sessions[-1].load()


def save(steps: Iterable[int]) -> None:
    for step in steps:
        _sessions[-1].save(step)


def end() -> None:
    while _sessions:
        _sessions.pop().close()


def whole(run: Run) -> Loaded | None:
    loaded = begin(run)
    save(run.steps)
    end()
    return loaded


def save_until_it_fails(first: int) -> None:
    """Save step after step, reporting each that returned."""
    for step in itertools.count(first):
        save([step])
        progress(step)


def forget() -> None:
    """Drop the session without a word to it, as when its file system is gone."""
    with contextlib.suppress(OSError):
        end()
