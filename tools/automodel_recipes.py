"""Count the recipes of NeMo AutoModel in a folder that this program accepts, and list the rejections by cause.

    python -m tools.automodel_recipes ~/Automodel/examples/llm_finetune ~/Automodel/examples/vlm_finetune

Each file is loaded as ``ckpt-train FILE --print-config`` does. Then every ``_target_`` is imported and its arguments
are checked against its signature, as before training, and so is a configuration of the model that is written in the
file. Nothing is downloaded: whether a model or a data set exists on the Hub is not checked. A file counts as accepted
if all of this succeeds. ``--trust`` is the flag of ckpt-train.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.config.automodel.rows import Notice
from automodel_ckpt.config.callables.prepare import check_targets
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.errors import AutomodelError, Problem
from automodel_ckpt.models.config_reading import load_model_config


@dataclass(frozen=True)
class Result:
    """What happened to one file: its *notices* if it was accepted, else its *problems*."""

    path: Path
    notices: tuple[Notice, ...] = ()
    problems: tuple[Problem, ...] = ()


def check(path: Path, trust: Trust) -> Result:
    """Load a recipe and check its targets. Raises nothing for a recipe that is rejected."""
    try:
        loaded = load_recipe(path)
        check_targets(loaded, trust)
        check_written_config(loaded)
    except AutomodelError as error:
        return Result(path, problems=error.problems)
    return Result(path, loaded.notices)


def check_written_config(loaded: LoadedRecipe) -> None:
    """Raise :class:`RecipeError` if transformers does not have a setting that ``model.from_config`` writes out."""
    model = loaded.config.model
    if isinstance(model, ModelConfig) and isinstance(model.from_config, dict):
        load_model_config(from_config=model.from_config, overrides=model.config_overrides)


def recipes_in(folders: Sequence[Path]) -> list[Path]:
    """Return the YAML files below *folders*, sorted; a file stands for itself."""
    found: set[Path] = set()
    for folder in folders:
        if folder.is_file():
            found.add(folder)
        found.update(folder.rglob("*.yaml"), folder.rglob("*.yml"))
    return sorted(found)


def causes(result: Result) -> list[str]:
    """Return the causes of a rejection without the values of this file, so that equal ones can be counted."""
    found = []
    for problem in result.problems:
        cause = problem.what
        if problem.value not in (None, ""):
            cause = f"{cause} ({problem.value})"
        found.append(re.sub(r"\s+", " ", cause)[:140])
    return list(dict.fromkeys(found))


def report(results: Sequence[Result], *, list_files: bool = False) -> Iterator[str]:
    """Yield the lines of the report: the counts, the causes, and on request the rejected files."""
    accepted = [result for result in results if not result.problems]
    degraded = 0
    for result in accepted:
        degraded += any(notice.kind == "degraded" for notice in result.notices)
    yield f"{len(accepted)} of {len(results)} recipes are accepted, {degraded} of them with a warning"
    counts: collections.Counter[str] = collections.Counter()
    for result in results:
        counts.update(causes(result))
    if counts:
        yield "causes of the rejections, with the number of files:"
    for cause, count in counts.most_common():
        yield f"  {count:4} {cause}"
    if not list_files:
        return
    yield "rejected files:"
    for result in results:
        for problem in result.problems:
            yield f"  {problem.where}: {problem.what}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders or files")
    parser.add_argument("--trust", action="append", default=[], help="as for ckpt-train")
    parser.add_argument("--files", action="store_true", help="also list the rejected files")
    given = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    trust = Trust(given.trust)
    results = [check(path, trust) for path in recipes_in(given.folders)]
    for line in report(results, list_files=given.files):
        print(line)


if __name__ == "__main__":
    main()
