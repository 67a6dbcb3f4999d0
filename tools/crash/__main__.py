"""`python -m tools.crash CAMPAIGN`: exit code 1 when a promise was broken, 3 when the campaign cannot run here."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.servers.command_server import CommandServer
from tools.crash import calls, flips, power, signals
from tools.crash.place import Scenario
from tools.crash.record import Record
from tools.crash.subjects import BASELINES, OURS, OURS_ASYNC, OURS_INCREMENTAL, Subject
from tools.crash.syscalls import unsupported as no_calls
from tools.support import parser_of

CANNOT_RUN = 3


class Campaign(NamedTuple):
    """What a campaign is about, what runs it, and what finds why it cannot run here (None: it can)."""

    help: str
    run: Callable[[argparse.Namespace], Iterable[Record]]
    unsupported: Callable[[], str | None] = lambda: None


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    return {"points": options.points, "seed": options.seed, "seconds": options.seconds}


def _calls(
    text: str,
    subjects: tuple[Subject, ...],
    judge: calls.Judge = calls.judge_kill,
    scenarios: tuple[Scenario, ...] = calls.SCENARIOS,
) -> Campaign:
    def run(options: argparse.Namespace) -> Iterator[Record]:
        limits = _limits(options) | {"only": options.only}
        yield calls.run(options.campaign, subjects, judge, scenarios, **limits)

    return Campaign(text, run, no_calls)


def _power(text: str, subjects: tuple[Subject, ...]) -> Campaign:
    return Campaign(text, lambda options: [power.run(subjects, **_limits(options))], power.no_disk)


def _signals(text: str, phases: Mapping[str, float]) -> Campaign:
    def run(options: argparse.Namespace) -> Iterator[Record]:
        limits = {"seed": options.seed, "seconds": options.seconds}
        with tempfile.TemporaryDirectory() as directory:
            commands = CommandServer(Path(directory)).begin()
            try:
                yield signals.run(commands, phases, points_wanted=options.points, **limits)
            finally:
                commands.end()

    return Campaign(text, run)


def _baseline(options: argparse.Namespace) -> Iterator[Record]:
    """A record for each other way of saving and each campaign: outcomes, no promises."""
    limits = _limits(options)
    for subject in BASELINES:
        if reason := no_calls():
            print(f"the kill sweep is left out: {reason}")
        else:
            name = f"kill sweep of {subject.name}"
            yield calls.run(name, (subject,), calls.judge_baseline, calls.BASELINE, **limits)
        record = power.run((subject,), **limits, name=f"power cuts of {subject.name}")
        if record.points:
            yield record
        yield flips.run_baseline(subject, **limits)


CAMPAIGNS = {
    "kill": _calls("SIGKILL at every call that changes a file", OURS),
    "kill-async": _calls("the same where saves are written in the background", OURS_ASYNC),
    "kill-incremental": _calls("the same where saves share files", OURS_INCREMENTAL),
    "faults": _calls(
        "each call failing with ENOSPC and EIO", OURS, calls.judge_fault, calls.FAULTS
    ),
    "power": _power("the file system shut down under running saves (root)", OURS),
    "power-incremental": _power("the same where saves share files (root)", OURS_INCREMENTAL),
    # An asynchronous save writes the same files.
    "flips": Campaign("flipped bits, damaged files", lambda o: [flips.run(OURS, **_limits(o))]),
    "signals": _signals("SIGTERM, SIGUSR1, SIGINT in every phase of a training", signals.PHASES),
    "endurance": _signals("a training killed again and again", signals.KILL),
    "baseline": Campaign("kills, power cuts, flips of DCP and safetensors; counts only", _baseline),
}


def main() -> int:
    """Run a campaign; the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A campaign that is stopped unmounts its disks and ends its processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in ("automodel_ckpt", "torch"):
        # What is tested here is meant to fail.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    parser = parser_of(__doc__, prog="python -m tools.crash")
    texts = "; ".join(f"{name}: {each.help}" for name, each in CAMPAIGNS.items())
    parser.add_argument("campaign", choices=CAMPAIGNS, help=texts)
    parser.add_argument("--points", type=int, default=200, help="kills, cuts, flips, ... (200)")
    parser.add_argument("--seed", type=int, default=1, help="chooses points and instants (1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as long")
    parser.add_argument("--only", help="one point of a record to run again (kills, faults)")
    options = parser.parse_args()
    campaign = CAMPAIGNS[options.campaign]
    if reason := campaign.unsupported():
        print(f"{options.campaign} cannot run here: {reason}")
        return CANNOT_RUN
    return max(record.finish() for record in campaign.run(options))


if __name__ == "__main__":
    sys.exit(main())
