"""An S3 server on this machine (moto), and faults between it and the client."""

import asyncio
import contextlib
import functools
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal
from unittest import mock

import s3fs  # type: ignore[import-untyped]
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

from tests.support.servers.fault_proxy import FaultProxy, fault_proxy
from tests.support.servers.serving import serve

BUCKET = "bucket"

Fault = Callable[[Request], Response | None]
"""Returns the reply to a request instead of the store, or None; it may also raise, which resets the connection."""


class _WithoutLog(WSGIRequestHandler):
    def log_request(self, *_: Any) -> None:
        """Write no line for each request."""


@functools.cache
def _application(service: Literal["moto_api", "s3"]) -> Any:
    """Return one application for all stores; moto's dispatcher would search its modules at each request."""
    return create_backend_app(service)


class ObjectStore:
    """A store with one bucket. *fault* is asked before each request, and *requests* counts them by method."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.requests: list[tuple[str, str]] = []
        self._server = make_server(
            "127.0.0.1", 0, self._reply, threaded=True, request_handler=_WithoutLog
        )
        self._thread = threading.Thread(target=serve, args=(self._server,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "a-secret-that-no-log-has",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def _reply(self, environ: Any, start_response: Any) -> Any:
        request = Request(environ)
        self.requests.append((request.method, request.full_path))
        fault = self.fault(request) if self.fault is not None else None
        if fault is not None:
            # The body must be read, or the client sees a reset connection instead of the reply.
            request.get_data()
            return fault(environ, start_response)
        is_reset = request.path.startswith("/moto-api")
        return _application("moto_api" if is_reset else "s3")(environ, start_response)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Impatient:
    """The module asyncio, for s3fs: a tenth of its pauses before it repeats a request, which grow to seconds."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@contextlib.contextmanager
def faulty_store() -> Iterator[tuple[ObjectStore, FaultProxy]]:
    """Run a store, and a proxy that breaks connections to it, whose address is in the environment."""
    with (
        object_store() as store,
        fault_proxy(store.endpoint) as proxy,
        mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": proxy.endpoint}),
        mock.patch.object(s3fs.core, "asyncio", _Impatient()),
    ):
        s3fs.S3FileSystem.clear_instance_cache()
        yield store, proxy


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a store with an empty bucket; inside the context, the environment has its address and credentials."""
    store = ObjectStore()
    try:
        with mock.patch.dict(os.environ, store.environment):
            # moto keeps its objects in this process, beyond a server.
            urllib.request.urlopen(f"{store.endpoint}/moto-api/reset", data=b"").close()
            created = urllib.request.Request(f"{store.endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(created).close()
            store.requests.clear()
            # A cached client has the address of an earlier server.
            s3fs.S3FileSystem.clear_instance_cache()
            yield store
    finally:
        store.close()
