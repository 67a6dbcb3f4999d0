"""Local HTTP servers that end immediately: by default, ``serve_forever`` polls for its end twice per second."""

from socketserver import BaseServer

_POLL_SECONDS = 0.02


def serve(server: BaseServer) -> None:
    """Answer requests until ``server.shutdown()``. For a dedicated thread."""
    server.serve_forever(_POLL_SECONDS)
