"""Count the recipes of NeMo AutoModel in a folder that this program accepts, and list the rejections by cause.

    python -m tools.automodel_recipes ~/Automodel/examples/llm_finetune ~/Automodel/examples/vlm_finetune

Each file is loaded as ``ckpt-train FILE --print-config`` does. Then every ``_target_`` is imported and its arguments
are checked against its signature, as before training, and so is a configuration of the model that is written in the
file. Nothing is downloaded: whether a model or a data set exists on the Hub is not checked. A file counts as accepted
if all of this succeeds. ``--trust`` is the flag of ckpt-train.
"""

import collections
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from automodel_ckpt.config.automodel.rows import Notice
from automodel_ckpt.config.callables.prepare import check_targets
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.errors import AutomodelError, Problem
from automodel_ckpt.models.config_reading import load_model_config
from tools.support import parser_of

Result = tuple[Sequence[Notice], Sequence[Problem]]
"""The notices of a file that was accepted, or the problems of a rejected one."""


def check(path: Path, trust: Trust) -> Result:
    """Load a recipe, and check its targets and the configuration of the model that it writes out."""
    try:
        loaded = load_recipe(path)
        check_targets(loaded, trust)
        model = loaded.config.model
        if isinstance(model, ModelConfig) and isinstance(model.from_config, dict):
            load_model_config(from_config=model.from_config, overrides=model.config_overrides)
    except AutomodelError as error:
        return (), error.problems
    return loaded.notices, ()


def recipes_in(folders: Sequence[Path]) -> list[Path]:
    found: set[Path] = set()
    for folder in folders:
        if folder.is_file():
            found.add(folder)
        found.update(folder.rglob("*.yaml"), folder.rglob("*.yml"))
    return sorted(found)


def causes(problems: Sequence[Problem]) -> list[str]:
    """Return the causes of a rejection without the values of this file, so that equal ones can be counted."""
    found = []
    for problem in problems:
        value = "" if problem.value in (None, "") else f" ({problem.value})"
        found.append(re.sub(r"\s+", " ", f"{problem.what}{value}")[:140])
    return list(dict.fromkeys(found))


def report(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the report: the counts, and the causes."""
    accepted = [
        {notice.kind for notice in notices} for notices, problems in results if not problems
    ]
    degraded = sum("degraded" in kinds for kinds in accepted)
    yield f"{len(accepted)} of {len(results)} recipes are accepted, {degraded} of them with a warning"
    counts = collections.Counter(cause for _, problems in results for cause in causes(problems))
    if counts:
        yield "causes of the rejections, with the number of files:"
    for cause, count in counts.most_common():
        yield f"  {count:4} {cause}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders or files")
    parser.add_argument("--trust", action="append", default=[], help="as for ckpt-train")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = [check(path, Trust(given.trust)) for path in recipes_in(given.folders)]
    print(*report(results), sep="\n")


if __name__ == "__main__":
    main()
