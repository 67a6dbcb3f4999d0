"""A directory in an object store, through fsspec: objects are written in one request, read by byte ranges, and listed.

The libraries of the stores repeat single requests for some seconds. Here, only reads of byte ranges are repeated for
longer; :mod:`.uploader` repeats whole uploads.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

from automodel_ckpt.base.store_url import (
    check_library,
    check_options,
    check_url,
    public,
    scrub,
    scrubbed,
)
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict, Values
from automodel_ckpt.checkpoint.store.conditional import (
    Conditions,
    NotSupported,
    conditions_of,
    is_missing_bucket,
    s3_reply,
)
from automodel_ckpt.errors import TAKE_ANOTHER, AutomodelError, SaveFailed

log = logging.getLogger("automodel_ckpt")

Value = TypeVar("Value")

PATIENCE_SECONDS = 60.0
"""How long a read is repeated."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 8.0
_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECTION_ERRORS = frozenset(
    {
        ("botocore.exceptions", "HTTPClientError"),
        ("botocore.exceptions", "ConnectionError"),
        ("aiohttp.client_exceptions", "ClientError"),
        ("requests.exceptions", "ConnectionError"),
        ("requests.exceptions", "ProxyError"),
        ("azure.core.exceptions", "ServiceRequestError"),
        ("azure.core.exceptions", "ServiceResponseError"),
    }
)
"""Module and class of errors of connections. The libraries are imported by fsspec, if at all."""

BLOCK_BYTES = 8 << 20
"""Bytes that are read and sent in one operation."""


class StoreError(SaveFailed):
    """A store could not be read or written. Another attempt may succeed."""


