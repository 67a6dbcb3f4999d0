"""Small state of a checkpoint for display: read as plain data without torch; anything else is omitted."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.safe_open import read_range, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.pickles.restricted_unpickler import RestrictedUnpickler
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import archive_records

_MAX_FILE_BYTES = 1 << 20
# The names of a group's parameters, of which there can be a hundred thousand.
_MAX_VALUE_BYTES = 16 << 20
_MAX_GROUPS = 100
_OPTION = re.compile(r".*\.param_groups\.([0-9]{1,3})\.(\w+)", re.ASCII)


def plain_state(checkpoint: Path, manifest: Manifest, attribute: str) -> ValueDict:
    """The mapping of text to values in the state of an object, of one rank; empty where it has none or cannot be
    read."""
    record = manifest.state.get(attribute)
    if record is None or not record.files:
        return {}
    try:
        state = _value(read_safely(checkpoint, record.files[0], limit=_MAX_FILE_BYTES))
    except Exception:
        # A damaged or unusual file may make the reader raise anything. It is then not displayed.
        return {}
    if not isinstance(state, dict):
        return {}
    return {key: value for key, value in state.items() if isinstance(key, str)}


def optimizer_groups(checkpoint: Path, tree: Tree) -> list[ValueDict]:
    """The options of each parameter group, with ``params`` as the number of parameters; empty where unreadable."""
    groups: dict[int, ValueDict] = {}
    for fqn, blob in tree.objects.items():
        match = _OPTION.fullmatch(fqn)
        if match is None or int(match[1]) >= _MAX_GROUPS or blob.nbytes > _MAX_VALUE_BYTES:
            continue
        group = groups.setdefault(int(match[1]), {})
        with contextlib.suppress(Exception):  # a damaged file, as in plain_state
            value = _value(read_range(checkpoint, blob.file, blob.start, blob.nbytes))
            group[match[2]] = len(value) if match[2] == "params" else value
    return [groups[number] for number in sorted(groups)]


def _value(archive: bytes) -> Any:
    return _PlainReader(bytes(archive_records(archive)["data.pkl"])).load()


class _PlainReader(RestrictedUnpickler):
    """Reads numbers, text and containers. Whatever else a pickle has is rejected."""

    def fill(self, target: Any, items: list[Any]) -> None:
        # The hash of a nested tuple would take stack for each of its levels.
        if type(target) is not dict or not all(type(key) in (str, int) for key in items[::2]):
            self.reject()
        target.update(zip(items[::2], items[1::2], strict=True))
