"""The sections and tables of ``ckpt show``, for checkpoints of this program and of others."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.terminal import colored
from automodel_ckpt.base.units import counted, size_text
from automodel_ckpt.checkpoint.files.type_aliases import Counts, ValueDict, Values
from automodel_ckpt.cli.common.output import problem_from_json, problem_json, table
from automodel_ckpt.errors import CheckpointUnusable, Problem, printable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slices import Tensor

TensorEntry = Values
"""A tensor in the document of ``ckpt show --json``: dtype, shape, slices; with ``--stats``, statistics or damaged."""

_STATISTICS = ("min", "max", "mean", "std", "norm")
_COUNTS = {"num_zero": "zeros", "num_nan": "NaN", "num_inf": "inf"}
_NUMBER_IN_NAME = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


# ---------------------------------------------------------------- statistics of tensors


def statistics(root: Path, tensor: Tensor) -> ValueDict:
    """Read a tensor and return its entry ``statistics``, or ``damaged``, a list of problems."""
    from automodel_ckpt.checkpoint.tensors.statistics import statistics_of

    try:
        return {"statistics": asdict(statistics_of(root, tensor))}
    except CheckpointUnusable as error:
        return {"damaged": [problem_json(problem) for problem in error.problems]}


def damage_in(document: Values) -> list[Problem]:
    """Return the damage in a document: trees that cannot be opened, and with statistics, damaged tensors."""
    problems = []
    for tree in document["trees"].values():
        problems += [problem_from_json(entry) for entry in tree.get("damaged", ())]
        for tensor in tree["tensors"].values():
            problems += [problem_from_json(entry) for entry in tensor.get("damaged", ())]
    return problems


# ---------------------------------------------------------------- sections


def section(title: str, content: Iterable[str]) -> Iterator[str]:
    """Yield a blank line, a title and the indented lines; nothing if there are no lines."""
    lines = list(content)
    if not lines:
        return
    yield ""
    yield colored(printable(title), "bold", sys.stdout)
    for line in lines:
        yield "  " + printable(line)


def pairs(values: Values) -> list[str]:
    """Format a mapping as two columns. Keys of nested mappings are dotted; values that are None are omitted."""
    from automodel_ckpt.checkpoint.tensors.difference import flatten

    rows = [(key, str(value)[:200]) for key, value in flatten(values) if key and value is not None]
    return table(rows)


# ---------------------------------------------------------------- files


def file_lines(files: Counts, everything: bool) -> list[str]:
    """Format a table of files and their sizes in bytes; unless *everything* is set, one line per directory."""
    if everything:
        return table([(name, size_text(size)) for name, size in sorted(files.items())])
    sizes_at: dict[str, list[int]] = {}
    for name, size in sorted(files.items()):
        top, separator, _ = name.partition("/")
        sizes_at.setdefault(top + separator, []).append(size)
    rows = []
    for name, sizes in sizes_at.items():
        num_files = counted(len(sizes), "file") if name.endswith("/") else ""
        rows.append((name, num_files, size_text(sum(sizes))))
    return table(rows, right=(1, 2))


# ---------------------------------------------------------------- tensors


def totals(tensors: Mapping[str, TensorEntry]) -> str:
    """Summarize tensors: ``20 tensors, 25,920 elements, 103.7 kB, F32``."""
    from automodel_ckpt.checkpoint.parts.slices import nbytes_of

    if not tensors:
        return counted(len(tensors), "tensor")
    numel = nbytes = 0
    dtypes = set()
    for tensor in tensors.values():
        numel += math.prod(tensor["shape"])
        nbytes += nbytes_of(tensor["dtype"], tensor["shape"])
        dtypes.add(tensor["dtype"])
    names = ", ".join(sorted(dtypes))
    return f"{counted(len(tensors), 'tensor')}, {numel:,} elements, {size_text(nbytes)}, {names}"


def tensor_lines(tensors: Mapping[str, TensorEntry], everything: bool) -> list[str]:
    """Format a table of tensors.

    Lists every tensor if *everything* is set or statistics were computed; otherwise, groups of tensors.
    """
    has_statistics = any(
        "statistics" in tensor or "damaged" in tensor for tensor in tensors.values()
    )
    if not everything and not has_statistics:
        return _grouped_lines(tensors)
    rows = []
    if has_statistics:
        rows.append(("tensor", "dtype", "shape", "slices", *_STATISTICS, *_COUNTS.values()))
    for fqn, tensor in tensors.items():
        cells = [counted(tensor["slices"], "slice")]
        if has_statistics:
            cells = [str(tensor["slices"]), *_statistics_cells(tensor)]
        rows.append((printable(fqn), tensor["dtype"], str(list(tensor["shape"])), *cells))
    return table(rows, right=range(3, 12) if has_statistics else ())


def _statistics_cells(tensor: TensorEntry) -> list[str]:
    if "damaged" in tensor:
        return ["damaged", *[""] * (len(_STATISTICS) + len(_COUNTS) - 1)]
    values = tensor["statistics"]
    cells = ["-" if values[name] is None else f"{values[name]:.4g}" for name in _STATISTICS]
    return [*cells, *(str(values[name]) for name in _COUNTS)]


def _grouped_lines(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Format a table with one line per group of tensors.

    Tensors of equal dtype and shape share a line if their names differ only in numbers, such as
    ``model.layers.*.mlp.up_proj.weight``. Optimizer state is counted by its kind.
    """
    kinds: dict[str, dict[str, TensorEntry]] = {}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for fqn, tensor in tensors.items():
        if ".state." in fqn:
            kinds.setdefault(fqn.rpartition(".")[2], {})[fqn] = tensor
        else:
            key = (_NUMBER_IN_NAME.sub("*", fqn), tensor["dtype"], str(list(tensor["shape"])))
            groups.setdefault(key, []).append(fqn)
    rows = []
    for (pattern, dtype, shape), names in groups.items():
        if len(names) > 1:
            rows.append((pattern, dtype, shape, counted(len(names), "tensor")))
        else:
            rows.append((names[0], dtype, shape, ""))
    return table([(kind, totals(of_kind)) for kind, of_kind in kinds.items()]) + table(rows)
