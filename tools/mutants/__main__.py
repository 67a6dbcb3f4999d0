"""Measure how many single changes of the code no test notices.

    python -m tools.mutants automodel_ckpt/data tests/unit/data
    python -m tools.mutants automodel_ckpt/data tests/unit/data --sample 100 --seed 2

Each change is tried in a copy of the repository, with the tests that are named after the code. It is *killed* if a test
fails, *timed out* if the tests do not end within the limit (counted as killed), and *survived* otherwise. Survivors are
printed and written to runs/mutants.json. Read them: each is a missing test, a line that does nothing, or a change that
makes no difference.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.mutants.operators import Mutation, mutations
from tools.support import ROOT, parser_of

RESULTS = ROOT / "runs" / "mutants.json"
# Only at the top of the repository: tests/golden/runs is needed.
_NOT_COPIED = {".git", ".venv", ".venv-oldest", ".peers", ".mypy_cache", ".ruff_cache", "runs"}
_UNCHANGED_TIMES_LONGER = 4


def attempt(
    root: Path, path: str, mutation: Mutation | None, tests: Sequence[str], seconds: float
) -> str:
    """Run *tests* on a copy of *root* with the change: "killed", "timed out" or "survived"."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name) / "r"
        shutil.copytree(root, copy, symlinks=True, copy_function=os.link, ignore=_ignored_in(root))
        if mutation is not None:
            target = copy / path
            source = target.read_bytes()
            target.unlink()  # it is a hard link to the original
            target.write_bytes(mutation.apply(source))
        return _outcome(copy, Path(name), tests, seconds)


def _ignored_in(root: Path) -> Callable[[str, list[str]], set[str]]:
    return lambda directory, names: _NOT_COPIED & {*names} if Path(directory) == root else set()


def _outcome(copy: Path, scratch: Path, tests: Sequence[str], seconds: float) -> str:
    more = {"PYTHONPATH": str(copy), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env=os.environ | more | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "survived" if process.wait(seconds) == 0 else "killed"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        # Also ranks and commands that a failed test left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sample(code: Path, size: int, seed: int) -> list[tuple[str, Mutation]]:
    """*size* changes of the files in *code*, drawn uniformly over all places."""
    places = [
        (str(path.relative_to(ROOT)), mutation)
        for path in ([code] if code.is_file() else sorted(code.rglob("*.py")))
        for mutation in mutations(path.read_bytes())
    ]
    return random.Random(seed).sample(places, min(size, len(places)))


def main() -> int:
    """Try the changes. Returns 0, however many survive, and 1 if the tests fail with unchanged code."""
    parser = parser_of(__doc__)
    parser.add_argument("code", type=Path, help="a file or folder to change")
    parser.add_argument("tests", nargs="+", help="files or folders of tests")
    parser.add_argument("--sample", type=int, default=40, help="number of changes (40)")
    parser.add_argument("--seed", type=int, default=1, help="which sample (1)")
    parser.add_argument("--workers", type=int, default=2, help="changes at a time (2)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of each change (300)")
    options = parser.parse_args()
    limit = _UNCHANGED_TIMES_LONGER * options.timeout
    if (outcome := attempt(ROOT, "", None, options.tests, limit)) != "survived":
        # Tests that fail with any code notice nothing.
        print(f"error: the tests of unchanged code: {outcome}")
        return 1
    chosen = sample(options.code.resolve(), options.sample, options.seed)

    def run(place: tuple[str, Mutation]) -> dict[str, str]:
        path, mutation = place
        outcome = attempt(ROOT, path, mutation, options.tests, options.timeout)
        print(f"{outcome:9} {path}:{mutation.line}  {mutation.description}", flush=True)
        return {
            "place": f"{path}:{mutation.line}",
            "change": mutation.description,
            "outcome": outcome,
        }

    with ThreadPoolExecutor(options.workers) as pool:
        results = list(pool.map(run, chosen))
    num_alive = sum(result["outcome"] == "survived" for result in results)
    print(f"{num_alive} of {len(results)} changes survived ({num_alive / len(results):.0%})")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
