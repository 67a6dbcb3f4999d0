"""The parts that ``ckpt show`` is made of, for checkpoints of ours and of others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.terminal import coloured, printable, table

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.slices import Tensor

_STATISTICS = ("min", "max", "mean", "std", "norm")
_COUNTS = {"num_zero": "zeros", "num_nan": "NaN", "num_inf": "inf"}


def statistics(root: Path, tensor: Tensor, wanted: bool) -> dict[str, Any]:
    """A tensor's entry ``statistics``, where that is *wanted*."""
    if not wanted:
        return {}
    from automodel_ckpt.checkpoint.tensors.statistics import statistics_of

    return {"statistics": asdict(statistics_of(root, tensor))}


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


def tensor_lines(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table of tensors, with statistics where they were made."""
    with_statistics = any("statistics" in tensor for tensor in tensors.values())
    titles = [("tensor", "dtype", "shape", "slices", *_STATISTICS, *_COUNTS.values())] if with_statistics else []
    rows = [
        (printable(fqn), tensor["dtype"], str(list(tensor["shape"])), *_placement(tensor, with_statistics))
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
    values = tensor["statistics"]
    yield str(tensor["slices"])
    yield from ("-" if values[name] is None else f"{values[name]:.4g}" for name in _STATISTICS)
    yield from (str(values[name]) for name in _COUNTS)
