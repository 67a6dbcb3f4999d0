"""What joining the process groups of a run costs by the number of ranks: real gloo ranks, forked from one process.

    python -m tools.bench_groups [--ranks 8 32 64] [--docs]

The ranks join a default group and a second one, as a run does, and exchange objects and sums over the second. A gloo
group connects every pair of ranks, unless TORCH_GLOO_LAZY_INIT is set: then ranks connect when they first exchange
something. ``--docs`` writes the figures to docs/performance.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automodel_ckpt.parallel.ranks.agree import gather_objects, sum_over_ranks
from tools.bench_report import write_block
from tools.bench_rounds import machine

LAZY = "TORCH_GLOO_LAZY_INIT"
CONFIG = "key: value\n" * 300
"""About the text of a recipe."""


def num_sockets() -> int:
    """The sockets that this process has open."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / descriptor
        # The directory itself was open when it was listed.
        if path.is_symlink() and os.readlink(path).startswith("socket"):
            count += 1
    return count


def seconds_of(run: Callable[[], object], repeats: int = 1) -> float:
    """Seconds that *run* takes, the mean over its *repeats*."""
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def rank_main(rank: int, num_ranks: int, port: int, lazy: bool, results: Any) -> None:
    """A rank; the first one leaves the figures in *results*."""
    torch.set_num_threads(1)
    os.environ[LAZY] = "1" if lazy else "0"
    address = f"tcp://127.0.0.1:{port}"
    found: dict[str, float] = {}
    found["default group"] = seconds_of(
        lambda: dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=num_ranks
        )
    )
    groups: list[Any] = []
    found["second group"] = seconds_of(lambda: groups.append(dist.new_group(backend="gloo")))
    (group,) = groups
    found["first exchange"] = seconds_of(lambda: gather_objects(group, None))
    found["errors of all ranks"] = seconds_of(lambda: gather_objects(group, None), 5)
    found["recipes of all ranks"] = seconds_of(lambda: gather_objects(group, CONFIG), 5)
    found["control of a step"] = seconds_of(lambda: sum_over_ranks(group, *range(12)), 20)
    found["sockets"] = num_sockets()
    if rank == 0:
        results.put(found)
    # A rank that ended would break the connections of those that still wait.
    time.sleep(3600)


def measure(num_ranks: int, lazy: bool) -> dict[str, float]:
    """The figures of rank 0."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(num_ranks):
        arguments = (rank, num_ranks, port, lazy, results)
        processes.append(context.Process(target=rank_main, args=arguments))
    for process in processes:
        process.start()
    found: dict[str, float] = results.get()
    for process in processes:
        process.kill()
        process.join()
    return found


def as_markdown(found: dict[tuple[int, bool], dict[str, float]]) -> str:
    """The table of docs/performance.md."""
    where = machine()
    load = os.getloadavg()[0]
    head = (
        f"{where['cores']} cores ({where['processor']}), {where['kernel']}, {where['date']}; load average {load:.0f}. "
        "All ranks on this machine; seconds on rank 0."
    )
    columns = list(next(iter(found.values())))
    lines = [
        head,
        "",
        f"| ranks | {LAZY} | {' | '.join(columns)} |",
        f"|---:|---|{'---:|' * len(columns)}",
    ]
    for (num_ranks, lazy), row in found.items():
        cells = [
            f"{row[name]:.0f}" if name == "sockets" else f"{row[name]:.3f}" for name in columns
        ]
        lines.append(f"| {num_ranks} | {'set' if lazy else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md")
    given = parser.parse_args()
    found = {}
    for num_ranks in given.ranks:
        for lazy in (False, True):
            found[num_ranks, lazy] = measure(num_ranks, lazy)
    text = as_markdown(found)
    print(text)
    if given.docs:
        write_block("bench-groups", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
