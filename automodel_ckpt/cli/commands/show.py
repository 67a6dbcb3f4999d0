"""``ckpt show``: print the contents of a checkpoint, optionally with statistics of its tensors."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.commands import external
from automodel_ckpt.cli.commands.render import (
    damage_in,
    file_lines,
    pairs,
    section,
    statistics,
    tensor_lines,
    totals,
)
from automodel_ckpt.cli.commands.small_files import first_state, recipe_leaves
from automodel_ckpt.cli.paths import add_path, whole_checkpoint
from automodel_ckpt.cli.terminal import (
    age_text,
    coloured,
    json_text,
    print_error,
    printable,
    size_text,
)
from automodel_ckpt.errors import EXIT_DONE, CheckpointUnusable, describe

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.manifest import Manifest, Tree

# Values of a recipe that say nothing.
_UNSET = frozenset({"null", "[]", "{}"})
_WIDTH = 78


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``ckpt``'s."""
    command: argparse.ArgumentParser = commands.add_parser(
        "show",
        help="show the contents of a checkpoint",
        description="Show the contents of a checkpoint: state, tensors, files, data position. Tensors of the same "
        "shape whose names differ only in numbers are grouped.",
    )
    add_path(command)
    command.add_argument(
        "--tensors",
        action="store_true",
        help="list all tensors and files, the recipe and the environment",
    )
    command.add_argument(
        "--stats",
        action="store_true",
        help="read all tensors and print min, max, mean, standard deviation and norm of the finite values, and the "
        "number of zeros, NaN and inf. The exit code is 3 if a tensor is damaged",
    )
    return command


def show(arguments: argparse.Namespace) -> int:
    """Run ``ckpt show``. The exit code is 3 if ``--stats`` finds a damaged tensor."""
    from automodel_ckpt.checkpoint.manifest import Manifest

    path = whole_checkpoint(Path(arguments.path))
    unchecked = external.document(path, arguments.stats) if path.is_dir() else None
    document = unchecked or _document(path, Manifest.read(path), arguments.stats)
    if arguments.json:
        print(json_text(document))
    else:
        lines = external.lines if unchecked else _lines
        print("\n".join(lines(document, everything=arguments.tensors)))
    if arguments.stats and (problems := damage_in(document)):
        code, message = describe(CheckpointUnusable.all_of(problems))
        print_error(message)
        return code
    return EXIT_DONE


def _document(path: Path, manifest: Manifest, stats: bool) -> dict[str, Any]:
    from automodel_ckpt.checkpoint.run.late_validations import recall

    if stats:
        _check_sizes(path, manifest)
    data = manifest.state.get("dataloader")
    return {
        "path": str(path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "dp_size": manifest.dp_size,
        "nbytes": manifest.nbytes,
        "progress": dict(manifest.progress),
        "data_position": first_state(path, data.files) if data else {},
        "losses": {**manifest.losses, **recall(path, manifest.digest)},
        "config": recipe_leaves(path),
        "environment": dict(manifest.environment),
        "lineage": dict(manifest.lineage),
        "state": {name: asdict(record) for name, record in manifest.state.items()},
        "files": {name: record.size for name, record in manifest.files.items()},
        "trees": {name: _tree(path, tree, stats) for name, tree in manifest.trees.items()},
    }


def _check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise :class:`CheckpointUnusable` if a file does not have the size in the manifest."""
    from automodel_ckpt.checkpoint.verify import verify

    if problems := verify(path, manifest, "size"):
        raise CheckpointUnusable.all_of(problems)


def _tree(path: Path, tree: Tree, stats: bool) -> dict[str, Any]:
    from automodel_ckpt.checkpoint.state.display import optimizer_groups

    return {
        "format": tree.format,
        "tensors": {
            fqn: {"dtype": t.dtype, "shape": list(t.shape), "slices": len(t.slices)}
            | statistics(path, t, stats)
            for fqn, t in tree.tensors.items()
        },
        "tied": dict(tree.tied),
        "groups": optimizer_groups(path, tree),
    }


def _lines(document: Mapping[str, Any], *, everything: bool) -> Iterator[str]:
    yield coloured(printable(document["path"]), "bold", sys.stdout)
    ranks = "1 rank" if document["world_size"] == 1 else f"{document['world_size']} ranks"
    size, age = size_text(document["nbytes"]), age_text(document["created"])
    yield f"step {document['step']}, epoch {document['epoch']}, {ranks}, {size}, {age} old"
    for title, key in (
        ("losses", "losses"),
        ("progress", "progress"),
        ("data position", "data_position"),
        ("lineage", "lineage"),
    ):
        values = document[key]
        if key == "losses":  # these are in the line above
            values = {
                name: value for name, value in values.items() if name not in ("step", "epoch")
            }
        yield from section(title, pairs(values))
    yield from section(
        f"files ({len(document['files'])})", file_lines(document["files"], everything)
    )
    for name, tree in document["trees"].items():
        title = f"{name} ({tree['format']}): {totals(tree['tensors'])}"
        yield from section(title, _tree_lines(tree, everything))
        groups = [line for options in tree["groups"] for line in _group_lines(options)]
        yield from section(f"{name}: parameter groups", groups)
    recipe = {key: text for key, text in document["config"].items() if text not in _UNSET}
    if everything:
        yield from section("recipe", pairs(recipe))
        yield from section("environment", pairs(document["environment"]))
    else:
        yield ""
        yield f"`ckpt show --tensors` lists all tensors, files, and the recipe ({len(recipe)} values)"


def _tree_lines(tree: Mapping[str, Any], everything: bool) -> list[str]:
    ties = [f"{alias} = {kept}" for alias, kept in tree["tied"].items()]
    return [*tensor_lines(tree["tensors"], everything), *ties]


def _group_lines(options: Mapping[str, Any]) -> list[str]:
    """The options of a parameter group that are set."""
    used = {
        n: value
        for n, value in options.items()
        if n != "params" and value is not None and value is not False
    }
    text = f"{options.get('params', '?')} parameters: " + ", ".join(
        f"{n} {value}" for n, value in used.items()
    )
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
