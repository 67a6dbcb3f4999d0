"""Uploads of files: how fast bytes are sent, what an interrupted upload has sent already, and uploads to S3 in parts.

To S3, a file is sent in one request, or in parts that are sent in parallel and continued after an interruption. The
object appears when the last request completes the upload, so it is complete or absent. It never replaces another
object, and has the digest of its file as metadata: a repetition finds it. The client library sends a checksum with each
request, which the store verifies.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict
from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note
from automodel_ckpt.checkpoint.store.conditional import NotSupported, s3_call
from automodel_ckpt.checkpoint.store.store import Store

_MAX_MEMORY_BYTES = 64 << 20


class Throttle:
    """Limits the rate of all threads together to *bytes_per_second*; None: no limit. Also counts the bytes."""

    def __init__(
        self,
        bytes_per_second: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self.nbytes = 0
        self.total_bytes = 0
        """What :attr:`nbytes` will be when the files in progress are sent, as far as :meth:`expect` was called."""
        self._stopped = threading.Event()
        # A wait that stop() ends: at a low rate, it can take minutes.
        self._clock, self._sleep = clock, sleep or self._stopped.wait
        self._lock = threading.Lock()
        self._free_at = clock()

    def stop(self) -> None:
        """Make :meth:`take` raise from here on, so that uploads end after the requests in progress."""
        self._stopped.set()

    def expect(self, nbytes: int) -> None:
        """Record that *nbytes* are to be sent from here on."""
        self.total_bytes = self.nbytes + nbytes

    def take(self, nbytes: int) -> None:
        """Wait until *nbytes* more may be sent. Raises InterruptedError after :meth:`stop`."""
        if self._stopped.is_set():
            raise InterruptedError("the upload was stopped")
        with self._lock:
            self.nbytes += nbytes
            if self.bytes_per_second is None:
                return
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self.bytes_per_second
        if begin > now:
            self._sleep(begin - now)
            if self._stopped.is_set():
                raise InterruptedError("the upload was stopped")


@dataclass
class UploadMemory:
    """What an interrupted upload of one checkpoint has sent, in a file on the local disk.

    It belongs to the checkpoint with a manifest of this *digest*, and to the store at *url*. *done* are the files that
    are in the store. *parts* are uploads of large files in parts: the ID of the upload and the bytes of a part, by
    file.
    """

    path: Path
    digest: str
    url: str
    done: set[str] = field(default_factory=set)
    parts: dict[str, ValueDict] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def read(cls, path: Path, digest: str, url: str) -> UploadMemory:
        """Read the memory of the upload with the manifest *digest* to *url*; empty if there is none, or if it is
        damaged."""
        memory = cls(path, digest, url)
        found = read_note(path.parent, path.name, _MAX_MEMORY_BYTES)
        # What was sent to another store is not in this one.
        if found.get("digest") == digest and found.get("url") == url:
            with contextlib.suppress(*Damaged):
                done = {str(name) for name in found["done"]}
                memory.parts = {str(name): dict(entry) for name, entry in found["parts"].items()}
                memory.done = done
        return memory

    def note_done(self, name: str) -> None:
        """Record that a file is in the store."""
        with self._lock:
            self.done.add(name)
            self.parts.pop(name, None)
            self._write()

    def note_parts(self, name: str, entry: ValueDict | None) -> None:
        """Record the upload of a file in parts; None: there is none."""
        with self._lock:
            if entry is None:
                self.parts.pop(name, None)
            else:
                self.parts[name] = entry
            self._write()

    def forget(self) -> None:
        """Remove the file: the upload is complete, or must start from the beginning."""
        with _ignoring_read_only():
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        document = {
            "digest": self.digest,
            "url": self.url,
            "done": sorted(self.done),
            "parts": self.parts,
        }
        with _ignoring_read_only():
            write_note(self.path, document)


@contextlib.contextmanager
def _ignoring_read_only() -> Iterator[None]:
    """Ignore that a directory must not be written, such as a checkpoint on an archive that is mounted
    read-only.

    Without the memory, a later attempt sends all files again.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise


PART_BYTES = 16 << 20
"""Bytes of a part. S3 accepts parts from 5 MiB, and at most 10,000 of them.

The C library returns blocks of more than 32 MiB to the kernel each time, and the copies of a part in the client then
cost a page fault for every 4 KiB (docs/performance.md).
"""
_MAX_PARTS = 10_000
_DIGEST = "xxh3"
"""Name of the metadata with a file's digest."""
_DONE = "written in parts"


def has_parts(store: Store) -> bool:
    """Whether large files are uploaded to the store in parts, and objects have metadata: S3."""
    return "s3" in store.fs.protocol


def has_digest(store: Store, name: str, digest: str) -> bool:
    """Whether there is an object that was uploaded from a file with this *digest*."""
    with store.reporting("read", name):
        try:
            found = store.fs.metadata(store.key(name))
        except FileNotFoundError:
            return False
    return bool(found.get(_DIGEST) == digest)


def upload_in_one_request(
    store: Store, name: str, path: Path, digest: str, throttle: Throttle
) -> bool:
    """Upload the file *path* as the object *name*, unless there is one. Return whether it was written.

    Raises :class:`StoreError`, and OSError for the local file.
    """
    data = path.read_bytes()
    throttle.take(len(data))
    return _call_exclusively(store, "put_object", name, Body=data, Metadata={_DIGEST: digest})


