"""Conditional writes: an object is created, replaced or deleted only if it is still the version that was read.

S3 compares ETags (``If-Match``, ``If-None-Match``), Google Cloud Storage generations, and Azure ETags. A request of a
writer that was overtaken then changes nothing, however late it arrives. File systems without such requests, and stores
that implement S3 without them, compare before they write; another writer may come between.
"""

from __future__ import annotations

import hashlib
from typing import Any

from automodel_ckpt.checkpoint.files.type_aliases import Values


class NotSupported(Exception):
    """The store rejects conditional requests."""


class Conditions:
    """Compares, then writes: for file systems without conditional requests, which *fs* of fsspec is.

    Paths are paths of the file system. A version is text that differs between two contents of an object.
    """

    is_supported = False

    def __init__(self, fs: Any, *, creates: bool = True) -> None:
        """*creates*: whether *fs* can create a file only if there is none."""
        self.fs = fs
        self._creates = creates

    def version(self, path: str) -> str | None:
        """Return the version of an object; None when there is no object."""
        try:
            return hashlib.sha256(self.fs.cat_file(path)).hexdigest()
        except FileNotFoundError:
            return None

    def listed(self, info: Values) -> str:
        """Return the version of an object in a listing; empty if the listing has none."""
        return ""

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        """Write an object if it has *version*; None: if there is none. Return whether it was written."""
        if version is None:
            return self._create(path, data)
        if self.version(path) != version:
            return False
        self.fs.pipe_file(path, data)
        return True

    def delete(self, path: str, version: str) -> bool:
        """Delete an object if it has *version*. Return whether it was deleted."""
        if self.version(path) != version:
            return False
        self.fs.rm_file(path)
        return True

    def _create(self, path: str, data: bytes) -> bool:
        if self._creates:
            try:
                self.fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except NotImplementedError:
                self._creates = False
            else:
                return True
        if self.fs.exists(path):
            return False
        self.fs.pipe_file(path, data)
        return True


class _Compared(Conditions):
    """Conditional requests of a store. :attr:`field` is where the information about an object has its version."""

    is_supported = True
    field: str

    def version(self, path: str) -> str | None:
        try:
            info = self.fs.info(path)
        except FileNotFoundError:
            return None
        # A directory has no version.
        return self.listed(info) or None

    def listed(self, info: Values) -> str:
        return str(info.get(self.field) or "")


class _S3Conditions(_Compared):
    field = "ETag"

    def version(self, path: str) -> str | None:
        # info() would also list what is below the path.
        bucket, key, _ = self.fs.split_path(path)
        try:
            return str(self.fs.call_s3("head_object", Bucket=bucket, Key=key)["ETag"])
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        return s3_call(self.fs, "put_object", path, Body=data, **condition)

    def delete(self, path: str, version: str) -> bool:
        return s3_call(self.fs, "delete_object", path, IfMatch=version)


class _GCSConditions(_Compared):
    field = "generation"

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        bucket, key, _ = self.fs.split_path(path)
        # The URL that gcsfs itself uses for an upload in one request.
        url = f"{self.fs.base.removesuffix('/storage/v1/')}/upload/storage/v1/b/{{}}/o"
        query = {"uploadType": "media", "name": key, "ifGenerationMatch": version or "0"}
        return self._call("POST", url, bucket, data=data, **query)

    def delete(self, path: str, version: str) -> bool:
        bucket, key, _ = self.fs.split_path(path)
        return self._call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)

    def _call(self, *arguments: Any, **query: Any) -> bool:
        try:
            self.fs.call(*arguments, **query)
        except (FileExistsError, FileNotFoundError):
            # What gcsfs raises for the status 412 and 404.
            return False
        except Exception as error:
            if getattr(error, "code", None) in (412, "412"):
                return False
            raise
        return True


class _AzureConditions(_Compared):
    field = "etag"

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        if version is None:
            return self._create(path, data)

        async def put(client: Any, **condition: Any) -> None:
            await client.upload_blob(data, overwrite=True, **condition)

        return self._call(put, path, version)

    def delete(self, path: str, version: str) -> bool:
        async def delete(client: Any, **condition: Any) -> None:
            await client.delete_blob(**condition)

        return self._call(delete, path, version)

    def _call(self, request: Any, path: str, version: str) -> bool:
        from azure.core import MatchConditions  # type: ignore[import-not-found,unused-ignore]
        from azure.core.exceptions import (  # type: ignore[import-not-found,unused-ignore]
            ResourceModifiedError,
            ResourceNotFoundError,
        )
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        container, blob, _ = self.fs.split_path(path)

        async def call() -> None:
            client = self.fs.service_client.get_blob_client(container=container, blob=blob)
            async with client:
                condition = MatchConditions.IfNotModified
                await request(client, etag=version, match_condition=condition)

        try:
            sync(self.fs.loop, call)
        except (ResourceModifiedError, ResourceNotFoundError):
            return False
        return True


def conditions_of(fs: Any) -> Conditions:
    """Return the conditional writes of a file system of fsspec."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if "s3" in protocols:
        return _S3Conditions(fs)
    if "gs" in protocols:
        return _GCSConditions(fs)
    if "abfs" in protocols or "az" in protocols:
        return _AzureConditions(fs)
    return Conditions(fs)


def s3_call(fs: Any, method: str, path: str, **arguments: Any) -> bool:
    """Call a method of the S3 client with conditions among its *arguments*. Return whether they were met.

    Raises :class:`NotSupported`, and what s3fs raises for other errors.
    """
    bucket, key, _ = fs.split_path(path)
    try:
        fs.call_s3(method, Bucket=bucket, Key=key, **arguments)
    except FileNotFoundError as error:
        if "UploadId" in arguments or is_missing_bucket(error):
            raise
        # If-Match of an object that was deleted.
        return False
    except OSError as error:
        status = s3_reply(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
        if status in (409, 412):
            return False
        if status == 501:
            raise NotSupported from error
        raise
    return True


def s3_reply(error: BaseException) -> Values:
    """Return the reply in an error that s3fs translated from one of botocore; empty for any other error."""
    response = getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def is_missing_bucket(error: BaseException) -> bool:
    """Return whether *error* of s3fs means that the bucket does not exist."""
    return bool(s3_reply(error).get("Error", {}).get("Code") == "NoSuchBucket")
