"""Is every error message met by a test? Runs the tests, notes where errors are made, and lists the other places.

    python tools/raise_sites.py                        # the whole suite (`make raises`)
    python tools/raise_sites.py tests/unit/config      # some of it
    python tools/raise_sites.py --notes DIRECTORY      # only report on the notes of an earlier run

Exit code 1 where a message is met by no test and is not excused below.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDER = ROOT / "tests" / "support" / "raise_recorder"
NAMES = {"RecipeError", "CheckpointUnusable", "SaveFailed", "Stopped", "Problem", "os_problem"}
EXCUSED = {
    "more ranks on this machine than it has GPUs": "needs a machine with a GPU: tests/gpu",
}
"""Message (its beginning) -> why no test on the CPU can meet it."""


def sites() -> Iterator[tuple[Path, ast.Call]]:
    """Each place of the package and the recipes that makes an error for the user."""
    for room in (ROOT / "automodel_ckpt", ROOT / "recipes"):
        for file in sorted(room.rglob("*.py")):
            if file.name == "errors.py":
                continue  # it passes on what others say
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
                    yield file.resolve(), node


def message(node: ast.Call) -> str:
    what = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "what"), None)
    return ast.unparse(what).strip("\"'f") if what is not None else "?"


def run_tests(arguments: list[str], notes: str) -> int:
    path = os.pathsep.join([str(RECORDER), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "RAISE_SITES": notes,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def unmet(notes: Path) -> list[str]:
    """The places that no note names, as ``file:line: message``."""
    met: dict[str, set[int]] = {}
    for file in notes.iterdir():
        for line in file.read_text().splitlines():
            where, _, number = line.rpartition(":")
            met.setdefault(where, set()).add(int(number))
    found = []
    for path, node in dict.fromkeys(sites()):
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        text = message(node)
        if not met.get(str(path), set()).intersection(lines) and not any(text.startswith(known) for known in EXCUSED):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    return sorted(set(found))


def main() -> int:
    """Run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--notes", help="report on the notes in this directory, run nothing")
    options, arguments = parser.parse_known_args()
    code = 0
    with tempfile.TemporaryDirectory(prefix="raise-sites-") as made:
        notes = options.notes or made
        if not options.notes:
            code = run_tests(arguments, notes)
        missing = unmet(Path(notes))
    print("\n".join(missing))
    print(f"{len(missing)} of {len(set(sites()))} places that make an error are met by no test")
    return code or (1 if missing else 0)


if __name__ == "__main__":
    sys.exit(main())
