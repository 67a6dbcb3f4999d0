"""``ckpt import``: another program's checkpoint as one of ours."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.cli.terminal import coloured, print_path, printable, size_text, table
from automodel_ckpt.errors import EXIT_DONE, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.convert.import_checkpoint import Import

_SHOWN = 5


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``ckpt``'s."""
    command: argparse.ArgumentParser = commands.add_parser(
        "import",
        help="import a checkpoint of another program",
        description="Import the weights of a DCP directory, Hugging Face files, a safetensors file or shards, or a "
        "NeMo AutoModel checkpoint into a run directory, as a checkpoint that a recipe can start from. The source is "
        "neither executed nor modified. State that is not imported is listed.",
    )
    command.add_argument(
        "source", metavar="SOURCE", help="directory of the other program, or a .safetensors file"
    )
    command.add_argument(
        "run",
        nargs="?",
        default="checkpoints",
        metavar="RUN",
        help="run directory (default: checkpoints)",
    )
    command.add_argument(
        "--step",
        type=int,
        default=0,
        metavar="S",
        help="step in the checkpoint's name (default: 0)",
    )
    command.add_argument(
        "--epoch",
        type=int,
        default=0,
        metavar="E",
        help="step in the checkpoint's name (default: 0)",
    )
    command.add_argument("--dry-run", action="store_true", help="only show what would be taken")
    return command


def import_(arguments: argparse.Namespace) -> int:
    """Run the command: say what is taken, then take it."""
    from automodel_ckpt.convert.import_checkpoint import prepare, run_import

    for name in ("step", "epoch"):
        if getattr(arguments, name) < 0:
            raise RecipeError(
                "step and epoch must not be negative",
                where=f"--{name}",
                value=getattr(arguments, name),
                hint="use 0 or more",
            )
    planned = prepare(
        Path(arguments.source), Path(arguments.run), step=arguments.step, epoch=arguments.epoch
    )
    if not arguments.json:
        print("\n".join(_lines(planned)))
    if not arguments.dry_run:
        run_import(planned)
    if arguments.json:
        print(json.dumps(_document(planned, arguments.dry_run), indent=2))
    elif not arguments.dry_run:
        print_path(planned.target)
    return EXIT_DONE


def _document(planned: Import, dry_run: bool) -> dict[str, Any]:
    from automodel_ckpt.convert.import_checkpoint import ABSENT

    return {
        "source": str(planned.source),
        "kind": planned.kind,
        "checkpoint": str(planned.target),
        "dry_run": dry_run,
        "num_tensors": len(planned.weights.tensors),
        "nbytes": planned.nbytes,
        "files": [file.name for file in planned.plan.files],
        "side_files": [*planned.side_files],
        "has_config": planned.has_config,
        "absent": [*ABSENT],
        "left_out": [*planned.left_out],
    }


def _lines(planned: Import) -> Iterator[str]:
    from automodel_ckpt.convert.import_checkpoint import ABSENT

    yield coloured(printable(f"{planned.source} -> {planned.target}"), "bold", sys.stdout)
    names = [*planned.side_files]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    beside = ", ".join(names[:_SHOWN]) + more if names else "none: no config.json"
    checked = "digests verified" if planned.has_digests else "unverified"
    weights = f"{len(planned.weights.tensors)} tensors, {size_text(planned.nbytes)}, {checked}: {planned.kind}"
    rows = [("weights", weights), ("other files", beside), ("not included", ", ".join(ABSENT))]
    rows += [("not imported", ", ".join(planned.left_out))] if planned.left_out else []
    yield from map(printable, table(rows))
    yield printable(
        f"to start from it: ckpt-train RECIPE.yaml --init_from.path {shlex.quote(str(planned.run))}"
    )
