"""``python -m tools.random_recipes``: exit code 1 if a recipe failed, or was not resumed exactly."""

import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tools.crash.record import Record
from tools.random_recipes.check import check
from tools.random_recipes.draw import Recipe, draw
from tools.support import parser_of


def main() -> int:
    """Check the recipes of the seeds in turn; the exit code."""
    parser = parser_of(__doc__, prog="python -m tools.random_recipes")
    parser.add_argument("--first", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--recipes", type=int, default=100, help="how many recipes (100)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as long")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.recipes)
    record = Record("random recipes", vars(options))
    for seed in seeds:
        _check(draw(seed), record)
        if time.time() - record.started > options.seconds:
            break
    return record.finish()


def _check(recipe: Recipe, record: Record) -> None:
    seed = recipe.seed
    # The files of a recipe that fails are kept, and their place is part of the report.
    work = Path(tempfile.mkdtemp(prefix=f"random-recipe-{seed}-"))
    started = time.time()
    result = check(recipe, work)
    if not result.problems:
        shutil.rmtree(work)
    print(f"{seed}: {result.outcome}, {time.time() - started:.0f} s", flush=True)
    if result.reason:
        record.notes[f"{seed} rejected"] = result.reason
    flags = shlex.join(recipe.flags(Path("RUN"), recipe.ranks))
    text = f"ckpt-train {flags}  # then {recipe.other_ranks} ranks"
    place = {"files": str(work), "flags": text} if result.problems else {}
    record.add(result.outcome, result.problems, seed=seed, **place)


if __name__ == "__main__":
    sys.exit(main())
