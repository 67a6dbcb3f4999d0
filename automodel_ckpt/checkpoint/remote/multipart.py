"""Uploads of large files to S3 in parts: parallel, and continued after an interruption.

The object appears when the last request completes the upload, so it is complete or absent. The client library sends a
checksum with each part, which the store verifies. Parts of uploads that no run continues are removed by
:func:`abort_uploads`, and by a lifecycle rule of the bucket.
"""

from __future__ import annotations

import contextlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.remote.store import Store
from automodel_ckpt.checkpoint.remote.transfer import Throttle, UploadMemory

PART_BYTES = 32 << 20
"""Bytes of a part. S3 accepts parts from 5 MiB, and at most 10,000 of them."""
_MAX_PARTS = 10_000


def has_parts(store: Store, nbytes: int) -> bool:
    """Whether a file of *nbytes* is uploaded in parts: to S3, if it is larger than one part."""
    return nbytes > PART_BYTES and "s3" in store.fs.protocol


def upload_in_parts(
    store: Store,
    name: str,
    path: Path,
    memory: UploadMemory,
    throttle: Throttle,
    pool: ThreadPoolExecutor,
) -> None:
    """Upload the file *path* as the object *name*; *memory* has its upload from an earlier attempt, if any.

    Raises :class:`StoreError`, and OSError for the local file.
    """
    nbytes = path.stat().st_size
    bucket, key, _ = store.fs.split_path(store.key(name))
    target = {"Bucket": bucket, "Key": key}
    with store.reporting("written in parts", name):
        entry, sent = _continued(store, target, memory.parts.get(name), nbytes)
        if entry is None:
            part_bytes = max(PART_BYTES, math.ceil(nbytes / _MAX_PARTS))
            created = store.fs.call_s3("create_multipart_upload", **target)
            entry = {"id": created["UploadId"], "part_bytes": part_bytes}
            memory.note_parts(name, entry)
    part_bytes = int(entry["part_bytes"])

    def send(number: int) -> str:
        start = (number - 1) * part_bytes
        with path.open("rb") as file:
            data = os.pread(file.fileno(), min(part_bytes, nbytes - start), start)
        throttle.take(len(data))
        with store.reporting("written in parts", name):
            reply = store.fs.call_s3(
                "upload_part", **target, UploadId=entry["id"], PartNumber=number, Body=data
            )
        return str(reply["ETag"])

    num_parts = math.ceil(nbytes / part_bytes)
    missing = [number for number in range(1, num_parts + 1) if number not in sent]
    for number, tag in zip(missing, pool.map(send, missing), strict=True):
        sent[number] = tag
    parts = [{"PartNumber": number, "ETag": sent[number]} for number in sorted(sent)]
    with store.reporting("written in parts", name):
        store.fs.call_s3(
            "complete_multipart_upload",
            **target,
            UploadId=entry["id"],
            MultipartUpload={"Parts": parts},
        )


def _continued(
    store: Store, target: dict[str, str], entry: dict[str, Any] | None, nbytes: int
) -> tuple[dict[str, Any] | None, dict[int, str]]:
    """Return the upload to continue with its parts in the store, as number -> tag; (None, {}) if there is none."""
    if entry is None:
        return None, {}
    part_bytes = int(entry["part_bytes"])
    sent: dict[int, str] = {}
    after = 0
    while True:
        try:
            reply = store.fs.call_s3(
                "list_parts", **target, UploadId=entry["id"], PartNumberMarker=after
            )
        except FileNotFoundError:
            # The store or a lifecycle rule removed the upload.
            return None, {}
        for part in reply.get("Parts", []):
            number = int(part["PartNumber"])
            expected = min(part_bytes, nbytes - (number - 1) * part_bytes)
            if int(part["Size"]) == expected:
                sent[number] = str(part["ETag"])
        if not reply.get("IsTruncated"):
            return entry, sent
        after = int(reply["NextPartNumberMarker"])


def abort_uploads(store: Store, name: str) -> None:
    """Remove the parts of all unfinished uploads below *name*, for which a bucket is charged."""
    if "s3" not in store.fs.protocol:
        return
    bucket, prefix, _ = store.fs.split_path(store.key(name))
    with store.reporting("written in parts", name):
        reply = store.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        for upload in reply.get("Uploads", []):
            with contextlib.suppress(FileNotFoundError):
                store.fs.call_s3(
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )
