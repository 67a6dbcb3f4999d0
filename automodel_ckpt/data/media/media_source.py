"""Where the content of an image or an audio is: a path, bytes, or an object that is decoded already."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.data.conversations.messages import UnusableSample

_MAX_SHOWN = 200
"""Characters of a value in an error message."""


@dataclass(frozen=True)
class MediaReader:
    """Finds the content of values of one *kind*, such as ``an image``; objects of classes in *decoded* are returned."""

    kind: str
    hint: str
    decoded: tuple[type, ...] = ()

    def source(self, value: Any, folder: Path) -> Any:
        """Return the path, the bytes or the decoded object that *value* names.

        Relative paths start at *folder*. Raises :class:`UnusableSample` for other values, and for links.
        """
        if isinstance(value, Mapping):
            value = self._in_mapping(value)
        if isinstance(value, bytearray | memoryview):
            value = bytes(value)
        if isinstance(value, (bytes, *self.decoded)):
            return value
        if not isinstance(value, str) or not value:
            raise self.unusable(
                "is neither a path nor the content of a file", shortened(repr(value))
            )
        if value.startswith("data:"):
            _, _, content = value.partition(";base64,")
            return self._from_base64(content, value)
        if value.startswith("file://"):
            value = value.removeprefix("file://")
        if "://" in value:
            raise self.unusable(
                f"is not a local file, and {self.kind.split()[-1]}s are not downloaded", value[:80]
            )
        try:
            return folder / Path(value).expanduser()
        except RuntimeError:
            # The home directory of an unknown user: a file whose name begins with ~.
            return folder / value

    def unusable(self, what: str, value: str) -> UnusableSample:
        """Make the error for a value with which *what* is wrong."""
        return UnusableSample(f"{self.kind} {what}", value, self.hint)

    def _in_mapping(self, value: Mapping[Any, Any]) -> Any:
        if isinstance(value.get("base64"), str):
            return self._from_base64(value["base64"], value["base64"])
        for key in ("bytes", "path", "url"):
            if value.get(key):
                return value[key]
        return dict(value)

    def _from_base64(self, content: str, value: str) -> bytes:
        """Decode base64 text. Raises :class:`UnusableSample` if it is not base64, or empty."""
        try:
            decoded = base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            decoded = b""
        if not decoded:
            raise self.unusable("in the data is not base64 text", value[:80])
        return decoded


def shown(source: Any) -> str:
    """Describe the result of :meth:`MediaReader.source` in an error message."""
    if isinstance(source, Path):
        return shortened(str(source))
    if isinstance(source, bytes):
        return f"{len(source)} bytes of the data"
    return f"{type(source).__name__} of the data"


def shortened(text: str) -> str:
    """Limit the length of a *text* in an error message."""
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
