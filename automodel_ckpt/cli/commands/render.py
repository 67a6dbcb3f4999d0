"""The sections of ``ckpt show``, for checkpoints of this program and of others."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.terminal import (
    coloured,
    printable,
    problem_from_json,
    problem_json,
    size_text,
    table,
)
from automodel_ckpt.errors import CheckpointUnusable, Problem

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.slices import Tensor

_STATISTICS = ("min", "max", "mean", "std", "norm")
_COUNTS = {"num_zero": "zeros", "num_nan": "NaN", "num_inf": "inf"}


def statistics(root: Path, tensor: Tensor, wanted: bool) -> dict[str, Any]:
    """A tensor's entry ``statistics``, where that is *wanted*; of a damaged tensor what is wrong, as ``damaged``."""
    if not wanted:
        return {}
    from automodel_ckpt.checkpoint.tensors.statistics import statistics_of

    try:
        return {"statistics": asdict(statistics_of(root, tensor))}
    except CheckpointUnusable as error:
        return {"damaged": [problem_json(problem) for problem in error.problems]}


def damage_in(document: Mapping[str, Any]) -> list[Problem]:
    """What is damaged in a document whose tensors were read: trees that cannot be opened, and what :func:`statistics`
    found."""
    found = []
    for name, tree in document["trees"].items():
        if tree.get("problem"):
            what = "the tensors cannot be read"
            found.append(
                Problem(
                    what,
                    str(Path(document["path"], name)),
                    tree["problem"],
                    "run `ckpt verify` for details",
                )
            )
        for tensor in tree["tensors"].values():
            found += map(problem_from_json, tensor.get("damaged", ()))
    return found


def section(title: str, content: Iterable[str]) -> Iterator[str]:
    """A title and its lines; nothing where there are none."""
    lines = list(content)
    if lines:
        yield ""
        yield coloured(printable(title), "bold", sys.stdout)
        yield from ("  " + printable(line) for line in lines)


def pairs(values: Mapping[str, Any]) -> list[str]:
    """Keys, dotted where mappings are nested, and values, in two columns; what is not known is left out."""
    from automodel_ckpt.checkpoint.tensors.difference import flatten

    rows = [(key, str(value)[:200]) for key, value in flatten(values) if key and value is not None]
    return table(rows) if rows else []


def count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}" if len(things) == 1 else f"{len(things)} {name}s"


def tensor_lines(tensors: Mapping[str, Mapping[str, Any]], everything: bool) -> list[str]:
    """A table of all tensors, with statistics where they were computed; in groups where neither that nor *everything*
    is wanted."""
    with_statistics = any(
        "statistics" in tensor or "damaged" in tensor for tensor in tensors.values()
    )
    if not everything and not with_statistics:
        return _grouped_lines(tensors)
    titles = (
        [("tensor", "dtype", "shape", "slices", *_STATISTICS, *_COUNTS.values())]
        if with_statistics
        else []
    )
    rows = [
        (
            printable(fqn),
            tensor["dtype"],
            str(list(tensor["shape"])),
            *_placement(tensor, with_statistics),
        )
        for fqn, tensor in _together(tensors)
    ]
    right = range(3, 12) if with_statistics else ()
    return table([*titles, *rows], right) if rows else []


