"""``ckpt plot``: plot the curves of one or more runs as an HTML page, or as text on the terminal."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.terminal import print_error, print_path, printable_lines
from automodel_ckpt.checkpoint.files.layout import CONFIG
from automodel_ckpt.checkpoint.files.safe_open import without_links
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict
from automodel_ckpt.cli.common.paths import run_with_logs
from automodel_ckpt.config.changes import differences, saved_recipe
from automodel_ckpt.errors import EXIT_DONE, AutomodelError, RecipeError, printable

if TYPE_CHECKING:
    from automodel_ckpt.logs.history import History

# Keys of recipes in the table of differences, at most.
_MAX_DIFFERENCES = 100
_TEMPLATES = {".html": "page.html.jinja", ".svg": "loss.svg.jinja"}
# The largest width of the texts on both sides of a curve on a terminal.
_MAX_TEXT_WIDTH = 48
USAGE = """
Plot the curves of one or more runs: loss with checkpoints, LOWEST_VAL and resumes, gradient norm, learning rate,
throughput, and the cost of saves. Without --output, small plots are printed.

paths * RUN      | run directories, or paths inside them (default: current directory)
--output -o FILE | write a standalone .html page, or the loss alone as an .svg image
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt plot``. Raises :class:`CheckpointUnusable` if a path contains no run."""
    from automodel_ckpt.logs.history import read_history

    directories = [run_with_logs(Path(path)) for path in arguments.paths or ["."]]
    runs = [
        read_history(path, name)
        for path, name in zip(directories, _names(directories), strict=True)
    ]
    if arguments.output:
        _write(runs, Path(arguments.output))
    if arguments.json:
        print(json.dumps([_document(run) for run in runs], indent=2))
    elif arguments.output:
        print_path(arguments.output)
    else:
        for run in runs:
            print("\n".join(map(printable, _lines(run))))
    return EXIT_DONE


def _names(paths: list[Path]) -> list[str]:
    """Name each run by its path from the directory that contains all of them."""
    absolute = [path.absolute() for path in paths]
    above = os.path.commonpath([path.parent for path in absolute])
    return [os.path.relpath(path, above) for path in absolute]


def _write(runs: list[History], file: Path) -> None:
    """Write the page *file*. If that fails, an earlier report stays as it was."""
    from automodel_ckpt.convert.publishing import published_file
    from automodel_ckpt.logs.page import page

    template = _TEMPLATES.get(file.suffix)
    if template is None:
        raise RecipeError("the output must be an .html page or an .svg image", "--output", file)
    text = page(runs, _differences(runs), template)
    # A name may be no Unicode, and have characters that no browser shows.
    content = printable_lines(text).encode("utf-8", "backslashreplace")
    # Publishing renames: without this, it would replace a link instead of its target.
    target = without_links(file)
    with published_file(target, print_error, what="the report") as staging:
        staging.write_bytes(content)


def _differences(runs: list[History]) -> dict[str, list[str]]:
    """Map the recipe keys that differ between *runs* to their values, by the newest checkpoint of each run."""
    return dict(list(differences([_recipe_of(run) for run in runs]).items())[:_MAX_DIFFERENCES])


def _recipe_of(run: History) -> TextDict:
    """Return the recipe in the newest checkpoint of *run*, by dotted key; empty if there is none that can be read."""
    if not run.checkpoints:
        return {}
    try:
        return saved_recipe(run.path / run.checkpoints[-1].name / CONFIG)
    except (AutomodelError, OSError, ValueError):
        return {}


def _lines(run: History) -> Iterator[str]:
    import shutil

    from automodel_ckpt.logs.charts import curve_lines
    from automodel_ckpt.logs.page import summary

    width = max(10, min(shutil.get_terminal_size().columns - _MAX_TEXT_WIDTH, 60))
    facts = ", ".join(f"{name} {value}" for name, value in summary(run))
    yield f"{run.name}: {facts}"
    yield from curve_lines(run, width)


def _document(run: History) -> ValueDict:
    """Return the document of ``ckpt plot --json`` for one run."""
    return {
        "name": run.name,
        "path": str(run.path),
        "num_tokens": run.num_tokens,
        "resumed_at": list(run.resumed_at),
        "goodput": run.goodput and run.goodput.share,
        "seconds_by_category": run.goodput and run.goodput.seconds,
        "checkpoints": [checkpoint.name for checkpoint in run.checkpoints],
        "series": {name: asdict(found) for name, found in run.series.items()},
    }
