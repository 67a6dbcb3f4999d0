"""Attacks on the tables of large checkpoints, and on the formulas that their manifests have instead of slices."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.parts.slice_table import SEGMENT
from tests.hostile.harness.readers import CHECKS, EXPORTS, LISTS, RESUMES
from tests.hostile.harness.victim import Attacked, Document

Add = Callable[..., None]
_TABLE = "model/.slices"
_READERS = RESUMES | CHECKS | EXPORTS | LISTS
_HUGE = 2**62
_SHARDINGS: dict[str, Any] = {
    "many_ranks": {"mesh": [1 << 24], "strides": [1], "split": {"0": [0]}},
    "more_ranks": {"mesh": [1 << 24, 1 << 24], "strides": [1 << 24, 1], "split": {"0": [0, 1]}},
    "huge_mesh": {"mesh": [_HUGE, _HUGE], "strides": [1, 2], "split": {"0": [0], "1": [1]}},
    "no_ranks": {"mesh": [0], "strides": [1], "split": {"0": [0]}},
    "equal_ranks": {"mesh": [4], "strides": [0], "split": {"0": [0]}},
    "many_dimensions": {"mesh": [1] * 200, "strides": [1] * 200, "split": {"0": [*range(200)]}},
    "far_dimension": {"mesh": [2], "strides": [1], "split": {"63": [0]}},
    "text": {"mesh": "2", "strides": [1], "split": {"0": [0]}},
    "nested": {"mesh": [[[2]]], "strides": [1], "split": {"0": [0]}},
    "null": None,
}


def entries(add: Add) -> None:
    from tests.hostile.harness.attacks import put

    met = (_READERS, CHECKS, "tables")
    for name, sharding in _SHARDINGS.items():
        add("table_sharding", name, _sharding, *met, value=sharding)
    locations = {"file": "../../outside/secret.json", "head_bytes": _HUGE}
    locations |= {"digest": "xxh3_128:" + "0" * 32, "files": ["/etc/passwd"] * 9}
    for key, value in locations.items():
        add("table_location", key, _location, *met, key=key, value=value)
    for field in ("rank", "part", "file", "rows", "start", "stop"):
        value = _HUGE if field in ("start", "stop") else 2**31
        add("table_segment", field, _segment, *met, field=field, value=value)
    for name, content in {"empty": b"", "zeros": b"\0" * 4096, "text": b"x" * 100_000}.items():
        for table in (_TABLE, "optim/.slices"):
            case_name = f"{name}_{table.partition('/')[0]}"
            add("table_content", case_name, put, *met, path=table, data=content)
    for name, change in {"sparse": _sparse, "link": _link, "pipe": _pipe}.items():
        add("table_special", name, change, *met)


def _sharding(case: Attacked, value: Any) -> None:
    def change(document: Document) -> None:
        document["trees"]["model"]["shardings"] = [value]

    case.reseal(change)


def _location(case: Attacked, key: str, value: Any) -> None:
    case.reseal(lambda document: document["trees"]["model"]["table"].update({key: value}))


def _segment(case: Attacked, field: str, value: int) -> None:
    """Another head, with the digests that fit."""
    content = (case.checkpoint / _TABLE).read_bytes()
    head_bytes = case.document()["trees"]["model"]["table"]["head_bytes"]
    segments = np.frombuffer(content[:head_bytes], SEGMENT).copy()
    segments[field][-1] = value
    head = segments.tobytes()
    case.replace(_TABLE, head + content[head_bytes:])
    _location(case, "digest", digest_of(head))


def _sparse(case: Attacked) -> None:
    os.truncate(case.checkpoint / _TABLE, 1 << 40)
    case.reseal(lambda document: document["files"][_TABLE].update(size=1 << 40))


def _link(case: Attacked) -> None:
    (case.checkpoint / _TABLE).unlink()
    (case.checkpoint / _TABLE).symlink_to(case.secret)


def _pipe(case: Attacked) -> None:
    (case.checkpoint / _TABLE).unlink()
    os.mkfifo(case.checkpoint / _TABLE)
