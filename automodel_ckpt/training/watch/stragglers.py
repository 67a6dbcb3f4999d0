"""Find ranks that are persistently slower than the others, from what each rank measures in its steps.

Two times show a slow rank, without a further collective or a wait for the device. The first is how long a rank waits
for the others at the exchange before each step: the last one to arrive (slow data, host or optimizer) does not wait.
The second is its own time in a forward pass. Each rank keeps them for a window of steps, and then adds them to the next
exchange.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from automodel_ckpt.base.device_copies import Mark
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.run.notes import ARRIVAL, DATA, FORWARD, STEPS, STRAGGLER
from automodel_ckpt.config.keys.monitoring import HangsConfig
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.parallel.mesh_sizes import RankLayout

log = logging.getLogger("automodel_ckpt")

_NUM_FIGURES = 4

Rows = Values


@dataclass(frozen=True)
class ForwardTime:
    """A forward pass between two marks. *waits* are the intervals in it in which this rank waited for others.

    *num_tokens* is the number of elements of its rows, padding included.
    """

    start: Mark
    end: Mark
    waits: tuple[tuple[Mark, Mark], ...]
    num_tokens: int

    @property
    def seconds(self) -> float:
        """The rank's own seconds. The device must have done the work before the end."""
        waited = sum(end.seconds_since(start) for start, end in self.waits)
        return max(0.0, self.end.seconds_since(self.start) - waited)


