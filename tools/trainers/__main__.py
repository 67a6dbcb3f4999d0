"""What a crash costs in other trainers, with their own checkpoints and with ours: a table for docs/guides/library.md.

    python -m tools.trainers               # 20 kills of each trainer: needs trl, lightning and peft (make trainers)
    python -m tools.trainers --kills 3 --only GRPOTrainer

Each run is killed with SIGKILL at a random time, as often during a save as elsewhere, and started again by the same
code. It is then compared with a run that was not killed: final weights, the tensors of each step, and the logs.
"""

import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from tools.support import ROOT, parser_of, table, write_block
from tools.trainers.subjects import SUBJECTS, write_base

ROWS = ("resumed", "same weights", "same order", "same logs", "silent differences")
START = "start\n"
PAGE = ROOT / "docs" / "guides" / "library.md"


def _train(subject: str, base: Path, run: Path, ours: bool) -> None:
    """Train in this process, and write the weights."""
    run.mkdir(exist_ok=True)
    output = os.open(run / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.manual_seed(0)
    with open(run / "order.txt", "a") as order:
        order.write(START)
    model = SUBJECTS[subject](base, run, ours)
    torch.save(model.state_dict(), run / "weights.pt")


def _in_child(*arguments: Any, kill_after: float | None = None) -> tuple[int, float]:
    """Train in a forked process, and kill it after so many seconds. Return its exit code, and its seconds."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _train(*arguments)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            # Nothing of the parent is flushed or ended twice.
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), time.monotonic() - started


def _order(run: Path) -> dict[int, list[str]]:
    """Return the digests of each step, of the last time that it was made."""
    found: dict[int, list[str]] = {}
    for start in (run / "order.txt").read_text().split(START):
        of_start: dict[int, list[str]] = {}
        for line in start.splitlines():
            step, digest = line.split()
            of_start.setdefault(int(step), []).append(digest)
        found |= of_start
    return found


def _outcome(whole: Path, run: Path, code: int) -> dict[str, bool]:
    """Compare a run that was killed and started again with the *whole* one."""
    found = dict.fromkeys(ROWS, False)
    found["resumed"] = code == 0
    if code != 0:
        return found
    expected, weights = torch.load(whole / "weights.pt"), torch.load(run / "weights.pt")
    found["same weights"] = all(torch.equal(expected[name], weights[name]) for name in expected)
    found["same order"] = _order(whole) == _order(run)
    logs = [json.loads((each / "logs.json").read_text()) for each in (whole, run)]
    found["same logs"] = logs[0] == logs[1]
    found["silent differences"] = not all(found[row] for row in ROWS[:4])
    return found


def measure(subject: str, ours: bool, num_kills: int, seed: int, work: Path) -> Counter[str]:
    """Return how many of *num_kills* runs have each outcome of ``ROWS``."""
    base, whole = work / "base", work / "whole"
    if not base.exists():
        write_base(base)
    code, seconds = _in_child(subject, base, whole, ours)
    if code != 0:
        sys.exit(f"{subject} failed:\n{(whole / 'output.txt').read_text()[-3000:]}")
    numbers = random.Random(seed)
    total: Counter[str] = Counter()
    for number in range(num_kills):
        run = work / f"killed-{number}"
        _in_child(subject, base, run, ours, kill_after=numbers.uniform(0.1, 1.0) * seconds)
        code, _ = _in_child(subject, base, run, ours)
        outcome = _outcome(whole, run, code)
        total.update(row for row in ROWS if outcome[row])
        if ours and not all(outcome[row] for row in ROWS[:4]):
            print(f"{subject}, kill {number}: {outcome}; files in {run}", flush=True)
    return total


def main() -> int:
    """Print the table, and write it to the guide. Returns 1 if a run with our checkpoints differs."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills of each trainer (20)")
    parser.add_argument("--only", choices=SUBJECTS, help="one trainer")
    parser.add_argument("--seed", type=int, default=1, help="of the times of the kills (1)")
    parser.add_argument("--write", action="store_true", help="write the table to the guide")
    options = parser.parse_args()
    # Its own one is shared by processes: one that is killed while it holds it would stop the others.
    tqdm.set_lock(threading.RLock())
    for name in ("trl", "peft", "lightning", "automodel_ckpt.checkpoint.checkpointer"):
        # Once, and not in each of the forked processes.
        importlib.import_module(name)
    lines: list[list[object]] = []
    has_failed = False
    for subject in [options.only] if options.only else SUBJECTS:
        for ours in (False, True):
            work = Path(tempfile.mkdtemp(prefix="trainers-"))
            counts = measure(subject, ours, options.kills, options.seed, work)
            source = "ours" if ours else "its own"
            lines.append([subject, source, *(counts[row] for row in ROWS)])
            print(*lines[-1], sep=" | ", flush=True)
            has_failed |= ours and counts["silent differences"] > 0
    block = table(("trainer", "checkpoints", *ROWS), lines)
    print(block)
    if options.write:
        write_block("trainers", block, PAGE)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
