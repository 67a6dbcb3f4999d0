"""Measure how many single changes of the code no test notices.

python -m tools.mutants                          # 40 mutations of each package: about an hour and a half on two cores
python -m tools.mutants checkpoint --sample 100  # one package
python -m tools.mutants --seed 2                 # another sample
python -m tools.mutants --only automodel_ckpt/checkpoint/parts/commit.py

Every mutation is tried against the tests that execute its line, in a copy of the repository. A mutation is *killed* if
a test fails, *timed out* if the tests do not end within the limit (counted as killed, and listed: on a busy machine the
limit may be too low), and *survived* otherwise. Survivors are printed and written to runs/mutants.json. Read them: each
is a missing test, a line that does nothing, or a change that makes no difference. The last kind can be listed, with the
reason, in tools/mutants/no_difference.toml; it is then printed, and not counted as a survivor.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tools.mutants import trial
from tools.mutants.operators import mutations
from tools.mutants.recording import Reached, dump, load, record, without_removed_tests
from tools.mutants.trial import Outcome, Result, Trial

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "checkpoint": "automodel_ckpt/checkpoint",
    "convert": "automodel_ckpt/convert",
    "data": "automodel_ckpt/data",
    "distributed": "automodel_ckpt/distributed",
    "recipes": "recipes",
}
TESTS = ("tests/unit", "tests/distributed", "tests/golden", "tests/contract", "tests/hostile")
RESULTS = ROOT / "runs" / "mutants.json"
RECORDING = ROOT / "runs" / "mutants_reached.json"
NO_DIFFERENCE = Path(__file__).parent / "no_difference.toml"
# The most specific tests, those that execute the fewest lines, come first: they notice a change soonest. The others
# run if none of the first notices it, and may take several times as long.
NUM_FIRST_TESTS = 100
# On a busy machine tests can take several times as long as on an idle one. Passing tests cannot be waited for in vain.
_UNCHANGED_TIMES_LONGER = 4


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and run. Returns 0, however many mutations survive, and 1 if nothing can be measured."""
    options = _parser().parse_args(words)
    trial.import_slow_libraries()
    files = {name: _files(name, options.only) for name in options.packages or PACKAGES}
    try:
        reached = _recording(options.tests, reuse=options.reuse)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}")
        return 1
    trials = [
        one
        for paths in files.values()
        for one in _sample(paths, reached, options.sample, options.seed)
    ]
    outcome = _unchanged_code(trials, _UNCHANGED_TIMES_LONGER * options.timeout)
    if outcome != "survived":
        # A test that fails with any code notices nothing.
        print(f"error: the tests of unchanged code {outcome}: they have to pass in a copy of it")
        return 1
    print(f"{len(trials)} mutations, {options.workers} at a time", flush=True)
    results = _run_all(trials, options.workers, options.timeout)
    outcomes = _checked(trials, results, _UNCHANGED_TIMES_LONGER * options.timeout)
    _report(files, trials, outcomes, options.seed)
    return 0


def _recording(tests: Sequence[str], *, reuse: bool) -> Reached:
    """Return which tests reach which lines: the last recording, or a new one, which is kept.

    Raises OSError if there is no last recording, RuntimeError if the tests cannot be run or listed.
    """
    if reuse:
        reached, removed = without_removed_tests(ROOT, load(RECORDING))
        if removed:
            print(f"{len(removed)} recorded tests no longer exist and are ignored", flush=True)
        return reached
    print(f"recording which tests reach which lines: {' '.join(tests)}", flush=True)
    reached = record(ROOT, [ROOT / directory for directory in PACKAGES.values()], tests)
    dump(reached, RECORDING)
    found = {test for lines in reached.values() for reaching in lines.values() for test in reaching}
    # If this is far fewer than the tests that passed, a recording was lost, and the report would mean nothing.
    print(f"{len(found)} tests execute lines of these packages", flush=True)
    return reached


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description="Mutation testing of this repository."
    )
    parser.add_argument(
        "packages", nargs="*", choices=[[], *PACKAGES], help="the packages to change (all)"
    )
    parser.add_argument(
        "--sample", type=int, default=40, help="mutations of each package (40); 0 for all"
    )
    parser.add_argument("--seed", type=int, default=1, help="which sample (1)")
    parser.add_argument("--workers", type=int, default=2, help="trials at a time (2)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds that the tests of a mutation may take"
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="use the last recording of which tests reach which lines",
    )
    parser.add_argument("--only", help="change only the files whose path contains this text")
    parser.add_argument("--tests", nargs="+", default=[*TESTS], help="the tests to choose from")
    return parser


def _files(package: str, only: str | None) -> list[str]:
    directory = ROOT / PACKAGES[package]
    paths = [str(path.relative_to(ROOT)) for path in sorted(directory.rglob("*.py"))]
    return [path for path in paths if only is None or only in path]


def _sample(paths: Sequence[str], reached: Reached, size: int, seed: int) -> list[Trial]:
    """Return *size* mutations of the files, drawn uniformly over all places."""
    lines_of_test = Counter(
        test for lines in reached.values() for tests in lines.values() for test in tests
    )
    places = [
        (path, mutation) for path in paths for mutation in mutations((ROOT / path).read_bytes())
    ]
    if 0 < size < len(places):
        places = random.Random(seed).sample(places, size)
    trials = []
    for path, mutation in places:
        tests = sorted(
            _tests_of(reached.get(path, {}), mutation.line), key=lambda test: lines_of_test[test]
        )
        trials.append(Trial(path, mutation, tests))
    return trials


