"""`python -m tools.crash CAMPAIGN`: exit code 1 when a promise was broken, 3 when the campaign cannot run here."""

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.servers.command_server import CommandServer
from tools.crash import calls, flips, power, signals
from tools.crash.record import Record
from tools.crash.subjects import BASELINES, OURS, OURS_ASYNC, OURS_INCREMENTAL, Subject
from tools.crash.syscalls import unsupported as no_calls
from tools.support import parser_of

CANNOT_RUN = 3
Records = Iterator[Record]
Limits = dict[str, Any]


def _kills(options: argparse.Namespace, limits: Limits, subjects: tuple[Subject, ...]) -> Records:
    yield calls.run(options.campaign, subjects, calls.judge_kill, only=options.only, **limits)


def _faults(options: argparse.Namespace, limits: Limits, subjects: tuple[Subject, ...]) -> Records:
    name, judge, only = options.campaign, calls.judge_fault, options.only
    yield calls.run(name, subjects, judge, calls.FAULTS, only=only, **limits)


def _power(_: argparse.Namespace, limits: Limits, subjects: tuple[Subject, ...]) -> Records:
    yield power.run(subjects, **limits)


def _flips(_: argparse.Namespace, limits: Limits, subjects: tuple[Subject, ...]) -> Records:
    yield flips.run(subjects, **limits)


def _signals(_: argparse.Namespace, limits: Limits, phases: Mapping[str, float]) -> Records:
    with tempfile.TemporaryDirectory() as directory:
        commands = CommandServer(Path(directory)).begin()
        try:
            yield signals.run(commands, phases, **limits)
        finally:
            commands.end()


def _baseline(_: argparse.Namespace, limits: Limits, subjects: tuple[Subject, ...]) -> Records:
    """A record for each other way of saving and each campaign: outcomes, no promises."""
    for subject in subjects:
        if reason := no_calls():
            print(f"the kill sweep is left out: {reason}")
        else:
            name = f"kill sweep of {subject.name}"
            yield calls.run(name, (subject,), calls.judge_baseline, calls.BASELINE, **limits)
        record = power.run((subject,), **limits, name=f"power cuts of {subject.name}")
        if record.points:
            yield record
        yield flips.run_baseline(subject, **limits)


CAMPAIGNS: dict[str, tuple[str, Callable[..., Records], Any]] = {
    "kill": ("SIGKILL at every call that changes a file", _kills, OURS),
    "kill-async": ("the same where saves are written in the background", _kills, OURS_ASYNC),
    "kill-incremental": ("the same where saves share files", _kills, OURS_INCREMENTAL),
    "faults": ("each call failing with ENOSPC and EIO", _faults, OURS),
    "power": ("the file system shut down under running saves (root)", _power, OURS),
    "power-incremental": ("the same where saves share files (root)", _power, OURS_INCREMENTAL),
    # An asynchronous save writes the same files.
    "flips": ("flipped bits, damaged files", _flips, OURS),
    "signals": ("SIGTERM, SIGUSR1, SIGINT in every phase of a training", _signals, signals.PHASES),
    "endurance": ("a training killed again and again", _signals, signals.KILL),
    "baseline": ("kills, cuts, flips of DCP and safetensors; counts only", _baseline, BASELINES),
}
"""What each is about, what runs it, and on what."""
UNSUPPORTED = {_kills: no_calls, _faults: no_calls, _power: power.no_disk}
"""What finds why a campaign cannot run here."""


def main() -> int:
    """Run a campaign; the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A campaign that is stopped unmounts its disks and ends its processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in ("automodel_ckpt", "torch"):
        # What is tested here is meant to fail.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    parser = parser_of(__doc__, prog="python -m tools.crash")
    texts = "; ".join(f"{name}: {text}" for name, (text, _, _) in CAMPAIGNS.items())
    parser.add_argument("campaign", choices=CAMPAIGNS, help=texts)
    parser.add_argument("--points", type=int, default=200, help="kills, cuts, flips, ... (200)")
    parser.add_argument("--seed", type=int, default=1, help="chooses points and instants (1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as long")
    parser.add_argument("--only", help="one point of a record to run again (kills, faults)")
    options = parser.parse_args()
    _, run, subjects = CAMPAIGNS[options.campaign]
    reason = UNSUPPORTED[run]() if run in UNSUPPORTED else None
    if reason:
        print(f"{options.campaign} cannot run here: {reason}")
        return CANNOT_RUN
    limits = {"points": options.points, "seed": options.seed, "seconds": options.seconds}
    return max(record.finish() for record in run(options, limits, subjects))


if __name__ == "__main__":
    sys.exit(main())
