"""Report what the ranks of this node do if their start takes long: a rank that hangs there logs nothing.

Before its first step, a rank joins the others and reads data and weights. A wrong network interface or a file system
that does not respond blocks it, and collectives time out only after half an hour.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from automodel_ckpt.base.units import duration
from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.parallel.ranks.process_stacks import address_of, place_in, report_on

FIRST_REPORT_SECONDS = 300.0
"""When the first report follows. The time to each further one doubles."""


class StartWatch:
    """The launcher's watch over the start of its ranks; :meth:`poll` is called again and again while ranks run."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._began = 0.0
        self._report_at = 0.0
        self._unexamined: dict[int, int] = {}
        self._places: dict[int, str] = {}

    def poll(self, failure_dir: FailureDirectory) -> None:
        """Report the ranks that have been starting for long, if there are any. Raises nothing.

        A call examines one rank, which takes half a second: the launcher watches its ranks in between. It uses no
        thread, because ranks may be forked next.
        """
        now = time.monotonic()
        if failure_dir.attempt != self._attempt:
            self._attempt, self._began = failure_dir.attempt, now
            self._report_at = now + FIRST_REPORT_SECONDS
            self._unexamined, self._places = {}, {}
        with contextlib.suppress(OSError):
            if now >= self._report_at:
                self._report_at = now + (now - self._began)
                self._unexamined = failure_dir.starting(failure_dir.attempt)
            if self._unexamined:
                self._examine_one(now, failure_dir)

    def _examine_one(self, now: float, failure_dir: FailureDirectory) -> None:
        rank = min(self._unexamined)
        self._places[rank] = _place_of(self._unexamined.pop(rank))
        if self._unexamined:
            return
        places, self._places = self._places, {}
        # Some may have begun to train since then.
        still = failure_dir.starting(failure_dir.attempt)
        found = {rank: place for rank, place in places.items() if rank in still}
        if found:
            # os.write takes no lock of a stream, which a fork would copy in its locked state.
            os.write(2, f"{_text(found, now - self._began)}\n".encode())


def _place_of(process: int) -> str:
    """What a process does: the functions that its main thread is in, or the state of the process."""
    address = address_of(process)
    report = report_on(address) if address is not None else None
    if report is None:
        return f"unknown (process {process})"
    return place_in(report.text) or report.note


def _text(places: Mapping[int, str], seconds: float) -> str:
    """The report: a line for each place, with its ranks."""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(places):
        ranks_at.setdefault(places[rank], []).append(rank)
    lines = [f"training has not begun for {duration(seconds)}:"]
    lines += [f"  {_names(ranks)}: {place}" for place, ranks in ranks_at.items()]
    return "\n".join(lines)


def _names(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 7``, or ``ranks 0, 2, 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
