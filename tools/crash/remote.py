"""Campaign `remote`: uploads, publications, removals and downloads of checkpoints in a store, killed at any request.

The store is moto behind the proxy of tests/support/servers/fault_proxy.py, which counts requests. ``before``: the
process is
killed, and the request does not reach the store. ``after``: the store carries it out. ``any``: at a random instant.
``fault``: no kill; this request and some after it fail, are reset, or lose their reply. Afterwards, all objects are
read past the proxy and judged, a fresh start on an empty disk downloads what it finds, and a restart completes the
work.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint
from automodel_ckpt.checkpoint.remote.push import push_checkpoint
from automodel_ckpt.checkpoint.remote.run import SUPERSEDED, RemoteRun
from automodel_ckpt.checkpoint.remote.uploader import LINK
from automodel_ckpt.checkpoint.run.pending import step_of
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import AutomodelError
from tests.support.models import tiny
from tests.support.servers.fault_proxy import Fault, FaultProxy, ProxyRequest
from tests.support.servers.object_store import BUCKET, ObjectStore, faulty_store
from tools.crash import remote_jobs
from tools.crash.record import Record
from tools.crash.remote_jobs import METRIC, URL, Job

FIRST, SECOND, THIRD = "epoch_0_step_10", "epoch_0_step_20", "epoch_0_step_30"
MODES = ("before", "after", "any", "fault")
_FAULTS = (
    Fault(status=503),
    Fault(status=500),
    Fault(reset_request_after=0),
    Fault(reset_reply_after=0),
    Fault(reset_reply_after=20),
)
_JOB_SECONDS = 180.0
_Objects = dict[str, bytes]


@dataclass(frozen=True)
class Scenario:
    """What the store has before (*stored*), what a process then does, and what there is afterwards.

    *line* is the timeline whose checkpoints are on the local disk, and *pending* those to upload. *newest* are the
    checkpoints that a start may find at any time (None: none), and *final* those that are complete at the end.
    """

    name: str
    kind: str
    stored: tuple[str, ...]
    line: int
    pending: tuple[str, ...]
    newest: tuple[str | None, ...]
    final: tuple[str, ...]
    latest: str
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0


SCENARIOS = (
    Scenario("first", "upload", (), 0, (FIRST, SECOND), (None, SECOND), (FIRST, SECOND), SECOND),
    Scenario(
        "next", "upload", (FIRST, SECOND), 0, (THIRD,), (SECOND, THIRD), (SECOND, THIRD), THIRD,
        {"keep_last": 1, "went_back_to": 20},
    ),
    Scenario(
        "back", "upload", (FIRST, SECOND, THIRD), 1, (SECOND,), (FIRST, SECOND, THIRD), (SECOND, THIRD), SECOND,
        {"keep_last": 1, "went_back_to": 10, "token": "second"},
    ),
    Scenario("pull", "pull", (FIRST, SECOND), 0, (), (SECOND,), (FIRST, SECOND), SECOND),
    Scenario(
        "train", "train", (), 0, (), (None, FIRST, SECOND, THIRD), (THIRD,), THIRD, share=0.03
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Where a process is stopped: at request *at*; in mode ``any``, after this fraction of the undisturbed time."""

    scenario: Scenario
    mode: str
    at: float

    def __str__(self) -> str:
        return f"{self.scenario.name}/{self.mode}/{self.at:.4g}"


