"""``ckpt diff A B``: show what changed between two checkpoints."""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.terminal import colored
from automodel_ckpt.base.units import some_of
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict, Values
from automodel_ckpt.checkpoint.parts.manifest import Manifest, has_manifest
from automodel_ckpt.cli.common.arguments import WHERE
from automodel_ckpt.cli.common.checkpoint_tables import section
from automodel_ckpt.cli.common.output import (
    fitted,
    print_document,
    problem_json,
    report_problems,
    table,
)
from automodel_ckpt.cli.common.paths import whole_checkpoint
from automodel_ckpt.cli.common.remote import locate_one, sparse_copy
from automodel_ckpt.config.changes import saved_recipe
from automodel_ckpt.errors import CheckpointUnusable, Problem, printable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors

_SECTIONS = ("general", "recipe", "environment", "config")
_TITLES = {"general": "checkpoint", "config": "model config"}
_GENERAL = ("step", "epoch", "world_size", "dp_size", "losses", "progress")
# Lists of tensors in the document of a tree, and what is printed before their names.
_LISTS = {
    "differing": "changed, by digest (values in a store are not read: `ckpt pull` the checkpoints to compare them)",
    "undecided": "not compared: other slices, or no digests (`ckpt pull` the checkpoints to compare them)",
    "damaged": "damaged, not compared",
    "only_first": "only in A",
    "only_second": "only in B",
}
# How many tensors each list shows.
_MAX_LINES = 20


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    *general* and *environment* come from its manifest and are empty for an external checkpoint. *recipe* maps dotted
    keys to values. *config* is the content of the model's config.json, empty if there is none. *trees* maps tree names
    to tensors. *url* is the URL of a checkpoint in a store; its tensors are not read, and *path* has its other files.
    """

    path: Path
    general: Values = field(default_factory=dict)
    environment: Values = field(default_factory=dict)
    recipe: Texts = field(default_factory=dict)
    config: Values = field(default_factory=dict)
    trees: Mapping[str, StoredTensors] = field(default_factory=dict)
    url: str = ""


_ONE = f"{WHERE}, a URL of one in a store, or a directory or file of another program"
USAGE = f"""
Show what changed from checkpoint A to B: recipe, environment, ranks, the model's config and tensors. Tensors with equal
digests are not read, unless their files are those of an export or have changed since the manifest was written: then
their bytes are compared with the digests first. Tensors of a checkpoint in a store are compared by their digests
alone. The exit code is 3 if a tensor is damaged. `ckpt-train --dry-run` shows what a recipe changes in the run that it
resumes.

a A | {_ONE}
b B | {_ONE}
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt diff``. Differences give exit code 0, damaged tensors 3; damaged tensors are not compared."""
    with ExitStack() as copies:
        document, problems = _document(_side(arguments.a, copies), _side(arguments.b, copies))
    print_document(arguments, document, _lines(document))
    return report_problems(problems)


def _side(place: str, copies: ExitStack) -> Side:
    """Read the checkpoint at a path or URL; of another program's, only the tensors and the recipe, if it has one.

    *copies* keeps the files of a checkpoint in a store while it is open.
    """
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
    from automodel_ckpt.convert.formats.files import read_json
    from automodel_ckpt.convert.open import open_source

    if is_url(place):
        run, name, manifest = locate_one(place)
        copy = copies.enter_context(sparse_copy(run, name, manifest))
        return replace(_side_of(copy, manifest, recorded_at=math.inf), url=f"{run.store}/{name}")
    path = whole_checkpoint(Path(place))
    if has_manifest(path):
        recorded_at = os.stat(path / layout.MANIFEST).st_mtime_ns
        return _side_of(path, Manifest.read(path), recorded_at=recorded_at)
    source = open_source(path)
    return Side(
        path,
        trees={"model": StoredTensors(source.root, source.tensors)},
        recipe=saved_recipe(path / layout.CONFIG),
        config=_config(lambda: read_json(source.config_directory, "config.json", source.export)),
    )


def _side_of(path: Path, manifest: Manifest, *, recorded_at: float) -> Side:
    """Read the checkpoint of this program at *path*, by its *manifest*, which was written at *recorded_at*."""
    from automodel_ckpt.checkpoint.state.model_config import saved_config
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors

    trees = {
        name: StoredTensors(path, tree.tensors, recorded_at)
        for name, tree in manifest.trees.items()
    }
    return Side(
        path,
        general={key: getattr(manifest, key) for key in _GENERAL},
        environment=manifest.environment,
        recipe=saved_recipe(path / layout.CONFIG),
        config=_config(lambda: saved_config(path, layout.state_directory("model"))),
        trees=trees,
    )


def _config(read: Callable[[], ValueDict | None]) -> ValueDict:
    """The content of the model's config.json; empty if there is none that can be read."""
    with suppress(CheckpointUnusable):
        return read() or {}
    return {}


