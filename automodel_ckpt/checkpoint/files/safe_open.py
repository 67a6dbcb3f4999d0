"""Open the files that a checkpoint names, only regular files below its directory, and parse JSON of untrusted files.

The parser of the standard library can allocate 30 times the size of its input: an empty list of two characters takes 60
bytes. :func:`parse_json` estimates the memory from the number of brackets, quotes, commas and keys before it parses
anything. A value that does not match raises TypeError or ValueError. The message does not contain more than a few
characters of the value. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.checkpoint.files.type_aliases import MAX_DIMENSIONS, Shape, ValueDict

# A file of this size that takes less than a part of it on the disk was made to be slow to read, not by a save.
SPARSE_FROM_BYTES = 128 << 20
_SPARSE_RATIO = 64
OUTSIDE = "a symbolic link points outside of the directory"


def open_safely(root: Path, path: str) -> int:
    """Open the regular file *path* below *root* for reading; return its descriptor.

    Symbolic links below *root* are not followed; pipes and devices are not opened. Raises OSError.
    """
    if link := link_on_the_way(root, path):
        raise OSError(errno.ELOOP, "a checkpoint contains a symbolic link", str(root / link))
    return open_regular(root / path)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, for reading or with other *flags*; return its descriptor.

    Only the last component of *path* is checked: it must not be a link, a pipe, a device or a sparse file. Raises
    OSError.
    """
    # Before opening, because opening a device can already have an effect.
    with contextlib.suppress(FileNotFoundError):  # which open() raises, or makes
        _check_regular(os.lstat(path), path)
    # What is put there meanwhile must not be followed or waited for either.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_append(path: Path) -> IO[bytes]:
    """Open the regular file *path*, unbuffered. It is created if necessary, and so is its directory. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(descriptor, "ab", buffering=0)


def read_safely(root: Path, path: str, *, limit: int | None = None) -> bytes:
    """Read the regular file *path* below *root*. Raises OSError as :func:`open_safely`, or where it exceeds *limit*
    bytes.
    """
    descriptor = open_safely(root, path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if limit is not None and size > limit:
            raise OSError(
                errno.EFBIG, f"{size} bytes exceed the limit of such a file", str(root / path)
            )
        return file.read()


def read_range(root: Path, path: str, start: int, nbytes: int) -> bytes:
    """Read bytes of the regular file *path* below *root*; fewer at its end. Raises OSError as :func:`open_safely`."""
    with os.fdopen(open_safely(root, path), "rb") as file:
        file.seek(start)
        return file.read(nbytes)


def read_model_file(directory: Path, path: str, *, limit: int | None = None) -> bytes:
    """Read the regular file *path* of the model in *directory*, for all files that are copied or described.

    Raises OSError as :func:`model_file`, or where it exceeds *limit* bytes.
    """
    found = model_file(directory, path)
    return read_safely(found.parent, found.name, limit=limit)


def model_file(directory: Path, path: str) -> Path:
    """Return where the file *path* of the model in *directory* is, after following links.

    Links may lead to files of the same directory, and in a snapshot of the Hub's cache to the blobs of the same model:
    ``models--ORG--NAME/snapshots/COMMIT/FILE`` is a link to ``../../blobs/DIGEST``. *directory* itself may be a link.
    Raises OSError for a link that leads elsewhere, because its target could be a secret of the user. A hidden file,
    such as ``.git/config``, can be one, too.
    """
    root = Path(os.path.realpath(directory))
    found = Path(os.path.realpath(root / path))
    if found == root / path:
        return found
    if found.is_relative_to(root):
        is_allowed = not any(part.startswith(".") for part in found.relative_to(root).parts)
    else:
        is_allowed = root.parent.name == "snapshots" and found.parent == root.parents[1] / "blobs"
    if not is_allowed:
        raise OSError(errno.ELOOP, OUTSIDE, str(directory / path))
    return found


def begins_with(root: Path, path: str, content: bytes) -> bool:
    """Return whether the regular file *path* below *root* begins with *content*; False if it cannot be read."""
    with contextlib.suppress(OSError):
        return read_range(root, path, 0, len(content)) == content
    return False


def link_on_the_way(root: Path, path: str) -> str | None:
    """The first directory on the way from *root* to *path* that is a symbolic link, relative to *root*."""
    parts = path.split("/")[:-1]
    prefixes = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    return next((prefix for prefix in prefixes if (root / prefix).is_symlink()), None)


def without_links(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without symbolic links. Unlike Path.resolve(), it accepts links that form a loop."""
    return Path(os.path.realpath(path))


def is_sparse(status: os.stat_result) -> bool:
    """Whether a file is large and almost entirely unallocated (less than one byte on disk for 64 of its size)."""
    return (
        status.st_size > SPARSE_FROM_BYTES
        and status.st_blocks * 512 < status.st_size // _SPARSE_RATIO
    )


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(
            errno.EINVAL, f"not a regular file ({stat.filemode(status.st_mode)})", str(path)
        )
    if is_sparse(status):
        raise OSError(
            errno.EFBIG,
            f"{status.st_size} bytes, nearly all of them unallocated (a sparse file)",
            str(path),
        )


