"""How often a process hangs that is forked while the forking one accepts connections: ``--wait`` as ranks do.

``python -m tools.forked_connections --starts 100`` forks four processes per start, as the launcher does ranks, from a
process that serves a TCPStore; each connects to it. A start hangs if a process has not ended after six seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from automodel_ckpt.cli.launch.failure_directory import FailureDirectory
from automodel_ckpt.cli.launch.forked_rank import await_forks

NUM_RANKS = 4
HANG_SECONDS = 6.0


def main() -> None:
    """Print how many starts there were, and how many of them hung."""
    parser = argparse.ArgumentParser(prog="python -m tools.forked_connections", description=__doc__)
    parser.add_argument("--starts", type=int, default=100, help="how many starts (100)")
    parser.add_argument(
        "--wait", action="store_true", help="connect when all four have been forked, as ranks do"
    )
    options = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    hangs = 0
    with tempfile.TemporaryDirectory() as directory:
        registered = FailureDirectory(Path(directory))
        for start in range(options.starts):
            hangs += _hangs(registered, start, store.port, waits=options.wait)
    print(f"{hangs} of {options.starts} starts of {NUM_RANKS} processes hung")
    # The thread of the store must not outlive the interpreter.
    os._exit(0)


def _hangs(registered: FailureDirectory, start: int, port: int, *, waits: bool) -> bool:
    left = set()
    for rank in range(NUM_RANKS):
        process = os.fork()
        if process == 0:
            registered.register_process(start, rank)
            if waits:
                await_forks(registered, start, NUM_RANKS, num_nodes=1)
            TCPStore("localhost", port, NUM_RANKS, False, timeout=timedelta(minutes=5))
            os._exit(0)
        left.add(process)
    end = time.monotonic() + HANG_SECONDS
    while left and time.monotonic() < end:
        left -= {process for process in left if os.waitpid(process, os.WNOHANG)[0]}
        time.sleep(0.001)
    for process in left:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return bool(left)


if __name__ == "__main__":
    main()
