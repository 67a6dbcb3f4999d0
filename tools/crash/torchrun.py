"""torchrun with a plain script (:mod:`tools.torchrun_dcp`), started and killed as this project's runs are."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from tools.crash.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


class Torchrun(Trainer):
    """A started torchrun. Its ranks import torch at each start, as they do in practice."""

    def command(self) -> int:
        os.chdir(ROOT)
        # Otherwise, a restarted rank may find the address of a rank before the restart, and the restart fails after
        # half a minute (pytorch #135712).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *self.words])

    def ranks(self) -> dict[int, int]:
        """The process ids of the ranks that started last, by rank."""
        found = {}
        for path in self.marks_directory.glob("rank_*.pid"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.stem.removeprefix("rank_"))] = int(path.read_text())
        return found

    def __exit__(self, *error: object) -> None:
        # torchrun starts each rank in a separate session.
        super().__exit__(*error)
        for process in self.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def words(run: Path, *, steps: int, restarts: int, is_async: bool) -> list[str]:
    """The arguments of torchrun that train in *run* to step *steps*."""
    found = [
        "--standalone",
        "--nproc-per-node=2",
        f"--max-restarts={restarts}",
        "-m",
        "tools.torchrun_dcp",
        str(run),
        f"--steps={steps}",
    ]
    return [*found, "--is-async"] if is_async else found