class ForwardTimer:
    """Times the first forward pass of each step. It does not wait for the device: it only records marks."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Measure forward passes of *model*. Its modules get hooks."""
        self._device = device
        self._waits: list[tuple[Mark, Mark]] | None = None
        self._begin: Mark | None = None
        self._newest: ForwardTime | None = None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._surround(module)
            elif isinstance(module, DistributedDataParallel):
                module.register_forward_pre_hook(self._before_wait)
                module.module.register_forward_pre_hook(self._after_wait, prepend=True)

    def _surround(self, module: FSDPModule) -> None:
        """Measure the hook in which fsdp2 waits for the parameters of *module*, and no other hook."""
        hook = module._get_fsdp_state()._pre_forward_hook_handle
        owner = cast(nn.Module, module)
        hooks: Any = owner._forward_pre_hooks
        # If fsdp2 gathers several modules together, the first one has the hook.
        if hook is not None and hook.id in hooks:
            owner.register_forward_pre_hook(self._after_wait, prepend=True)
            hooks.move_to_end(hook.id, last=False)
            owner.register_forward_pre_hook(self._before_wait, prepend=True)

    def _before_wait(self, *_: Any) -> None:
        if self._waits is not None:
            self._begin = Mark(self._device)

    def _after_wait(self, *_: Any) -> None:
        if self._waits is not None and self._begin is not None:
            self._waits.append((self._begin, Mark(self._device)))
            self._begin = None

    @contextmanager
    def measuring(self, rows: Rows) -> Iterator[None]:
        """Measure the forward pass of a micro-batch within the context, unless one of this step has been measured."""
        if self._newest is not None or self._waits is not None:
            yield
            return
        self._waits, self._begin = [], None
        start = Mark(self._device)
        # The largest tensor of integers: token ids or labels, with padding.
        sizes = []
        for leaf in tree_leaves(dict(rows)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point():
                sizes.append(leaf.numel())
        try:
            yield
            self._newest = ForwardTime(
                start, Mark(self._device), tuple(self._waits), max(sizes, default=0)
            )
        finally:
            self._waits = None

    def take(self) -> ForwardTime | None:
        """Return the time of this step, and begin a new step. Returns None when nothing was computed."""
        newest, self._newest = self._newest, None
        return newest


Figures = np.ndarray[Any, np.dtype[np.float64]]
"""What ranks measured in a window of steps, in seconds [ranks, 4]: the mean wait for the others before a step, the mean
time of a step, the median of the own time in a forward pass, and of that time for each token; both 0 if not
measured."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    *part* ``forward``: its forward passes take *seconds*, and the median of the others takes *usual_seconds*. *part*
    ``arrival``: it begins steps later than the median of the others, who wait *seconds* for it in each step of
    *usual_seconds*.
    """

    rank: int
    part: str
    seconds: float
    usual_seconds: float

    @property
    def share(self) -> float:
        """By which share of the usual time it is slower."""
        late = self.seconds - self.usual_seconds if self.part == FORWARD else self.seconds
        return late / self.usual_seconds if self.usual_seconds > 0 else 0.0


def slower_ranks(figures: Figures, stages: Figures, share: float) -> list[Straggler]:
    """Return the ranks that are slower than the median of the others by more than a *share*.

    A rank's forward passes are compared with other passes of its pipeline stage (*stages*, by rank). Rows have
    different lengths, so a rank must be slower by its time as well as by its time for each token.
    """
    waits, steps, forwards, per_token = figures.T
    late = _medians_of_others(waits) - waits
    found = [
        Straggler(int(rank), ARRIVAL, float(late[rank]), float(steps[rank]))
        for rank in np.flatnonzero(late > share * steps)
    ]
    for stage in np.unique(stages):
        ranks = np.flatnonzero((stages == stage) & (forwards > 0))
        if len(ranks) > 1:
            usual = _medians_of_others(forwards[ranks])
            is_slow = forwards[ranks] > (1 + share) * usual
            is_slow &= per_token[ranks] > (1 + share) * _medians_of_others(per_token[ranks])
            for index in np.flatnonzero(is_slow):
                seconds = float(forwards[ranks[index]])
                found.append(Straggler(int(ranks[index]), FORWARD, seconds, float(usual[index])))
    return found


def _medians_of_others(values: Figures) -> Figures:
    """For each of at least two *values*, the median of all others. One sort serves thousands of ranks."""
    order = np.argsort(values)
    positions = np.argsort(order)

    def other(index: int) -> Figures:
        # Without its own value, the later ones are one place earlier.
        return np.asarray(values[order][index + (index >= positions)])

    num_others = len(values) - 1
    return (other((num_others - 1) // 2) + other(num_others // 2)) / 2


class StragglerWatch:
    """Collects the times of this rank, and reports slow ranks: in the log of rank 0, and with *log_record*."""

    def __init__(
        self,
        settings: HangsConfig,
        layout: RankLayout,
        timeline: Timeline,
        hosts: Sequence[str],
        log_record: Callable[[str, int, Values], None],
    ) -> None:
        """*hosts* are the names of the nodes of all ranks. *log_record* writes an event of ``training.jsonl``."""
        self._settings = settings
        self._layout = layout
        self._timeline = timeline
        self._hosts = hosts
        self._log_record = log_record
        # Pipeline stages are the outermost dimension of the mesh.
        ranks_per_stage = max(1, layout.world_size // layout.sizes.pp)
        self._stages = np.arange(float(layout.world_size)) // ranks_per_stage
        self._slow_before: set[tuple[int, str]] = set()
        self._num_windows: Counter[tuple[int, str]] = Counter()
        self._interrupted = 0.0
        self._clear()

    def _clear(self) -> None:
        self._worked = self._timeline.seconds_in((STEPS, DATA))
        self._num_steps = 0
        self._waits: list[float] = []
        self._forwards: list[float] = []
        self._per_token: list[float] = []

    def note_step(self) -> None:
        """Count a step."""
        self._num_steps += 1

    def note_wait(self, seconds: float) -> None:
        """Note how long this rank has waited for the others at an exchange, if training was not interrupted before.

        After a save or a validation, the others wait for the rank that has the most work in it.
        """
        interrupted = self._timeline.seconds_outside((STEPS, DATA))
        if interrupted == self._interrupted:
            self._waits.append(seconds)
        self._interrupted = interrupted

    def figures_here(self, forward: ForwardTime | None) -> list[float]:
        """Note a *forward* pass that the device has done.

        Returns what this rank adds to the sums of an exchange: nothing, or, after a window, a list for all ranks.
        """
        if forward is not None:
            seconds = forward.seconds
            self._forwards.append(seconds)
            self._per_token.append(seconds / max(1, forward.num_tokens))
        if self._num_steps < self._settings.straggler_steps:
            return []
        worked = self._timeline.seconds_in((STEPS, DATA)) - self._worked
        figures = np.zeros((self._layout.world_size, _NUM_FIGURES))
        figures[self._layout.rank] = (
            sum(self._waits) / max(1, len(self._waits)),
            worked / self._num_steps,
            median(self._forwards or [0.0]),
            median(self._per_token or [0.0]),
        )
        return figures.flatten().tolist()

    def compare(self, step: int, sums: Sequence[float]) -> None:
        """Report ranks that were slow in two windows in a row. *sums* are the sums of :meth:`figures_here`."""
        if not sums:
            return
        num_steps = self._num_steps
        self._clear()
        if not self._layout.is_rank0:
            return
        figures = np.reshape(sums, (-1, _NUM_FIGURES))
        found = slower_ranks(figures, self._stages, self._settings.straggler_share)
        slow = {(each.rank, each.part): each for each in found}
        again = self._slow_before & slow.keys()
        self._slow_before = set(slow)
        for key in self._num_windows.keys() - again:
            del self._num_windows[key]
        for key in sorted(again):
            self._report(step, slow[key], num_steps)

    def _report(self, step: int, straggler: Straggler, num_steps: int) -> None:
        """Write a line for each window, and messages less and less often."""
        key = (straggler.rank, straggler.part)
        # The first report is about two windows.
        num_new = 1 if key in self._num_windows else 2
        self._num_windows[key] += num_new
        num_windows = self._num_windows[key]
        record = asdict(straggler) | {"share": straggler.share}
        record |= {"node": self._hosts[straggler.rank], "steps": num_steps * num_new}
        self._log_record(STRAGGLER, step, record)
        if num_windows & (num_windows - 1) == 0:
            log.warning("%s", straggler_text(straggler, self._hosts, num_steps * num_windows))


def straggler_text(straggler: Straggler, hosts: Sequence[str], num_steps: int) -> str:
    """Return the report on a rank that was slow in *num_steps* steps."""
    name = f"rank {straggler.rank} (node {hosts[straggler.rank]}) is slower than the others"
    share = f"{straggler.share:.0%}"
    if straggler.part == FORWARD:
        return (
            f"{name}: for {num_steps} steps, its forward passes have taken {straggler.seconds:.3g} s, {share} more "
            f"than the median of the other ranks ({straggler.usual_seconds:.3g} s)"
        )
    return (
        f"{name}: for {num_steps} steps, it has begun each step {straggler.seconds:.3g} s later than the median of "
        f"the other ranks, which is {share} of a step ({straggler.usual_seconds:.3g} s): its data, host or optimizer "
        "is slow"
    )
