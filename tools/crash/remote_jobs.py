"""What the processes of the campaign `remote` run until they are killed: uploads, downloads, and a whole trainer.

A fork server imports this module once. The description of the S3 API is read there too, which takes longer than a job.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiobotocore.session  # type: ignore[import-untyped]
import s3fs.core  # type: ignore[import-untyped]

from automodel_ckpt.checkpoint.options import RemoteStorage
from automodel_ckpt.checkpoint.remote import child_process, uploader
from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.store import multipart
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import AutomodelError
from tests.support.models import tiny

PART_BYTES = 8 << 10
"""The largest file of a tiny checkpoint has five parts of this size."""
URL = "s3://bucket/run"
METRIC = "val_loss"

_session = aiobotocore.session.get_session()
_session.get_component("data_loader").load_service_model("s3", "service-2")


@dataclass(frozen=True)
class Job:
    """A process of the campaign: what it does (*kind*), in which directory, with which keys of an upload job."""

    kind: str
    root: Path
    environment: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


def run(job: Job) -> None:
    """Run a job. An error of the store ends the process with code 1."""
    os.environ.update(job.environment)
    s3fs.core.get_session = lambda: _session
    multipart.PART_BYTES = PART_BYTES
    child_process._FIRST_PAUSE_SECONDS = 0.02
    os.environ["AUTOMODEL_CKPT_UPLOAD_NICENESS"] = "0"
    log = job.root.with_name("log")
    sys.stderr = log.open("w")
    try:
        _KINDS[job.kind](job)
    except AutomodelError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    # Without the end of the interpreter, which waits for threads of the libraries.
    os._exit(0)


def _upload(job: Job) -> None:
    fields = {"token": "first", "num_threads": 2, **job.options}
    uploading = uploader.Uploader(
        job.root, uploader.Job(URL, {}, metric_key=METRIC, mode="min", **fields)
    )
    uploading.finish()
    uploading.run()


def _pull(job: Job) -> None:
    run = RemoteRun(Store(URL))
    newest = run.newest()
    assert newest is not None
    if not (job.root / str(newest.name)).exists():
        pull_checkpoint(run, str(newest.name), job.root, num_threads=2)


def _train(job: Job) -> None:
    """A trainer with its uploading process: resume, two steps with a save each, and the wait at the end."""
    made = tiny.recipe()
    remote = RemoteStorage(URL, keep_last=1, required=True)
    checkpointer = tiny.checkpointer(job.root, remote=remote, keep_last=1)
    checkpointer.open()
    resumed = checkpointer.load(vars(made))
    first = 10 if resumed is None else resumed.step + 10
    for step in range(first, 31, 10):
        tiny.train(made)
        checkpointer.save(vars(made), step=step, epoch=0)
    checkpointer.finish_uploads()
    checkpointer.close()


_KINDS = {"upload": _upload, "pull": _pull, "train": _train}