class Store:
    """The objects below a URL, by names relative to it.

    Its methods raise :class:`StoreError` where the store fails, FileNotFoundError for a missing object, and OSError for
    local files.
    """

    def __init__(self, url: str, options: Values | None = None, *, where: str = "URL") -> None:
        """Open *url*; *where* is the key or argument that has it. No request is made.

        Raises :class:`RecipeError` for a URL or options that cannot be used.
        """
        import fsspec  # type: ignore[import-untyped]

        key = f"{where}.url" if "." in where else where
        self.url = check_url(url, key)
        check_library(self.url, key)
        check_options(options or {}, f"{where}.options")
        protocol = self.url.partition("://")[0]
        with self.reporting("opened"):
            # Without a cache of listings, the objects of another process are visible.
            options = {**_library_options(protocol, options or {}), "use_listings_cache": False}
            opened = fsspec.url_to_fs(self.url, **options)
        self.fs, root = opened
        self._root = root.rstrip("/")
        self._has_directories = protocol in ("file", "memory")
        self._conditions = conditions_of(self.fs)
        self._read_options = _read_options(self.fs)

    def __str__(self) -> str:
        return public(self.url)

    def key(self, name: str) -> str:
        """The path of an object in the file system of fsspec."""
        return f"{self._root}/{name}" if name else str(self._root)

    # ---------------------------------------------------------------- reading

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Read an object, or its bytes from *start* to before *end*. Raises FileNotFoundError."""
        with self.reporting("read", name):
            key = self.key(name)
            found: bytes = self.fs.cat_file(key, start=start, end=end, **self._read_options)
            return found

    def read_patiently(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes of an object from *start* to before *end*, also if the store fails for a while.

        Raises FileNotFoundError.
        """
        key = self.key(name)
        with self.reporting("read", name):
            found: bytes = patiently(
                lambda: self.fs.cat_file(key, start=start, end=end), f"{self}/{name}"
            )
        if len(found) != end - start:
            raise StoreError(
                "an object ended before the range that was read",
                where=f"{self}/{name}",
                value=f"{len(found)} bytes instead of {end - start}",
                hint=TAKE_ANOTHER,
            )
        return found

    def size(self, name: str) -> int:
        """The size of an object in bytes. Raises FileNotFoundError."""
        with self.reporting("read", name):
            return int(self.fs.info(self.key(name))["size"])

    def sizes(self, name: str = "") -> dict[str, int]:
        """List all objects below *name* with their sizes in bytes, by names relative to it; empty if there are none."""
        prefix = f"{self.key(name)}/"
        found = self._find(name)
        return {path.removeprefix(prefix): int(info["size"]) for path, info in found.items()}

    def written(self, name: str) -> float | None:
        """When the newest object below *name* was written, in seconds since 1970; None when it is not known of each."""
        times = [_time_of(info) for info in self._find(name).values()]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None

    def versions(self, name: str) -> TextDict:
        """List all objects below *name* with their versions, by names relative to the URL."""
        prefix = f"{self._root}/"
        versions = {}
        for path, info in self._find(name).items():
            versions[path.removeprefix(prefix)] = self._conditions.listed(info)
        return versions

    def _find(self, name: str) -> dict[str, ValueDict]:
        prefix = f"{self.key(name)}/"
        with self.reporting("listed", name):
            try:
                found = self.fs.find(prefix.rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
        # find() of a path that is an object returns that object.
        return {path: info for path, info in found.items() if path.startswith(prefix)}

    def directories(self) -> list[str]:
        """List the names directly below the URL that have objects below them."""
        prefix = f"{self._root}/"
        with self.reporting("listed"):
            try:
                entries = self.fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        names = []
        for entry in entries:
            if entry["type"] == "directory":
                names.append(entry["name"].rstrip("/").removeprefix(prefix))
        return sorted(names)

    def stream(self, name: str, write: Callable[[bytes], Any]) -> None:
        """Pass the content of an object to *write*, block by block, also if the store fails for a while.

        Raises FileNotFoundError.
        """
        with self.reporting("read", name):
            info = patiently(lambda: self.fs.info(self.key(name)), f"{self}/{name}")
        nbytes = int(info["size"])
        for start in range(0, nbytes, BLOCK_BYTES):
            write(self.read_patiently(name, start, min(start + BLOCK_BYTES, nbytes)))

    # ---------------------------------------------------------------- writing

    def write(self, name: str, data: bytes) -> None:
        """Write a small object in one request. It replaces an object of this name."""
        with self.reporting("written", name):
            self._make_parent(name)
            self.fs.pipe_file(self.key(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object unless there is one of this name; return whether it was written.

        Of several writers, one succeeds where the store supports conditional writes.
        """
        return self.replace(name, data, None)

    def upload(self, name: str, blocks: Iterable[bytes], *, exclusive: bool = False) -> bool:
        """Write an object from *blocks*; return whether it was written.

        With *exclusive*, it is not written if there is an object of this name. If *blocks* raise, there is no new
        object, or as on a disk an incomplete one.
        """
        try:
            with self.reporting("written", name):
                self._make_parent(name)
                mode = "xb" if exclusive else "wb"
                with self.fs.open(self.key(name), mode, block_size=BLOCK_BYTES) as target:
                    _write_blocks(target, blocks)
        except StoreError as error:
            if exclusive and isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    # ---------------------------------------------------------------- conditional writing

    @property
    def is_conditional(self) -> bool:
        """Whether the store compares versions itself, so that no other writer can come between."""
        return self._conditions.is_supported

    def ignore_conditions(self) -> None:
        """Compare versions before each write instead: the store does not, although its API has such requests."""
        self._conditions = Conditions(self.fs, creates=False)

    def version(self, name: str) -> str | None:
        """Return the version of an object, which changes when it is replaced; None when there is no object."""
        with self.reporting("read", name):
            return self._conditions.version(self.key(name))

    def replace(self, name: str, data: bytes, version: str | None) -> bool:
        """Write a small object if it still has *version*; None: if there is none. Return whether it was written.

        False may also mean that an earlier attempt wrote it, and its reply was lost.
        """
        with self.reporting("written", name):
            self._make_parent(name)
            try:
                return self._conditions.put(self.key(name), data, version)
            except NotSupported:
                self.ignore_conditions()
            # Versions of the store differ from digests that were compared.
            if version is None:
                return self._conditions.put(self.key(name), data, None)
            self.fs.pipe_file(self.key(name), data)
            return True

    def delete_version(self, name: str, version: str) -> bool:
        """Delete an object if it still has *version* (empty: any). Return whether it was deleted."""
        if not version:
            self.delete([name])
            return True
        with self.reporting("deleted", name):
            try:
                return self._conditions.delete(self.key(name), version)
            except FileNotFoundError:
                return False
            except NotSupported:
                # Some stores have conditional writes, but no conditional deletions.
                self.fs.rm_file(self.key(name))
                return True

    # ---------------------------------------------------------------- removing

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. Names without an object are ignored."""
        for name in names:
            with self.reporting("deleted", name), contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.key(name))

    def delete_directory(self, name: str) -> None:
        """Remove what is left of a directory after its objects are deleted; object stores have no directories."""
        if self._has_directories and name:
            with self.reporting("deleted", name), contextlib.suppress(FileNotFoundError):
                self.fs.rm(self.key(name), recursive=True)

    def _make_parent(self, name: str) -> None:
        if self._has_directories:
            self.fs.makedirs(self.key(name).rpartition("/")[0], exist_ok=True)

    @contextlib.contextmanager
    def reporting(self, done: str, name: str = "") -> Iterator[None]:
        """Raise :class:`StoreError` for what the library of the store raises in the context."""
        try:
            yield
        except AutomodelError:
            raise
        except FileNotFoundError as error:
            if not is_missing_bucket(error):
                raise
            raise StoreError(
                "the bucket does not exist",
                where=self,
                value=self.key("").partition("/")[0],
                hint="create it, or check the URL and the endpoint (AWS_ENDPOINT_URL)",
            ) from error
        except Exception as error:  # each library has its own exceptions
            scrub(error)
            text = scrubbed(str(error).strip() or type(error).__name__).splitlines()[0]
            hint = "check the bucket, the network, and the credentials in the environment"
            if self._has_directories:
                hint = "check the path, its permissions and the free space"
            raise StoreError(
                f"an object could not be {done}" if name else f"the store could not be {done}",
                where=f"{self}/{name}" if name else str(self),
                value=text[:300],
                hint=hint,
            ) from error


def _write_blocks(target: Any, blocks: Iterable[bytes]) -> None:
    try:
        for block in blocks:
            target.write(block)
    except BaseException:
        # Closing would complete the object.
        with contextlib.suppress(Exception):
            target.discard()
        # A local file is closed as any other, and stays incomplete.
        with contextlib.suppress(AttributeError):
            target.closed = True
        raise


def _read_options(fs: Any) -> ValueDict:
    """Return the options of reads with which s3fs makes one request for an object.

    Newer versions ask for its size first, to read a large one in parts, unless only one part may be read at a time.
    """
    is_s3 = "s3" in fs.protocol
    if is_s3 and "max_concurrency" in inspect.signature(fs.cat_file).parameters:
        return {"max_concurrency": 1}
    return {}


def _library_options(protocol: str, options: Values) -> ValueDict:
    """Translate :data:`~automodel_ckpt.base.store_url.OPTIONS` to arguments of a file system of fsspec."""
    given = dict(options)
    if protocol in ("s3", "s3a"):
        client = {}
        for name in ("endpoint_url", "region_name"):
            if name in given:
                client[name] = given.pop(name)
        if client:
            given["client_kwargs"] = client
        # AWS_ENDPOINT_URL is read by botocore itself. A slow store must not block for minutes.
        given["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60}
    elif protocol in ("gs", "gcs") and given.pop("anon", False):
        given["token"] = "anon"  # noqa: S105  (no credentials)
    return given


# The keys of s3fs, adlfs, and gcsfs and local files.
_TIMES = ("LastModified", "last_modified", "mtime")


def _time_of(info: Values) -> float | None:
    """When an object was written, by its entry in a listing; None when that is not known."""
    found = next((info[key] for key in _TIMES if key in info), None)
    if isinstance(found, datetime):
        # A time without a zone is in UTC.
        return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
    return float(found) if isinstance(found, int | float) else None


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed: the store is overloaded or fails, or the connection to it."""
    status = _status(error)
    if status is not None:
        return status in _STATUSES
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    return any(
        (each.__module__, each.__name__) in _CONNECTION_ERRORS for each in type(error).__mro__
    )


def patiently(
    read: Callable[[], Value],
    what: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Value:
    """Return what *read* returns; repeat it for :data:`PATIENCE_SECONDS` if it fails with a transient error.

    *what* is the object that is read, for the log: one warning when it fails for the first time. Raises what the last
    attempt raises.
    """
    deadline = clock() + PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    is_logged = False
    while True:
        try:
            return read()
        except Exception as error:  # each library has its own exceptions
            if not is_transient(error) or clock() + pause > deadline:
                raise
            if not is_logged:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("reading %s failed, trying again: %s", what, first[:200])
                is_logged = True
        # Many ranks read at the same time: they must not return together.
        sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error; None when the error is not a reply of the store."""
    found: Any = s3_reply(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    # Errors of azure, and of gcsfs.
    found = found or getattr(error, "status_code", None) or getattr(error, "code", None)
    try:
        return int(found)
    except (TypeError, ValueError):
        return None
