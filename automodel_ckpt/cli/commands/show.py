"""``ckpt show``: print the contents of a checkpoint, optionally with statistics of its tensors."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.terminal import colored
from automodel_ckpt.base.units import counted, size_text, values_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run.notes import recall_losses
from automodel_ckpt.cli.common import external_checkpoints
from automodel_ckpt.cli.common.arguments import PATH
from automodel_ckpt.cli.common.checkpoint_tables import (
    damage_in,
    file_lines,
    pairs,
    section,
    statistics,
    tensor_lines,
    totals,
)
from automodel_ckpt.cli.common.output import age_facts, print_document, report_problems
from automodel_ckpt.cli.common.paths import whole_checkpoint
from automodel_ckpt.cli.common.remote import locate_one, reject_url, sparse_copy
from automodel_ckpt.config.changes import saved_recipe
from automodel_ckpt.errors import CheckpointUnusable, printable

_WIDTH = 78
USAGE = f"""
Show the contents of a checkpoint: state, tensors, files, data position. Tensors of the same shape whose names differ
only in numbers are grouped. The exit code is 3 if a part cannot be read.

{PATH}
--tensors | list all tensors and files, the recipe and the environment
--stats   | read all tensors and print min, max, mean, standard deviation and norm of the finite values, and the
  number of zeros, NaN and inf. The exit code is 3 if a tensor is damaged
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt show``. The exit code is 3 if files cannot be read, or if ``--stats`` finds a damaged tensor."""
    if is_url(arguments.path):
        # Its values are read, but no tensors.
        if arguments.stats:
            reject_url(arguments.path, "show --stats")
        run, name, manifest = locate_one(arguments.path)
        with sparse_copy(run, name, manifest) as copy:
            document = _document(copy, manifest, False) | {"path": f"{run.store}/{name}"}
    else:
        path = whole_checkpoint(Path(arguments.path))
        document = external_checkpoints.document(path, arguments.stats) or _document(
            path, Manifest.read(path), arguments.stats
        )
    print_document(arguments, document, _lines(document, everything=arguments.tensors))
    return report_problems(damage_in(document))


def _document(path: Path, manifest: Manifest, stats: bool) -> ValueDict:
    """Return the document of ``ckpt show --json`` for a checkpoint of this program."""
    from automodel_ckpt.checkpoint.state.display import plain_state

    CheckpointUnusable.check(verify(path, manifest, "size") if stats else [])
    return {
        "path": str(path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "dp_size": manifest.dp_size,
        "nbytes": manifest.nbytes,
        "progress": dict(manifest.progress),
        "data_position": plain_state(path, manifest, "dataloader"),
        "losses": {**manifest.losses, **recall_losses(path, manifest.digest)},
        "config": saved_recipe(path / layout.CONFIG),
        "environment": dict(manifest.environment),
        "lineage": dict(manifest.lineage),
        "state": {name: asdict(record) for name, record in manifest.state.items()},
        "files": {name: record.size for name, record in manifest.files.items()},
        "trees": {name: _tree(path, tree, stats) for name, tree in manifest.trees.items()},
    }


def _tree(path: Path, tree: Tree, stats: bool) -> ValueDict:
    from automodel_ckpt.checkpoint.state.display import optimizer_groups

    tensors = {}
    for fqn, tensor in tree.tensors.items():
        entry = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "slices": len(tensor.slices),
        }
        if stats:
            entry.update(statistics(path, tensor))
        tensors[fqn] = entry
    return {
        "format": tree.format,
        "tensors": tensors,
        "tied": dict(tree.tied),
        "groups": optimizer_groups(path, tree),
    }


def _lines(document: Values, *, everything: bool) -> Iterator[str]:
    """Format the document of a checkpoint, of this or another program, for a terminal.

    With *everything*, lists all tensors and files, the recipe and the environment.
    """
    is_external = document.get("foreign", False)
    yield colored(printable(document["path"]), "bold", sys.stdout)
    facts = [f"{key} {document[key]}" for key in ("step", "epoch") if document[key] is not None]
    kind = ""
    if is_external:
        yield colored(document["note"], "yellow", sys.stdout)
        kind = f"{printable(document['kind'])}; "
    else:
        facts.append(counted(document["world_size"], "rank"))
    facts += [size_text(document["nbytes"]), *age_facts(document["created"])]
    yield f"{kind}{', '.join(facts)}"
    losses = dict(document["losses"])
    if not is_external:
        for name in ("step", "epoch"):  # the line above has them
            losses.pop(name, None)
    yield from section("losses", pairs(losses))
    for key in ("progress", "data_position", "lineage"):
        yield from section(key.replace("_", " "), pairs(document.get(key, {})))
    files = document["files"]
    yield from section(f"files ({len(files)})", file_lines(files, everything))
    for name, tree in document["trees"].items():
        yield from _tree_lines(name, tree, everything)
    if everything and not is_external:
        yield from section("recipe", pairs(document["config"]))
        yield from section("environment", pairs(document["environment"]))
    elif not is_external:
        yield ""
        yield "`ckpt show --tensors` lists all tensors and files, the recipe and the environment"


def _tree_lines(name: str, tree: Values, everything: bool) -> Iterator[str]:
    tensors = tree["tensors"]
    place = "here" if name == "." else name
    title = f"{place} ({tree['format']}): {totals(tensors)}"
    if tree.get("values"):
        title += f", {values_text(tree['values'])}"
    problem = tree.get("problem")
    content = [problem] if problem else tensor_lines(tensors, everything)
    tied = [f"{alias} = {stored_name}" for alias, stored_name in tree.get("tied", {}).items()]
    yield from section(title, [*content, *tied])
    groups = [line for options in tree.get("groups", ()) for line in _group_lines(options)]
    yield from section(f"{name}: parameter groups", groups)
    for title, details in tree.get("details", {}).items():
        yield from section(title, details)


def _group_lines(options: Values) -> list[str]:
    """Format the options of a parameter group that are set."""
    used = [
        f"{name} {value}"
        for name, value in options.items()
        if name != "params" and value is not None and value is not False
    ]
    text = f"{options.get('params', '?')} parameters: {', '.join(used)}"
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
