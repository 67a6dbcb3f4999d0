"""Count the recipes of NeMo AutoModel in a folder that this program accepts, and list the rejections by cause.

    python -m tools.automodel_recipes ~/Automodel/examples/llm_finetune ~/Automodel/examples/vlm_finetune

Each file is loaded as ``ckpt-train FILE --print-config`` does. Then every ``_target_`` is imported and its arguments
are checked against its signature, as before training, and so is a configuration of the model that is written in the
file. Nothing is downloaded: whether a model or a data set exists on the Hub is not checked. A file counts as accepted
if all of this succeeds. ``--trust`` is the flag of ckpt-train.
"""

from __future__ import annotations

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
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.errors import AutomodelError, Problem
from automodel_ckpt.models.config_reading import load_model_config
from tools.support import parser_of


@dataclass(frozen=True)
class Result:
    """What happened to one file: its *notices* if it was accepted, else its *problems*."""

    notices: tuple[Notice, ...] = ()
    problems: tuple[Problem, ...] = ()


def check(path: Path, trust: Trust) -> Result:
    """Load a recipe, and check its targets and the configuration of the model that it writes out."""
    try:
        loaded = load_recipe(path)
        check_targets(loaded, trust)
        model = loaded.config.model
        if isinstance(model, ModelConfig) and isinstance(model.from_config, dict):
            load_model_config(from_config=model.from_config, overrides=model.config_overrides)
    except AutomodelError as error:
        return Result(problems=error.problems)
    return Result(loaded.notices)


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
        value = "" if problem.value in (None, "") else f" ({problem.value})"
        found.append(re.sub(r"\s+", " ", f"{problem.what}{value}")[:140])
    return list(dict.fromkeys(found))


def report(results: Sequence[Result], *, list_files: bool) -> Iterator[str]:
    """Yield the lines of the report: the counts, the causes, and on request the rejected files."""
    accepted = [result for result in results if not result.problems]
    degraded = 0
    for result in accepted:
        degraded += any(notice.kind == "degraded" for notice in result.notices)
    yield f"{len(accepted)} of {len(results)} recipes are accepted, {degraded} of them with a warning"
    counts = collections.Counter(cause for result in results for cause in causes(result))
    if counts:
        yield "causes of the rejections, with the number of files:"
    for cause, count in counts.most_common():
        yield f"  {count:4} {cause}"
    if list_files:
        yield "rejected files:"
        for result in results:
            yield from (f"  {problem.where}: {problem.what}" for problem in result.problems)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders or files")
    parser.add_argument("--trust", action="append", default=[], help="as for ckpt-train")
    parser.add_argument("--files", action="store_true", help="also list the rejected files")
    given = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = [check(path, Trust(given.trust)) for path in recipes_in(given.folders)]
    print(*report(results, list_files=given.files), sep="\n")


if __name__ == "__main__":
    main()