def _together(tensors: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """In their order, but all of a parameter's optimizer state where the first of it stands."""
    places: dict[str, int] = {}
    for fqn in tensors:
        places.setdefault(_owner(fqn), len(places))
    return sorted(tensors.items(), key=lambda entry: places[_owner(entry[0])])


def _owner(fqn: str) -> str:
    """``optimizer.state.model.a.weight`` of ``optimizer.state.model.a.weight.exp_avg``; else the name."""
    return fqn.rpartition(".")[0] if ".state." in fqn else fqn


def _placement(tensor: Mapping[str, Any], with_statistics: bool) -> Iterator[str]:
    if not with_statistics:
        yield "1 slice" if tensor["slices"] == 1 else f"{tensor['slices']} slices"
        return
    yield str(tensor["slices"])
    if "damaged" in tensor:
        yield from ("damaged", *[""] * (len(_STATISTICS) + len(_COUNTS) - 1))
        return
    values = tensor["statistics"]
    yield from ("-" if values[name] is None else f"{values[name]:.4g}" for name in _STATISTICS)
    yield from (str(values[name]) for name in _COUNTS)


# ---------------------------------------------------------------- in short


def file_lines(files: Mapping[str, int], everything: bool) -> list[str]:
    """A table of files and their sizes in bytes; unless *everything* is wanted, a line for each directory."""
    if everything:
        return (
            table([(name, size_text(size)) for name, size in sorted(files.items())])
            if files
            else []
        )
    directories: dict[str, list[int]] = {}
    for name, size in sorted(files.items()):
        top, _, rest = name.partition("/")
        directories.setdefault(f"{top}/" if rest else top, []).append(size)
    rows = [
        (name, count(sizes, "file") if name.endswith("/") else "", size_text(sum(sizes)))
        for name, sizes in directories.items()
    ]
    return table(rows, right=(1, 2)) if rows else []


def totals(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """How many tensors there are, their elements, bytes and dtypes: ``20 tensors, 25,920 elements, 103.7 kB, F32``."""
    if not tensors:
        return count(tensors, "tensor")
    from automodel_ckpt.checkpoint.slices import nbytes_of

    numel = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    nbytes = sum(nbytes_of(tensor["dtype"], tensor["shape"]) for tensor in tensors.values())
    dtypes = ", ".join(sorted({tensor["dtype"] for tensor in tensors.values()}))
    return f"{count(tensors, 'tensor')}, {numel:,} elements, {size_text(nbytes)}, {dtypes}"


def _grouped_lines(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of tensors in which those of equal dtype and shape whose names differ in numbers share a line, such as
    ``model.layers.{0..11}.mlp.up_proj.weight``. Optimizer state is counted by its kind."""
    state = {fqn: tensor for fqn, tensor in tensors.items() if ".state." in fqn}
    lines = _state_lines(state)
    groups: dict[tuple[str, str, str], list[list[str]]] = {}
    for fqn, tensor in tensors.items():
        if fqn in state:
            continue
        pattern = _NUMBER.sub("{}", fqn)
        shape = str(list(tensor["shape"]))
        group = groups.setdefault((pattern, tensor["dtype"], shape), [])
        group.append(_NUMBER.findall(fqn))
    rows = []
    for (pattern, dtype, shape), numbers in groups.items():
        num_tensors = f"{len(numbers)} tensors" if len(numbers) > 1 else ""
        rows.append((_group_name(pattern, numbers), dtype, shape, num_tensors))
    if rows:
        lines += table(rows)
    return lines


_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


def _group_name(name: str, numbers: Sequence[Sequence[str]]) -> str:
    """*name* with each ``{}`` replaced by the numbers found there."""
    parts = name.split("{}")
    num_places = len(numbers[0])
    if len(parts) - 1 != num_places:
        return name  # the tensor's name itself contains {}
    text = parts[0]
    for place in range(num_places):
        found = {int(each[place]) for each in numbers}
        text += _range_text(found) + parts[place + 1]
    return text


def _range_text(found: Collection[int]) -> str:
    """``7``, ``{0..11}``, or ``{0, 2, 5, ...}``."""
    ordered = sorted(found)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    shown = [str(number) for number in ordered[:_NUMBERS_SHOWN]]
    if len(ordered) > _NUMBERS_SHOWN:
        shown.append("...")
    return "{" + ", ".join(shown) + "}"


_NUMBERS_SHOWN = 6


def _state_lines(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    kinds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for fqn, tensor in tensors.items():
        kinds.setdefault(fqn.rpartition(".")[2], {})[fqn] = tensor
    return table([(kind, totals(found)) for kind, found in kinds.items()]) if kinds else []