class Bench:
    """A store behind a proxy, the checkpoints of two timelines, and the fork server that starts processes."""

    def __init__(self, store: ObjectStore, proxy: FaultProxy, directory: Path) -> None:
        import boto3  # type: ignore[import-untyped]

        self.proxy, self.directory = proxy, directory
        self._client = boto3.client("s3", endpoint_url=store.endpoint)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([remote_jobs.__name__])
        self._environment = dict(store.environment) | {"AWS_ENDPOINT_URL": proxy.endpoint}
        self._stored: dict[str, dict[str, tuple[bytes, dict[str, str]]]] = {}
        self.lines = [self._line(number) for number in range(2)]
        self.root = directory / "run"

    def _line(self, number: int) -> Path:
        """The checkpoints of a timeline. Losses differ, so that LOWEST_VAL is not LATEST."""
        root = self.directory / f"line-{number}"
        made = tiny.recipe(number)
        for step, loss in ((10, 1.0), (20, 0.5 + number / 10), (30, 0.7)):
            tiny.train(made)
            losses = {"step": step, "val_loss": loss}
            tiny.save(root, made, step, losses=losses, validated=True)
        return root

    def lay_out(self, scenario: Scenario) -> None:
        """Put what the scenario starts from into the store and the run directory."""
        if scenario.name not in self._stored:
            self._clear()
            run = RemoteRun(Store(URL))
            for name in scenario.stored:
                push_checkpoint(run, self.lines[0] / name, self.directory / "memory")
                run.point(METRIC, "min")
            self._stored[scenario.name] = self._objects()
        self._clear()
        for key, (data, metadata) in self._stored[scenario.name].items():
            self._client.put_object(Bucket=BUCKET, Key=key, Body=data, Metadata=metadata)
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        for name in scenario.pending:
            (self.root / name).symlink_to(self.lines[scenario.line] / name)
            (self.root / f"{LINK}{name}").symlink_to(name)
        self.proxy.rule = None
        self.proxy.requests.clear()
        self.proxy.answered.clear()

    def _clear(self) -> None:
        for key in self._objects():
            self._client.delete_object(Bucket=BUCKET, Key=key)
        for upload in self.unfinished():
            self._client.abort_multipart_upload(Bucket=BUCKET, **upload)

    def unfinished(self) -> list[dict[str, str]]:
        """The unfinished uploads in parts."""
        reply = self._client.list_multipart_uploads(Bucket=BUCKET)
        return [
            {"Key": each["Key"], "UploadId": each["UploadId"]} for each in reply.get("Uploads", [])
        ]

    def _objects(self) -> dict[str, tuple[bytes, dict[str, str]]]:
        found = {}
        for entry in self._client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
            reply = self._client.get_object(Bucket=BUCKET, Key=entry["Key"])
            found[entry["Key"]] = reply["Body"].read(), reply["Metadata"]
        return found

    def objects(self) -> _Objects:
        """All objects below the URL of the run, by names relative to it, read past the proxy."""
        prefix = f"{URL.removeprefix(f's3://{BUCKET}/')}/"
        return {key.removeprefix(prefix): data for key, (data, _) in self._objects().items()}

    def start(self, scenario: Scenario, *, is_restart: bool = False) -> BaseProcess:
        """Start the scenario's process. A restarted run resumes from the newest checkpoint on its disk."""
        options = dict(scenario.options)
        if is_restart and scenario.kind == "upload":
            options |= {"token": "restart", "went_back_to": step_of(scenario.latest)}
            # As a trainer does with the checkpoint that it resumes from.
            with contextlib.suppress(FileExistsError):
                (self.root / f"{LINK}{scenario.latest}").symlink_to(scenario.latest)
        job = Job(scenario.kind, self.root, self._environment, options)
        process = self._context.Process(target=remote_jobs.run, args=(job,))
        process.start()
        return process

    def wait(self, process: BaseProcess) -> None:
        """Wait until a process has ended, and the proxy has forwarded its last request."""
        process.join(_JOB_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        deadline = time.monotonic() + 10
        while self.proxy.num_active and time.monotonic() < deadline:
            time.sleep(0.002)


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A bench in a temporary directory."""
    with (
        tempfile.TemporaryDirectory(
            prefix="crash-remote-", ignore_cleanup_errors=True
        ) as directory,
        mock.patch("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 256),
        mock.patch("automodel_ckpt.checkpoint.store.multipart.PART_BYTES", remote_jobs.PART_BYTES),
        faulty_store() as (store, proxy),
    ):
        yield Bench(store, proxy, Path(directory))


class Killer:
    """The rule of the proxy at a point: kills the process, or makes requests fail."""

    def __init__(self, point: Point, seed: int) -> None:
        self._point = point
        self._random = random.Random(seed)
        self._pid: int | None = None
        self._known = threading.Event()
        self.request = "a random instant"

    def watch(self, process: BaseProcess) -> None:
        """Set the process to kill. Its requests wait for this."""
        self._pid = process.pid
        self._known.set()

    def kill(self) -> None:
        """Kill the process, and half of the time the uploading process of a trainer."""
        assert self._known.wait(30)
        assert self._pid is not None
        pids = [self._pid]
        if self._random.random() < 0.5:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
                pids += [int(pid) for pid in children.split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __call__(self, request: ProxyRequest) -> Fault | None:
        point = self._point
        if point.mode == "fault":
            is_hit = point.at <= request.number < point.at + 12
            return self._random.choice(_FAULTS) if is_hit and self._random.random() < 0.5 else None
        if point.mode == "any" or request.number != point.at:
            return None
        self.request = f"{request.method} {request.target}"
        self.kill()
        return Fault(reset_request_after=0) if point.mode == "before" else None


def judge(made: Bench, point: Point, seconds: float, seed: int = 0) -> tuple[str, list[str], str]:
    """Run a point. Return what a fresh start then finds, the broken promises, and the request at which it was."""
    made.lay_out(point.scenario)
    killer = Killer(point, seed)
    made.proxy.rule = killer
    process = made.start(point.scenario)
    killer.watch(process)
    if point.mode == "any":
        time.sleep(point.at * seconds)
        killer.kill()
    made.wait(process)
    made.proxy.rule = None
    wrong = []
    if point.mode == "fault" and point.scenario.kind != "pull" and process.exitcode != 0:
        wrong.append(f"ended with {process.exitcode} after faults that passed")
    wrong += unsound(made.objects(), made.directory)
    newest, problems = fresh_start(made, point.scenario)
    wrong += problems
    sent = parts(made.proxy.answered)
    made.proxy.requests.clear()
    process = made.start(point.scenario, is_restart=True)
    made.wait(process)
    if process.exitcode != 0:
        log = (made.directory / "log").read_text()
        wrong.append(f"the restart ended with {process.exitcode}: {log}")
    again = sent & parts(made.proxy.requests)
    if again and point.mode != "fault":
        wrong.append(f"parts were sent again: {sorted(again)[:3]}")
    wrong += incomplete(made, point.scenario)
    return newest or "nothing", wrong, killer.request


def unsound(objects: _Objects, directory: Path) -> list[str]:
    """What is wrong with the objects of a run: an incomplete checkpoint with a manifest, a pointer to nothing."""
    wrong = []
    for path, data in objects.items():
        name, _, file = path.partition("/")
        if file != layout.MANIFEST:
            continue
        manifest = Manifest.parse(data, path)
        with tempfile.TemporaryDirectory(dir=directory) as copy:
            for each in manifest.files:
                if f"{name}/{each}" in objects:
                    target = Path(copy) / each
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(objects[f"{name}/{each}"])
            wrong += [
                f"{problem.what}: {problem.where}" for problem in verify(Path(copy), manifest)
            ]
    for pointer in layout.POINTERS:
        if pointer in objects:
            named = objects[pointer].decode().split("\n")[0]
            if f"{named}/{layout.MANIFEST}" not in objects:
                wrong.append(f"{pointer} names {named}, which is not complete")
    return wrong


def fresh_start(made: Bench, scenario: Scenario) -> tuple[str | None, list[str]]:
    """Download the newest checkpoint to an empty disk, as a start does. Return its name, and what is wrong."""
    run = RemoteRun(Store(URL))
    newest = run.newest()
    name = None if newest is None else str(newest.name)
    wrong = [] if name in scenario.newest else [f"a start finds {name}"]
    if name is not None:
        with tempfile.TemporaryDirectory(dir=made.directory) as disk:
            try:
                pull_checkpoint(run, name, Path(disk))
            except AutomodelError as error:
                wrong.append(f"{name} cannot be loaded: {error}")
    return name, wrong


def parts(requests: Sequence[ProxyRequest]) -> set[str]:
    """The parts that requests send, as path, upload and number."""
    return {request.target for request in requests if "partNumber=" in request.target}


def incomplete(made: Bench, scenario: Scenario) -> list[str]:
    """What is wrong after the restart: it must have completed the work, and left nothing else."""
    objects = made.objects()
    wrong = unsound(objects, made.directory)
    names = {path.partition("/")[0] for path in objects if path.startswith("epoch")}
    if names != set(scenario.final):
        wrong.append(f"after the restart there are {sorted(names)}")
    latest = objects.get(layout.LATEST, b"").decode().split("\n")[0]
    if latest != scenario.latest:
        wrong.append(f"after the restart, LATEST names {latest or 'nothing'}")
    elif (
        objects[f"{latest}/{layout.MANIFEST}"]
        != (made.root / latest / layout.MANIFEST).read_bytes()
    ):
        wrong.append(f"after the restart, {latest} in the store is that of another timeline")
    for path in objects:
        name, _, file = path.partition("/")
        manifest = objects.get(f"{name}/{layout.MANIFEST}")
        if not file or manifest is None or file in (layout.MANIFEST, SUPERSEDED):
            continue
        if file not in Manifest.parse(manifest, path).files:
            wrong.append(f"{path} is left")
    if unfinished := made.unfinished():
        wrong.append(f"unfinished uploads are left: {unfinished[:2]}")
    if scenario.kind == "pull":
        copy = made.root / scenario.latest
        wrong += [problem.what for problem in verify(copy, Manifest.read(copy))]
    return wrong


def points_of(made: Bench, chosen: random.Random) -> tuple[list[Point], dict[str, float]]:
    """All points in a random order, and the seconds of each scenario when nothing is killed."""
    found, seconds = [], {}
    for scenario in SCENARIOS:
        for _ in range(2):
            # The first process pays for the fork server.
            made.lay_out(scenario)
            started = time.monotonic()
            made.wait(made.start(scenario))
            seconds[scenario.name] = time.monotonic() - started
        if wrong := incomplete(made, scenario):
            raise RuntimeError(f"{scenario.name} fails without a kill: {wrong}")
        count = len(made.proxy.requests)
        for mode in MODES:
            if mode == "fault" and scenario.kind == "train":
                continue
            for at in range(count):
                if chosen.random() < scenario.share:
                    found.append(Point(scenario, mode, chosen.random() if mode == "any" else at))
    chosen.shuffle(found)
    return found, seconds


def run(*, points: int, seed: int, seconds: float) -> Record:
    """Run the campaign."""
    record = Record("remote", {"points": points, "seed": seed})
    deadline = time.monotonic() + seconds
    with bench() as made:
        found, durations = points_of(made, random.Random(seed))
        record.notes["possible points"] = len(found)
        for number, point in enumerate(found[:points]):
            if time.monotonic() > deadline:
                break
            newest, wrong, request = judge(made, point, durations[point.scenario.name], number)
            outcome = f"{point.scenario.name}: a start finds {newest}"
            record.add(outcome, wrong, point=str(point), number=number, request=request)
    return record
