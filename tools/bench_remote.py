"""Measure uploads to an object store: their rate beside s3fs's put, and what they cost the training beside them.

    python -m tools.bench_remote [--size 512M] [--runs 5] [--only rate] [--part-size 16M] [--server sink] [--ranks 2]

``rate``: in each round, one upload of the same files by each, in turns: ours as in a run, which also verifies the files
before and publishes the checkpoint after. The store is tools/s3_sink.py, a process on this machine that discards what
it receives. ``steps``: ranks with a model of 5 million weights, all-reduced by gloo, train in windows with and
without the uploading process in turns; the figures are ratios of the median times of a step, and of the processor time
of all ranks in a window. The store is the sink, or with ``--server moto`` moto, which keeps what it receives. It has
the lowest priority there, because it would be another machine. Ratios of neighboring rounds, and their median. On a
busy machine, only processor times can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from automodel_ckpt.checkpoint.remote import push
from automodel_ckpt.checkpoint.remote.child_process import Child
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.remote.uploader import LINK, LOCK, Job
from automodel_ckpt.checkpoint.store import multipart
from automodel_ckpt.checkpoint.store.store import Store
from tests.support.models import tiny
from tests.support.servers.object_store import object_store
from tools.bench_rounds import machine, parse_size
from tools.s3_sink import s3_sink

NAME = "epoch_0_step_10"
_WINDOW_STEPS = 40
_USAGE = ("", ", cpu", ", faults")
_KEYS = ("without", "with", "without, cpu", "with, cpu")


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
    """Upload in turns; return the seconds of each, and of this process the seconds of processor time (``cpu``) and the
    number of page faults."""
    import s3fs  # type: ignore[import-untyped]

    found: dict[str, list[float]] = {}

    def put(number: int) -> None:
        theirs.put(str(checkpoint), f"bucket/put/{number}", recursive=True)

    def ours(number: int) -> None:
        run = RemoteRun(Store(f"s3://bucket/ours/{number}"))
        push_checkpoint(run, checkpoint, checkpoint.parent / "memory")
        run.point("val_loss", "min")

    with s3_sink() as environment, mock.patch.dict(os.environ, environment):
        theirs = s3fs.S3FileSystem(skip_instance_cache=True)
        for number in range(runs + 1):
            for upload in (put, ours):
                started = _usage()
                upload(number)
                for label, before, after in zip(_USAGE, started, _usage(), strict=True):
                    # The first round is for caches.
                    if number:
                        found.setdefault(upload.__name__ + label, []).append(after - before)
    return found


def _usage() -> tuple[float, float, float]:
    """What :data:`_USAGE` names: the time, and the processor time and the page faults of this process."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return time.perf_counter(), time.process_time(), faults


def _rank(
    rank: int, directory: str, environment: dict[str, str], windows: int, num_ranks: int
) -> None:
    """Train in windows; rank 0 runs uploads in every second one, and writes the seconds of steps to a file."""
    torch.set_num_threads(1)
    root = Path(directory)
    dist.init_process_group("gloo", f"file://{root}/rendezvous", rank=rank, world_size=num_ranks)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(5)])
    optimizer = torch.optim.AdamW(model.parameters())
    times: dict[str, list[float]] = {key: [] for key in _KEYS}
    for window in range(windows):
        uploading = None
        if rank == 0 and window % 2:
            uploading = _Uploading(root / "run", environment, window)
        seconds = []
        cpu_started = time.process_time()
        for _ in range(_WINDOW_STEPS):
            started = time.perf_counter()
            model(torch.ones(64, 1024)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        cpu = torch.tensor([time.process_time() - cpu_started])
        if uploading is not None:
            uploading.end()
        dist.all_reduce(cpu)
        name = "with" if window % 2 else "without"
        times[name].append(statistics.median(seconds))
        times[f"{name}, cpu"].append(float(cpu) / _WINDOW_STEPS)
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


def steps(checkpoint: Path, runs: int, server: str, num_ranks: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each window with and without an upload: the median, and the processor time of
    all ranks (``cpu``)."""
    root = checkpoint.parent.parent
    store = moto if server == "moto" else partial(s3_sink, niceness=19)
    with store() as environment:
        arguments = (str(root), environment, 2 * runs, num_ranks)
        spawn(_rank, arguments, nprocs=num_ranks)  # type: ignore[no-untyped-call]
    found: dict[str, list[float]] = json.loads((root / "times.json").read_text())
    return found


@contextlib.contextmanager
def moto() -> Iterator[dict[str, str]]:
    """Run an S3 server that keeps what it receives, in a process; yield the environment of its clients."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_moto, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve_moto(connection: Connection) -> None:
    os.nice(19)
    # A line for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with object_store() as store:
        connection.send(store.environment)
        threading.Event().wait()


def _report(label: str, ours: Sequence[float], others: Sequence[float]) -> None:
    ratios = [one / other for one, other in zip(ours, others, strict=True)]
    print(f"{label}: {statistics.median(ratios):.3f} {[round(ratio, 3) for ratio in ratios]}")


def _report_rates(found: Mapping[str, Sequence[float]], nbytes: int) -> None:
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        if name.endswith("faults"):
            print(f"{name:12} {middle:.0f}")
        else:
            print(f"{name:12} {middle:6.2f} s  {nbytes / 1e6 / middle:7.0f} MB/s")
    _report("rate of ours / put", found["put"], found["ours"])
    _report("processor time of put / ours", found["put, cpu"], found["ours, cpu"])


def _report_steps(found: Mapping[str, Sequence[float]]) -> None:
    for name, seconds in found.items():
        print(f"a step {name}: {1e3 * statistics.median(seconds):.1f} ms")
    _report("step with / without", found["with"], found["without"])
    _report("processor time with / without", found["with, cpu"], found["without, cpu"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size("512M"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=("rate", "steps"), default=None)
    parser.add_argument("--part-size", type=parse_size, default=multipart.PART_BYTES)
    parser.add_argument("--server", choices=("sink", "moto"), default="sink")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    print(machine(), "load:", *os.getloadavg())
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        checkpoint = make_checkpoint(Path(directory) / "run", options.size)
        nbytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        if options.only != "steps":
            with (
                mock.patch.object(multipart, "PART_BYTES", options.part_size),
                mock.patch.object(push, "PART_BYTES", options.part_size),
            ):
                _report_rates(rates(checkpoint, options.runs), nbytes)
        if options.only != "rate":
            _report_steps(steps(checkpoint, options.runs, options.server, options.ranks))
        print("load:", *os.getloadavg())


if __name__ == "__main__":
    main()