# ---------------------------------------------------------------- JSON


# Enough for every file of a model and for the manifests of most checkpoints. Real files above this take at most
# MAX_GROWTH times their size: manifests with many ranks and indexes with many tensors have long names and digests.
FREE_BYTES = 256 << 20
MAX_GROWTH = 12
# No content takes more than this many bytes for each of its bytes, so that small content needs no estimate.
_LARGEST_GROWTH = 42
# Bytes that the parser allocates, on average, with what CPython's allocator adds: an empty mapping, an empty list, an
# element (a number and its slot in a list), a key's slot, and a short text.
_MAPPING_BYTES = 64
_LIST_BYTES = 72
_ELEMENT_BYTES = 44
_KEY_BYTES = 45
_TEXT_BYTES = 64
# The parser stores equal keys once. These keys are always among so many others that repeat as often: in a slice of a
# manifest, in a tensor of a manifest, and in a tensor of a safetensors header.
_REPEATED_KEYS = {b'"offsets":': 6, b'"slices":': 3, b'"data_offsets":': 3}


def parse_json(
    content: bytes | str,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON in UTF-8 as :func:`json.loads` does, in at most FREE_BYTES or MAX_GROWTH times its size.

    Raises ValueError if *content* is not JSON, is nested too deeply, or would take more memory.
    """
    text = content
    if isinstance(text, str):
        check_growth(text.encode("utf-8", "surrogatepass"))
    else:
        check_growth(text)
        text = _decoded(text)
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Its own text would contain all of the content.
        raise ValueError(f"not UTF-8 at byte {error.start}: {error.reason}") from None


def check_growth(data: bytes) -> None:
    """Raise ValueError if parsing *data* would take more memory than :func:`parse_json` allows."""
    if len(data) * _LARGEST_GROWTH <= FREE_BYTES:
        return
    num_bytes = parsed_bytes(data)
    if num_bytes > max(FREE_BYTES, MAX_GROWTH * len(data)):
        raise ValueError(
            f"{len(data)} bytes of JSON would take too much memory, about {num_bytes} bytes"
        )


def parsed_bytes(data: bytes) -> int:
    """Estimate the memory in bytes that parsing JSON takes, without parsing it. The content itself is included."""
    num_keys = data.count(b'":')
    num_repeated = sum(number * data.count(key) for key, number in _REPEATED_KEYS.items())
    num_texts = max(data.count(b'"') // 2 - num_keys, 0) + max(num_keys - num_repeated, 0)
    # The bytes and their text. One character beyond Latin-1 can make every character of the text, and of the values,
    # take four bytes.
    allocated = 2 * len(data) if data.isascii() else 9 * len(data)
    allocated += _MAPPING_BYTES * data.count(b"{")
    allocated += _LIST_BYTES * data.count(b"[")
    allocated += _ELEMENT_BYTES * data.count(b",")
    return allocated + _TEXT_BYTES * num_texts + _KEY_BYTES * num_keys


MAX_INTEGER = 2**63 - 1
_MAX_PLAIN_DEPTH = 8


def integer(value: object) -> int:
    """Convert a count."""
    # Not isinstance: True is an int, too.
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"{shown(value)} is not a count")
    return value


def seconds(value: object) -> float:
    """Convert a time in seconds since 1970."""
    if type(value) not in (int, float) or not 0 <= value < MAX_INTEGER:  # type: ignore[operator]
        raise ValueError(f"{shown(value)} is not a time")
    return float(value)  # type: ignore[arg-type]


def shown(value: object) -> str:
    """Format a value for a message. It may have thousands of digits or levels."""
    if isinstance(value, (str, float, bool, type(None))):
        return repr(value)[:100]
    return f"a value of type {type(value).__name__}"


def flag(value: object) -> bool:
    """Convert true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def text(value: object) -> str:
    """Convert text that is valid Unicode."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not text")
    try:
        # JSON can contain lone surrogates, which only fail later, when they are printed or written.
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(value)} is not valid Unicode") from None
    return value


def sizes_of(value: Iterable[object]) -> Shape:
    """Convert a shape or offsets from JSON. Raises TypeError or ValueError if they are malformed."""
    sizes = tuple(integer(item) for item in value)
    if len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"{len(sizes)} dimensions")
    return sizes


def mapping(value: object) -> ValueDict:
    """Check the depth of a mapping for display, and its integers, which later code stores in 64 bits."""
    if not isinstance(value, dict):
        raise TypeError(f"{shown(value)} is not a mapping")
    level: list[Any] = [value]
    for _ in range(_MAX_PLAIN_DEPTH):
        items: list[Any] = []
        for outer in level:
            items += outer.values() if isinstance(outer, dict) else outer
        if any(isinstance(item, int) and abs(item) > MAX_INTEGER for item in items):
            raise ValueError("a number of more than 64 bits")
        level = [item for item in items if isinstance(item, (dict, list))]
    if level:
        raise ValueError(f"values nested more than {_MAX_PLAIN_DEPTH} levels deep")
    return value


def json_bytes(document: object) -> bytes:
    """Serialize *document* as the content of a file that people read, too."""
    return json.dumps(document, indent=2).encode() + b"\n"
