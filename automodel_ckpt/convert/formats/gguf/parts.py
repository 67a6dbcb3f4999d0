"""The files of a model in GGUF: one, or several parts called ``NAME-00001-of-00003.gguf``. Imports no torch.

Source: llama.cpp, ``llama_split_path`` and tools/gguf-split: every part has ``split.no`` (from 0), ``split.count`` and
``split.tensors.count`` (of all parts); the first part has the metadata of the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.convert.formats.gguf.header import GgufHeader, TensorInfo, read_gguf_header
from automodel_ckpt.errors import CheckpointUnusable

_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII)
_MAX_PARTS = 1024
_HINT = "keep all parts in one directory under their names, or download them again"


@dataclass(frozen=True, slots=True)
class GgufParts:
    """The *header* of a model: the metadata of the first part, and the tensors of all; *files* maps them to files.

    *paths* are the files, without links, in order.
    """

    header: GgufHeader
    files: Mapping[str, Path]
    paths: tuple[Path, ...]


def read_gguf_parts(path: Path) -> GgufParts:
    """Read the header of the file *path*, and those of the other parts of its model, which are in its directory.

    Raises :class:`CheckpointUnusable` if a part is damaged or missing, or the parts are not those of one model.
    """
    real = Path(os.path.realpath(path))
    header = read_gguf_header(real)
    count = header.values.get("split.count", 1)
    # Type and not isinstance: True is an int, too.
    if type(count) is not int or not 0 <= count <= _MAX_PARTS:
        raise _unusable("the number of this model's parts is not valid", path, repr(count)[:50])
    if count < 2:
        return GgufParts(header, dict.fromkeys(header.tensors, real), (real,))
    # By the name that the user gave: in the Hub's cache it is a link to a file with another name.
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        value = f"{path.name}, one of {count}"
        raise _unusable("the name of this part does not state its place in the model", path, value)
    headers: list[GgufHeader] = []
    paths: list[Path] = []
    for number in range(count):
        part = path.with_name(f"{match[1]}-{number + 1:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise _unusable("a part of this model is missing", part, "no such file")
        paths.append(Path(os.path.realpath(part)))
        headers.append(read_gguf_header(paths[-1]))
        _check_place(headers[-1], number, count, part)
    return _joined(headers, paths, path)


def _check_place(header: GgufHeader, number: int, count: int, part: Path) -> None:
    stated = (header.values.get("split.no"), header.values.get("split.count"))
    if stated != (number, count):
        value = f"split.no {stated[0]!r:.20}, split.count {stated[1]!r:.20}"
        raise _unusable("this part states another place in the model than its name", part, value)


def _joined(headers: list[GgufHeader], paths: list[Path], path: Path) -> GgufParts:
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    for header, file in zip(headers, paths, strict=True):
        for name, info in header.tensors.items():
            if name in tensors:
                raise _unusable(
                    "two parts of this model have a tensor of the same name", file, name
                )
            tensors[name] = info
            files[name] = file
    total = headers[0].values.get("split.tensors.count")
    if total is not None and total != len(tensors):
        value = f"{len(tensors)} tensors, the first part states {total!r:.20}"
        raise _unusable("the parts of this model do not have all tensors", path, value)
    joined = GgufHeader(headers[0].version, headers[0].values, tensors)
    return GgufParts(joined, files, tuple(paths))


def _unusable(what: str, path: Path, value: str) -> CheckpointUnusable:
    return CheckpointUnusable(what, where=str(path), value=value, hint=_HINT)