def upload_in_parts(
    store: Store,
    name: str,
    path: Path,
    digest: str,
    memory: UploadMemory,
    throttle: Throttle,
    pool: Executor,
) -> bool:
    """Upload the file *path* as the object *name*, unless there is one. Return whether it was written.

    *memory* has its upload from an earlier attempt, if any. Parts are sent by the threads of *pool*. Raises
    :class:`StoreError`, and OSError for the local file.
    """
    nbytes = path.stat().st_size
    bucket, key, _ = store.fs.split_path(store.key(name))
    target = {"Bucket": bucket, "Key": key}
    with store.reporting(_DONE, name):
        entry, sent = _continued(store, target, memory.parts.get(name), nbytes)
        if entry is None:
            # Before anything is sent: the last request of an earlier attempt may have completed it.
            if store.version(name) is not None:
                return False
            part_bytes = max(PART_BYTES, math.ceil(nbytes / _MAX_PARTS))
            created = store.fs.call_s3(
                "create_multipart_upload", **target, Metadata={_DIGEST: digest}
            )
            entry = {"id": created["UploadId"], "part_bytes": part_bytes}
            memory.note_parts(name, entry)
    part_bytes = int(entry["part_bytes"])

    def send(number: int) -> str:
        start = (number - 1) * part_bytes
        with path.open("rb") as file:
            data = os.pread(file.fileno(), min(part_bytes, nbytes - start), start)
        throttle.take(len(data))
        with store.reporting(_DONE, name):
            reply = store.fs.call_s3(
                "upload_part", **target, UploadId=entry["id"], PartNumber=number, Body=data
            )
        return str(reply["ETag"])

    num_parts = math.ceil(nbytes / part_bytes)
    missing = [number for number in range(1, num_parts + 1) if number not in sent]
    for number, tag in zip(missing, pool.map(send, missing), strict=True):
        sent[number] = tag
    parts = [{"PartNumber": number, "ETag": sent[number]} for number in sorted(sent)]
    is_written = _call_exclusively(
        store,
        "complete_multipart_upload",
        name,
        UploadId=entry["id"],
        MultipartUpload={"Parts": parts},
    )
    # A store may have removed the parts also if there was an object.
    memory.note_parts(name, None)
    return is_written


def _call_exclusively(store: Store, method: str, name: str, **arguments: Any) -> bool:
    """Call a method of the S3 client that writes an object unless there is one. Return whether it was written."""
    key = store.key(name)
    with store.reporting("written", name):
        if store.is_conditional:
            try:
                return s3_call(store.fs, method, key, **arguments, IfNoneMatch="*")
            except NotSupported:
                store.ignore_conditions()
        return s3_call(store.fs, method, key, **arguments)


def _continued(
    store: Store, target: TextDict, entry: ValueDict | None, nbytes: int
) -> tuple[ValueDict | None, dict[int, str]]:
    """Return the upload to continue with its parts in the store, as number -> tag; (None, {}) if there is none."""
    if entry is None:
        return None, {}
    part_bytes = int(entry["part_bytes"])
    sent = {}
    after = 0
    while True:
        try:
            reply = store.fs.call_s3(
                "list_parts", **target, UploadId=entry["id"], PartNumberMarker=after
            )
        except FileNotFoundError:
            # It was completed, or the store or a lifecycle rule removed it.
            return None, {}
        for part in reply.get("Parts", []):
            number = int(part["PartNumber"])
            expected = min(part_bytes, nbytes - (number - 1) * part_bytes)
            if int(part["Size"]) == expected:
                sent[number] = str(part["ETag"])
        if not reply.get("IsTruncated"):
            return entry, sent
        after = int(reply["NextPartNumberMarker"])


def abort_uploads(store: Store, name: str) -> int:
    """Remove the parts of all unfinished uploads below the directory *name*, for which a bucket is charged.

    Return how many uploads there were. Uploads of other directories of the bucket are not changed.
    """
    if not has_parts(store):
        return 0
    count = 0
    for upload in _unfinished(store, name):
        target = {key: upload[key] for key in ("Bucket", "Key", "UploadId")}
        with store.reporting(_DONE, name), contextlib.suppress(FileNotFoundError):
            store.fs.call_s3("abort_multipart_upload", **target)
            count += 1
    return count


def upload_begun(store: Store, name: str) -> float:
    """When the newest unfinished upload below the directory *name* began, in seconds since 1970; 0 without one."""
    if not has_parts(store):
        return 0.0
    times = [each["Initiated"].timestamp() for each in _unfinished(store, name)]
    return max(times, default=0.0)


def _unfinished(store: Store, name: str) -> list[ValueDict]:
    """List the unfinished uploads below the directory *name*, as the S3 client describes them, with their bucket."""
    bucket, path, _ = store.fs.split_path(store.key(name))
    prefix = f"{path}/" if path else ""
    found = []
    after: TextDict = {}
    with store.reporting("listed", name):
        while True:
            reply = store.fs.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after
            )
            for upload in reply.get("Uploads", []):
                # Some stores ignore the prefix.
                if upload["Key"].startswith(prefix):
                    found.append({**upload, "Bucket": bucket})
            if not reply.get("IsTruncated"):
                return found
            after = {
                "KeyMarker": reply["NextKeyMarker"],
                "UploadIdMarker": reply["NextUploadIdMarker"],
            }
