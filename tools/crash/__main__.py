"""`python -m tools.crash CAMPAIGN`: exit code 1 when a promise was broken, 3 when the campaign cannot run here."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.servers.command_server import CommandServer
from tools.crash import endurance, faults, flips, kill, power, signals
from tools.crash.record import Record
from tools.crash.subjects import BASELINES, OURS, OURS_ASYNC, OURS_INCREMENTAL, Subject
from tools.crash.syscalls import unsupported as no_calls

CANNOT_RUN = 3


class Campaign(NamedTuple):
    """What a campaign runs, what finds why it cannot run here (None: it can), and what it is about."""

    run: Callable[[argparse.Namespace], Iterable[Record]]
    unsupported: Callable[[], str | None] | None
    help: str


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    return {"points": options.points, "seed": options.seed, "seconds": options.seconds}


def _kill(name: str, subjects: tuple[Subject, ...], help_text: str) -> Campaign:
    def run(options: argparse.Namespace) -> list[Record]:
        return [kill.run(subjects, **_limits(options), only=options.only, name=name)]

    return Campaign(run, no_calls, help_text)


def _power(subjects: tuple[Subject, ...], help_text: str) -> Campaign:
    def run(options: argparse.Namespace) -> list[Record]:
        return [power.run(subjects, power.FILE_SYSTEMS, **_limits(options))]

    return Campaign(run, _no_power, help_text)


def _no_power() -> str | None:
    reasons = [power.unsupported(name) for name in power.FILE_SYSTEMS]
    return "; ".join(reason for reason in reasons if reason) if all(reasons) else None


def _signals(options: argparse.Namespace) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as directory:
        commands = CommandServer(Path(directory)).begin()
        try:
            limits = {"seed": options.seed, "seconds": options.seconds}
            yield signals.run(commands, points_wanted=options.points, **limits)
        finally:
            commands.end()


def _baseline(options: argparse.Namespace) -> Iterator[Record]:
    """A record for each other way of saving and each campaign: outcomes, no promises."""
    limits = _limits(options)
    for subject in BASELINES:
        if reason := no_calls():
            print(f"the kill sweep is left out: {reason}")
        else:
            yield kill.run_baseline(subject, **limits)
        record = power.run((subject,), power.FILE_SYSTEMS, **limits, violations=False)
        record.campaign = f"power cuts of {subject.name}"
        if record.points:
            yield record
        yield flips.run_baseline(subject, **limits)


CAMPAIGNS = {
    "kill": _kill("kill sweep", OURS, "SIGKILL at every call that changes a file"),
    "kill-async": _kill(
        "kill sweep, asynchronous", OURS_ASYNC, "the same where saves are written in the background"
    ),
    "kill-incremental": _kill(
        "kill sweep, incremental",
        OURS_INCREMENTAL,
        "the same where saves share files with the checkpoint before",
    ),
    "power": _power(OURS, "the file system shut down under running saves (root)"),
    "power-incremental": _power(
        OURS_INCREMENTAL, "power cuts where saves share files with the checkpoint before (root)"
    ),
    "faults": Campaign(
        lambda options: [faults.run(OURS, **_limits(options), only=options.only)],
        no_calls,
        "each call failing with ENOSPC and EIO",
    ),
    # An asynchronous save writes the same files.
    "flips": Campaign(
        lambda options: [flips.run(OURS, **_limits(options))], None, "flipped bits, damaged files"
    ),
    "endurance": Campaign(
        lambda options: [endurance.run(**_limits(options))],
        None,
        "the trainer killed again and again; --points is the number of kills",
    ),
    "signals": Campaign(
        _signals,
        None,
        "SIGTERM, SIGUSR1, SIGINT in every phase of a training, to a rank or the launcher",
    ),
    "baseline": Campaign(
        _baseline,
        None,
        "kills, power cuts and flips of torch's DCP and safetensors, for comparison; counts only",
    ),
}


def main() -> int:
    """Run a campaign; the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A campaign that is stopped unmounts its disks and ends its processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in ("automodel_ckpt", "torch"):
        # What is tested here is meant to fail.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = _parser().parse_args()
    campaign = CAMPAIGNS[options.campaign]
    if campaign.unsupported and (reason := campaign.unsupported()):
        print(f"{options.campaign} cannot run here: {reason}")
        return CANNOT_RUN
    return max(record.finish() for record in campaign.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.crash", description=__doc__)
    parser.add_argument(
        "campaign",
        choices=CAMPAIGNS,
        help="; ".join(f"{name}: {each.help}" for name, each in CAMPAIGNS.items()),
    )
    parser.add_argument(
        "--points", type=int, default=200, help="kills, cuts, faults, flips or signals (200)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="another seed chooses other points and instants (1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after as long, at the latest"
    )
    parser.add_argument(
        "--only", help="the one point of a record's failures to run again (kill, faults)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
