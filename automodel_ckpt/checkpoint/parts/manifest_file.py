"""The file MANIFEST.json as bytes: reading it within a limit, and verifying its version and its digest.

Nothing here imports torch or trusts its input: what does not match the format exactly raises
:class:`CheckpointUnusable`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.digests import digest_of
from automodel_ckpt.checkpoint.files.safe_open import open_regular, open_safely
from automodel_ckpt.errors import CheckpointUnusable

FORMAT = "automodel_ckpt"
FORMAT_VERSION = 2
"""The newest version. A manifest has the lowest version that describes it, so that older programs read it: 2 with slice
tables, else 1. Version 3 was that of ``checkpoint.files_per_node``: a later one is 4."""
# The bytes of the tensors are no measure for this limit: the manifest of many tiny tensors is larger than their data.
MAX_BYTES = 1 << 29
_TAIL = b'"digest": "%s"\n}\n'
_TAIL_BYTES = len(_TAIL % digest_of(b"").encode())


def encode(content: Mapping[str, Any]) -> bytes:
    """Return *content* as the bytes of a manifest. The last line has the digest of everything before it."""
    # The digest is on the last line, so that a reader can compare it before it parses anything.
    body = json.dumps(content, ensure_ascii=True, separators=(",", ":"), allow_nan=True)
    head = body[:-1].encode() + b",\n"
    return head + _TAIL % digest_of(head).encode()


def decode(data: bytes, path: Path | str) -> dict[str, Any]:
    """Parse the bytes of a manifest after its digest is verified; *path* is for error messages.

    Raises :class:`CheckpointUnusable`.
    """
    _check_size(len(data), path)
    head, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    # Before the digest: a later version may end in another way, which is not damage.
    version = _claimed_version(data)
    if version == 3:
        raise CheckpointUnusable(
            "the checkpoint was saved with checkpoint.files_per_node: revision e40da6e4 reads it",
            where=str(path),
            value="version 3",
            hint="resume with that revision and without the key, and save again",
        )
    if version is not None and version > FORMAT_VERSION:
        raise unusable(
            "the checkpoint has a newer format than this version supports",
            path,
            f"version {version}",
        )
    if tail != _TAIL % digest_of(head).encode():
        raise unusable(
            "the manifest is damaged: its digest does not match", path, f"{len(data)} bytes"
        )
    try:
        raw = parse_json(data)
    except ValueError as error:
        raise unusable("the manifest cannot be parsed", path, str(error)[:300]) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise unusable("the file is not a manifest of this format", path, "not " + FORMAT)
    return raw


def _claimed_version(data: bytes) -> int | None:
    """The format version, which every version writes first and in the same format; None for other content."""
    prefix = b'{"format":"%s","format_version":' % FORMAT.encode()
    if not data.startswith(prefix):
        return None
    digits = data[len(prefix) : len(prefix) + 10].split(b",")[0]
    return int(digits) if digits.isdigit() else None


def read_bounded(path: Path) -> bytes:
    """Read a regular file of at most MAX_BYTES. Raises :class:`CheckpointUnusable`."""
    try:
        descriptor = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            _check_size(os.fstat(descriptor).st_size, path)
            return file.read()
    except FileNotFoundError as error:
        if path.parent.is_symlink() and not path.parent.exists():
            target = os.readlink(path.parent)
            raise unusable(
                "the checkpoint is a link to a directory that is not there", path.parent, target
            ) from error
        raise unusable(
            "there is no manifest: the checkpoint is incomplete", path, "no such file"
        ) from error
    except OSError as error:
        # read() can fail, too (EIO): a bare OSError on one rank would leave the others waiting.
        raise unusable("the manifest cannot be read", path, error.strerror) from error


def read_range(root: Path, file: str, start: int, nbytes: int) -> bytes:
    """Read bytes of a regular file below *root*. Raises OSError."""
    with os.fdopen(open_safely(root, file), "rb") as opened:
        opened.seek(start)
        return opened.read(nbytes)


def _check_size(num_bytes: int, path: Path | str) -> None:
    if num_bytes > MAX_BYTES:
        raise unusable(
            "the manifest is too large", path, f"{num_bytes} bytes; at most {MAX_BYTES} are read"
        )


@contextlib.contextmanager
def reporting_malformed(path: Path | str) -> Iterator[None]:
    """Raise :class:`CheckpointUnusable` for the errors that parsing malformed content raises."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise unusable("the manifest is malformed", path, repr(error)) from error


def unusable(what: str, path: Path | str, value: object) -> CheckpointUnusable:
    """The error about a manifest: *what* is wrong with it, and the *value* that shows it."""
    return CheckpointUnusable(
        what, where=str(path), value=value, hint="use another checkpoint of this run"
    )
