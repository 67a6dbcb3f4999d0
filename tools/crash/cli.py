"""The command line of the campaigns."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

from tools.bench.report import write_block
from tools.bench.rounds import machine
from tools.crash import (
    baseline,
    endurance,
    faults,
    flips,
    goodput,
    kill,
    node_disks,
    node_failures,
    power,
    remote,
    signals,
)
from tools.crash.record import Record
from tools.crash.sigterm import end_in_order_on_sigterm
from tools.crash.subjects import (
    BASELINES,
    OURS,
    OURS_ASYNC,
    OURS_INCREMENTAL,
    Subject,
)
from tools.crash.syscalls import unsupported

CANNOT_RUN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_in_order_on_sigterm()
    logging.getLogger("automodel_ckpt").setLevel(
        logging.CRITICAL
    )  # what is tested here is meant to fail
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    options = _parser().parse_args(arguments)
    if reason := CAMPAIGNS[options.campaign][1](options):
        print(f"{options.campaign} cannot run here: {reason}")
        return CANNOT_RUN
    code = 0
    for record in CAMPAIGNS[options.campaign][0](options):
        code = max(code, record.finish())
        if options.docs and record.table:
            write_block(options.campaign, f"{_conditions(record)}\n\n{record.table}")
    return code


def _conditions(record: Record) -> str:
    here, load = machine(), os.getloadavg()[2]
    place = f"{here['cores']} cores ({here['processor']}), load average {load:.0f}, {here['date']}"
    return f"{place}; {record.points} failures, {len(record.failures)} violations."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.crash", description=__doc__)
    parser.add_argument(
        "campaign", choices=CAMPAIGNS, help="; ".join(f"{n}: {c[2]}" for n, c in CAMPAIGNS.items())
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
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="how many processes run a part of the campaign each (1; goodput, goodput-nodes)",
    )
    parser.add_argument(
        "--docs", action="store_true", help="write docs/performance.md (goodput, goodput-nodes)"
    )
    return parser


def _kill(options: argparse.Namespace) -> Iterable[Record]:
    return _kill_sweep(options, OURS, "kill sweep")


def _kill_async(options: argparse.Namespace) -> Iterable[Record]:
    return _kill_sweep(options, OURS_ASYNC, "kill sweep, asynchronous")


def _kill_incremental(options: argparse.Namespace) -> Iterable[Record]:
    return _kill_sweep(options, OURS_INCREMENTAL, "kill sweep, incremental")


def _kill_sweep(
    options: argparse.Namespace, subjects: tuple[Subject, ...], name: str
) -> Iterable[Record]:
    record = kill.run(
        subjects,
        points=options.points,
        seed=options.seed,
        seconds=options.seconds,
        only=options.only,
        name=name,
    )
    return [record]


def _power(options: argparse.Namespace) -> Iterable[Record]:
    return _power_cuts(options, OURS)


def _power_incremental(options: argparse.Namespace) -> Iterable[Record]:
    return _power_cuts(options, OURS_INCREMENTAL)


def _power_cuts(options: argparse.Namespace, subjects: tuple[Subject, ...]) -> Iterable[Record]:
    record = power.run(
        subjects,
        power.FILE_SYSTEMS,
        points=options.points,
        seed=options.seed,
        seconds=options.seconds,
    )
    return [record]


def _faults(options: argparse.Namespace) -> Iterable[Record]:
    return [
        faults.run(
            OURS,
            points=options.points,
            seed=options.seed,
            seconds=options.seconds,
            only=options.only,
        )
    ]


def _flips(options: argparse.Namespace) -> Iterable[Record]:
    # An asynchronous save writes the same files.
    subjects = OURS
    return [flips.run(subjects, points=options.points, seed=options.seed, seconds=options.seconds)]


def _baseline(options: argparse.Namespace) -> Iterable[Record]:
    return baseline.run(
        BASELINES, points=options.points, seed=options.seed, seconds=options.seconds
    )


def _endurance(options: argparse.Namespace) -> Iterable[Record]:
    return [endurance.run(kills=options.points, seed=options.seed, seconds=options.seconds)]


def _signals(options: argparse.Namespace) -> Iterable[Record]:
    return [signals.run(points_wanted=options.points, seed=options.seed, seconds=options.seconds)]


def _goodput(options: argparse.Namespace) -> Iterable[Record]:
    return [_failures(goodput, options)]


def _goodput_nodes(options: argparse.Namespace) -> Iterable[Record]:
    return [_failures(node_failures, options)]


def _node_disks(options: argparse.Namespace) -> Iterable[Record]:
    return [_failures(node_disks, options)]


def _failures(campaign: ModuleType, options: argparse.Namespace) -> Record:
    record: Record = campaign.run(
        points_wanted=options.points,
        seed=options.seed,
        seconds=options.seconds,
        processes=options.processes,
    )
    return record


def _remote(options: argparse.Namespace) -> Iterable[Record]:
    return [remote.run(points=options.points, seed=options.seed, seconds=options.seconds)]


def _no_calls(_: argparse.Namespace) -> str | None:
    return unsupported()


def _no_power(_: argparse.Namespace) -> str | None:
    reasons = [power.unsupported(name) for name in power.FILE_SYSTEMS]
    return "; ".join(reason for reason in reasons if reason) if all(reasons) else None


def _no_nodes(_: argparse.Namespace) -> str | None:
    return node_failures.unsupported()


def _always(_: argparse.Namespace) -> str | None:
    return None


CAMPAIGNS: dict[
    str, tuple[Callable[[argparse.Namespace], Iterable[Record]], Callable[..., str | None], str]
] = {
    "kill": (_kill, _no_calls, "SIGKILL at every call that changes a file"),
    "kill-async": (_kill_async, _no_calls, "the same where saves are written in the background"),
    "kill-incremental": (
        _kill_incremental,
        _no_calls,
        "the same where saves share files with the checkpoint before",
    ),
    "power-incremental": (
        _power_incremental,
        _no_power,
        "power cuts where saves share files with the checkpoint before (root)",
    ),
    "power": (_power, _no_power, "the file system shut down under running saves (root)"),
    "faults": (_faults, _no_calls, "each call failing with ENOSPC and EIO"),
    "flips": (_flips, _always, "flipped bits, damaged files"),
    "endurance": (
        _endurance,
        _always,
        "the trainer killed again and again; --points is the number of kills",
    ),
    "signals": (
        _signals,
        _always,
        "SIGTERM, SIGUSR1, SIGINT in every phase of a training, to a rank or the launcher",
    ),
    "goodput": (
        _goodput,
        _always,
        "what failures cost a training with checkpoints in memory, on disk, and under torchrun with DCP",
    ),
    "goodput-nodes": (
        _goodput_nodes,
        _no_nodes,
        "the same on two nodes of this machine, which are also lost with their memory (root)",
    ),
    "node-disks": (
        _node_disks,
        _no_nodes,
        "the same on two nodes that share no storage, with their checkpoints in a store (root)",
    ),
    "remote": (
        _remote,
        _always,
        "SIGKILL at each request of uploads, publications, removals and downloads, and faults of the store",
    ),
    "baseline": (
        _baseline,
        _always,
        "the same over torch's DCP and safetensors, for comparison; counts only",
    ),
}
