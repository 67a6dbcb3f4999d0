"""``python -m tools.random_recipes``: exit code 1 if a recipe failed, or was not resumed exactly."""

from __future__ import annotations

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
    parser.add_argument("--show", action="store_true", help="print the flags, and run none")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.recipes)
    recipes = (draw(seed) for seed in seeds)
    if options.show:
        for recipe in recipes:
            print(_text(recipe))
        return 0
    record = Record("random recipes", vars(options))
    for recipe in recipes:
        _check(recipe, record)
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
    place = {"files": str(work), "flags": _text(recipe)} if result.problems else {}
    record.add(result.outcome, result.problems, seed=seed, **place)


def _text(recipe: Recipe) -> str:
    flags = recipe.flags(Path("RUN"), recipe.ranks)
    return f"ckpt-train {shlex.join(flags)}  # then {recipe.other_ranks} ranks"


if __name__ == "__main__":
    sys.exit(main())
