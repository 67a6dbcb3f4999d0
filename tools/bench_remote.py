"""Measure uploads to an object store: their rate beside s3fs's put, and what they cost the training beside them.

    python -m tools.bench_remote [--size 512M] [--runs 5] [--directory DIR]

The store is tools/s3_sink.py, a process on this machine that discards what it receives. ``rate``: in each round, one
upload of the same files by each, in turns: ours as in a run, which also verifies the files before and publishes the
checkpoint after. ``steps``: two ranks with a model of 5 million weights, all-reduced by gloo, train in windows with and
without the uploading process in turns; the figure is the ratio of the median times of a step. The sink has the lowest
priority there, because it would be another machine. Ratios of neighboring rounds, and their median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from automodel_ckpt.checkpoint.remote.child_process import Child
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.store import Store
from automodel_ckpt.checkpoint.remote.uploader import LINK, LOCK, Job
from tests.support import tiny
from tools.bench_rounds import machine, parse_size
from tools.s3_sink import s3_sink

NAME = "epoch_0_step_10"
_WINDOW_STEPS = 40


def make_checkpoint(root: Path, nbytes: int) -> Path:
    """Save a checkpoint of about *nbytes*: the weights and AdamW's moments of one large parameter."""
    made = tiny.recipe()
    large = torch.nn.Linear(1024, max(1, nbytes // 3 // 4096), bias=False)
    made.model.large = large
    made.optimizer.add_param_group({"params": large.parameters()})
    for parameter in large.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.optimizer.step()
    made.optimizer.zero_grad()
    tiny.save(root, made, 10)
    return root / NAME


def rates(checkpoint: Path, runs: int) -> dict[str, list[float]]:
    """Upload in turns; return the seconds of each, and the seconds of processor time of this process (``cpu``)."""
    import s3fs  # type: ignore[import-untyped]

    seconds: dict[str, list[float]] = {"put": [], "ours": [], "put, cpu": [], "ours, cpu": []}
    with s3_sink() as environment, mock.patch.dict(os.environ, environment):
        theirs = s3fs.S3FileSystem(skip_instance_cache=True)
        for number in range(runs + 1):
            started, cpu_started = time.perf_counter(), time.process_time()
            theirs.put(str(checkpoint), f"bucket/put/{number}", recursive=True)
            middle, cpu_middle = time.perf_counter(), time.process_time()
            run = RemoteRun(Store(f"s3://bucket/ours/{number}"))
            push_checkpoint(run, checkpoint, checkpoint.parent / "memory")
            run.point("val_loss", "min")
            ended, cpu_ended = time.perf_counter(), time.process_time()
            # The first round is for caches.
            if number:
                seconds["put"].append(middle - started)
                seconds["ours"].append(ended - middle)
                seconds["put, cpu"].append(cpu_middle - cpu_started)
                seconds["ours, cpu"].append(cpu_ended - cpu_middle)
    return seconds


def _rank(rank: int, directory: str, environment: dict[str, str], windows: int) -> None:
    """Train in windows; rank 0 runs uploads in every second one, and writes the seconds of steps to a file."""
    torch.set_num_threads(1)
    root = Path(directory)
    dist.init_process_group("gloo", f"file://{root}/rendezvous", rank=rank, world_size=2)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(5)])
    optimizer = torch.optim.AdamW(model.parameters())
    times: dict[str, list[float]] = {"without": [], "with": []}
    for window in range(windows):
        uploading = None
        if rank == 0 and window % 2:
            uploading = _Uploading(root / "run", environment, window)
        seconds = []
        for _ in range(_WINDOW_STEPS):
            started = time.perf_counter()
            model(torch.ones(64, 1024)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        if uploading is not None:
            uploading.end()
        times["with" if window % 2 else "without"].append(statistics.median(seconds))
        dist.barrier()
    if rank == 0:
        (root / "times.json").write_text(json.dumps(times))


class _Uploading:
    """The uploading process of a run. It uploads the checkpoint to a new URL until :meth:`end`."""

    def __init__(self, root: Path, environment: dict[str, str], window: int) -> None:
        for path in (root / f"{LINK}{NAME}", root / f"{LINK}{NAME}.json"):
            path.unlink(missing_ok=True)
        os.symlink(NAME, root / f"{LINK}{NAME}")
        job = Job(f"s3://bucket/steps/{window}", {}, f"window-{window}", "val_loss", "min")
        self._root = root
        with mock.patch.dict(os.environ, environment):
            self._child = Child(
                "automodel_ckpt.checkpoint.remote.uploader", root, LOCK, asdict(job)
            )
        while not (root / f"{LINK}{NAME}.json").exists() and not self._child.has_ended:
            # Until the process is past its imports, and sends.
            time.sleep(0.01)

    def end(self) -> None:
        """Report whether the upload lasted for the whole window, and end it."""
        if not (self._root / f"{LINK}{NAME}").is_symlink():
            print("an upload ended before its window: use a larger --size", file=sys.stderr)
        self._child._process.kill()
        self._child._process.wait()


def steps(checkpoint: Path, runs: int) -> dict[str, list[float]]:
    """Return the median seconds of a step in each window with and without an upload."""
    root = checkpoint.parent.parent
    with s3_sink(niceness=19) as environment:
        spawn(_rank, (str(root), environment, 2 * runs), nprocs=2)  # type: ignore[no-untyped-call]
    found: dict[str, list[float]] = json.loads((root / "times.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size("512M"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        checkpoint = make_checkpoint(Path(directory) / "run", options.size)
        nbytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        found = rates(checkpoint, options.runs)
        ratios = [put / ours for put, ours in zip(found["put"], found["ours"], strict=True)]
        for name, seconds in found.items():
            middle = statistics.median(seconds)
            print(f"{name:10} {middle:6.2f} s  {nbytes / 1e6 / middle:7.0f} MB/s")
        print(
            f"rate of ours / put: {statistics.median(ratios):.2f} {[round(r, 2) for r in ratios]}"
        )
        times = steps(checkpoint, options.runs)
        ratios = [w / wo for w, wo in zip(times["with"], times["without"], strict=True)]
        print(f"a step without an upload: {1e3 * statistics.median(times['without']):.1f} ms")
        print(
            f"step with / without: {statistics.median(ratios):.3f} {[round(r, 3) for r in ratios]}"
        )


if __name__ == "__main__":
    main()