def _document(a: Side, b: Side) -> tuple[ValueDict, list[Problem]]:
    """Return the document of ``ckpt diff --json``, and the problems of damaged tensors."""
    from automodel_ckpt.checkpoint.tensors.difference import StoredTensors, changed_leaves, compare

    empty = StoredTensors(Path(), {})
    reads_values = not (a.url or b.url)
    trees = {}
    # A missing file is a problem of each of its tensors.
    found = {}
    for name in {**a.trees, **b.trees}:
        difference = compare(
            a.trees.get(name, empty), b.trees.get(name, empty), reads_values=reads_values
        )
        trees[name] = asdict(difference)
        # The keys of problems in JSON are not the names of their fields.
        for fqn, problems in difference.damaged.items():
            trees[name]["damaged"][fqn] = [problem_json(problem) for problem in problems]
            found.update(dict.fromkeys(problems))
    sections: ValueDict = {}
    not_compared = []
    for part in _SECTIONS:
        before, after = getattr(a, part), getattr(b, part)
        sections[part] = {}
        if before and after:
            sections[part] = changed_leaves(before, after)
        elif before or after:
            # Another program's checkpoint has none of this: that is no change from a value to none.
            not_compared.append(part)
    document = {
        "a": a.url or str(a.path),
        "b": b.url or str(b.path),
        "foreign": [str(side.path) for side in (a, b) if not side.general],
        **sections,
        "not_compared": not_compared,
        "trees": trees,
    }
    return document, list(found)


# ---------------------------------------------------------------- printing


def _lines(document: Values) -> Iterator[str]:
    yield colored(printable(f"{document['a']} -> {document['b']}"), "bold", sys.stdout)
    for path in document["foreign"]:
        yield colored(printable(f"external, unverified: {path}"), "yellow", sys.stdout)
    for part in _SECTIONS:
        changes = document[part].items()
        lines = table([(name, _text(before), "->", _text(now)) for name, (before, now) in changes])
        if part in document["not_compared"]:
            lines = ["not compared: only one of the two has this information"]
        elif not lines and len(document["foreign"]) < 2:
            # Weights of other programs may have tensors only.
            lines = ["no difference"]
        yield from section(_TITLES.get(part, part), lines)
    for name, tree in document["trees"].items():
        yield from section(f"{name}: tensors", list(_tree_lines(tree)))


def _tree_lines(tree: Values) -> Iterator[str]:
    equal = f"{tree['num_equal']} equal ({tree['num_unread']} by digest)"
    yield f"{equal}, {len(tree['changed'])} changed"
    for name, title in _LISTS.items():
        if tree[name]:
            names = list(tree[name])
            text = some_of(names, _MAX_LINES)
            all_of_them = ": `ckpt diff --json` lists all" if len(names) > _MAX_LINES else ""
            yield f"{len(names)} {title}: {text}{all_of_them}"
    for fqn, (before, after) in tree["redescribed"].items():
        yield f"{fqn}: {before} -> {after}"
    yield from _changed_tensor_lines(tree["changed"])


def _changed_tensor_lines(changes: Sequence[Values]) -> Iterator[str]:
    """Format a table of the changed tensors, the one with the largest relative change first."""
    if not changes:
        return
    rows = [("tensor", "largest change", "relative norm", "elements changed")]
    ordered = sorted(changes, key=lambda change: -(change["relative"] or 0.0))
    for change in ordered[:_MAX_LINES]:
        elements = f"{change['num_changed']} of {change['numel']}"
        largest, relative = _number(change["max_abs"]), _number(change["relative"])
        rows.append((change["fqn"], largest, relative, elements))
    yield from fitted(rows, (1, 2, 3), ("elements changed", "largest change"))
    if len(ordered) > _MAX_LINES:
        yield f"and {len(ordered) - _MAX_LINES} more: `ckpt diff --json` lists all"


def _text(value: Any) -> str:
    return "(none)" if value is None else str(value)[:80]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