def _tests_of(lines: Mapping[int, Sequence[str]], line: int) -> set[str]:
    """Return the tests that execute a line; where none does, those that execute any line of the file.

    The second case is code that runs in a separate process, such as the writer of asynchronous saves. A test that
    starts such a process executes other lines of the same file.
    """
    direct = lines.get(line)
    if direct:
        return set(direct)
    return {test for tests in lines.values() for test in tests}


def _unchanged_code(trials: Sequence[Trial], timeout_seconds: float) -> Outcome:
    """Run the tests of a few trials without their mutations.

    Returns "survived" if they pass, which they must in the copy too, else the outcome of the first that do not.
    """
    with_tests = [one for one in trials if one.tests]
    for one in with_tests[:5]:
        tests = one.tests[:NUM_FIRST_TESTS]
        result = trial.run(ROOT, _unchanged(one, tests), timeout_seconds)
        if result.outcome != "survived":
            print(f"unchanged {one.path}: {result}, of {' '.join(tests)}", flush=True)
            return result.outcome
    return "survived"


def _unchanged(one: Trial, tests: Sequence[str]) -> Trial:
    """Return a trial of *tests* that changes nothing."""
    nothing = replace(one.mutation, end=one.mutation.start, replacement="")
    return replace(one, mutation=nothing, tests=tests)


def _checked(
    trials: Sequence[Trial], results: Sequence[Result], timeout_seconds: float
) -> list[Outcome]:
    """Return the outcomes. Those of tests that fail with unchanged code too become "undecided"."""
    passing = sorted({result.failed_test for result in results if result.failed_test is not None})
    failing: set[str] = set()
    while passing:
        again = trial.run(ROOT, _unchanged(trials[0], passing), timeout_seconds)
        if again.outcome == "survived":
            break
        if again.failed_test is None:
            raise RuntimeError(f"the tests that failed cannot be run with unchanged code: {again}")
        failing.add(again.failed_test)
        passing.remove(again.failed_test)
    outcomes: list[Outcome] = []
    for result in results:
        outcomes.append("undecided" if result.failed_test in failing else result.outcome)
    return outcomes


def _try(one: Trial, timeout_seconds: float) -> Result:
    """Run the most specific tests of a trial, then the others if the mutation survived."""
    first = replace(one, tests=one.tests[:NUM_FIRST_TESTS])
    others = replace(one, tests=one.tests[NUM_FIRST_TESTS:])
    result = trial.run(ROOT, first, timeout_seconds)
    if result.outcome != "survived" or not others.tests:
        return result
    result = trial.run(ROOT, others, _UNCHANGED_TIMES_LONGER * timeout_seconds)
    # So many tests can be slow without any of them hanging.
    return Result("survived") if result.outcome == "timed out" else result


def _run_all(trials: Sequence[Trial], workers: int, timeout_seconds: float) -> list[Result]:
    done = 0

    def run(one: Trial) -> Result:
        nonlocal done
        started = time.monotonic()
        result = _try(one, timeout_seconds)
        done += 1
        seconds = time.monotonic() - started
        count = f"[{done}/{len(trials)}]"
        print(
            f"{count} {result.outcome:11} {seconds:5.0f} s  {one.place}  {one.mutation.description}",
            flush=True,
        )
        if result.failed_test is not None:
            print(f"    by {result.failed_test}", flush=True)
        return result

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, trials))


def _report(
    files: Mapping[str, Sequence[str]],
    trials: Sequence[Trial],
    outcomes: Sequence[Outcome],
    seed: int,
) -> None:
    results = []
    reasons = reviewed(NO_DIFFERENCE)
    for package, paths in files.items():
        mine = [
            (one, outcome)
            for one, outcome in zip(trials, outcomes, strict=True)
            if one.path in paths
        ]
        unnoticed = [
            (one, outcome) for one, outcome in mine if outcome not in ("killed", "timed out")
        ]
        timed_out = [one for one, outcome in mine if outcome == "timed out"]
        equal = [one for one, _ in unnoticed if (one.path, one.mutation.description) in reasons]
        alive = [(one, outcome) for one, outcome in unnoticed if one not in equal]
        num_different = len(mine) - len(equal)
        share = len(alive) / num_different if num_different else 0.0
        print(f"\n{package}: {len(alive)} of {num_different} mutations survived ({share:.0%})")
        for one, outcome in alive:
            print(f"  {outcome:11} {one.place}  {one.mutation.description}")
        for one in timed_out:
            print(f"  timed out, counted as noticed: {one.place}  {one.mutation.description}")
        for one in equal:
            reason = reasons[one.path, one.mutation.description]
            print(f"  no difference {one.place}  {one.mutation.description}: {reason}")
        survivors = [
            {"place": one.place, "change": one.mutation.description, "outcome": outcome}
            for one, outcome in alive
        ]
        result = {
            "package": package,
            "seed": seed,
            "mutations": num_different,
            "survivors": survivors,
            "timed_out": [one.place for one in timed_out],
            "no_difference": [one.place for one in equal],
        }
        results.append(result)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def reviewed(path: Path) -> dict[tuple[str, str], str]:
    """Return the reason of each reviewed change that makes no difference, by (file, description of the change)."""
    changes = tomllib.loads(path.read_text())["change"]
    return {(change["path"], change["change"]): change["reason"] for change in changes}


if __name__ == "__main__":
    sys.exit(main())
