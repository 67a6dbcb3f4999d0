"""Is every error message met by a test? Runs the tests, notes where errors are made, and lists the other places.

    python tools/raise_sites.py                                # the whole suite (`make raises`)
    python tools/raise_sites.py tests/unit/config              # some of it
    python tools/raise_sites.py --notes DIRECTORY tests/unit   # what this run meets, and earlier ones with these notes
    python tools/raise_sites.py --notes DIRECTORY --report     # run nothing

A place is one that makes an error of ``errors.py``; one that hands the words to such a place; and one that raises
anything else, since in the end the user reads it in another's words. Exit code 1 where a place is met by no test: none
is excused.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDER = ROOT / "tests" / "support" / "raise_recorder"
MADE = {"AutomodelError", "RecipeError", "CheckpointUnusable", "SaveFailed", "ExportFailed", "Stopped", "Problem"}
NAMES = MADE | {"os_problem", "as_failure"}
NOT_READ = {
    "NotImplementedError", "AttributeError", "IndexError", "StopIteration", "SystemExit",
    "Cancelled", "StoppedWaiting", "StoppedMeeting", "_Stopped", "RunFailed", "NotInParts",
}  # fmt: skip
"""Raised for the interpreter's or a subclass's sake, or to go another way: never to be read as an error."""


@dataclass(frozen=True)
class Site:
    """A place of the package that makes an error; ``key`` stays the same when other lines of its file change."""

    file: str
    line: int
    last_line: int
    function: str
    source: str
    message: str
    number: int
    """Of those in its function that read the same, counted from 0."""

    @property
    def key(self) -> str:
        return "\t".join((self.file, self.function, self.source, str(self.number)))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def sites() -> Iterator[Site]:
    """Each place of the package and the recipes."""
    for room in (ROOT / "automodel_ckpt", ROOT / "recipes"):
        for file in sorted(room.rglob("*.py")):
            if file.name != "errors.py" and "examples" not in file.parts:  # errors.py passes on what others say
                yield from Finder(file).sites()


class Finder(ast.NodeVisitor):
    """The places of one file."""

    def __init__(self, file: Path) -> None:
        self._tree = ast.parse(file.read_text())
        self._file = str(file.relative_to(ROOT))
        self._helpers = {
            function.name
            for function in ast.walk(self._tree)
            if isinstance(function, ast.FunctionDef)
            for call in ast.walk(function)
            if name_of(call) in NAMES and is_argument(what(call), function)
        }
        raised = {name_of(node.exc) for node in ast.walk(self._tree) if isinstance(node, ast.Raise) and node.exc}
        self._makers = {
            node.name for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef) and node.name in raised
        }
        self._functions: list[str] = []
        self._found: dict[int, Site] = {}

    def sites(self) -> list[Site]:
        self.visit(self._tree)
        return list(self._found.values())

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        name = node.exc.id if isinstance(node.exc, ast.Name) else name_of(node.exc) if node.exc else ""
        makes_one = isinstance(node.exc, ast.Call) or name[:1].isupper()
        if node.exc and makes_one and name not in NOT_READ | {"all_of"}:
            self._add(node.exc)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """A function whose outcome is raised makes the error; its caller does not know which."""
        makes_one = bool(self._functions) and self._functions[-1] in self._makers
        if makes_one and isinstance(node.value, ast.Call) and name_of(node.value).lstrip("_")[:1].isupper():
            self._add(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if name_of(node) in NAMES | self._helpers:
            self._add(node)
        self.generic_visit(node)

    def _add(self, node: ast.expr) -> None:
        text = what(node)
        message = ast.unparse(text).strip("\"'f") if is_text(text) and text else ast.unparse(node)[:100]
        where = self._functions[-1] if self._functions else ""
        last, source = node.end_lineno or node.lineno, ast.unparse(node)
        self._found.pop(node.lineno, None)
        same = [site for site in self._found.values() if (site.function, site.source) == (where, source)]
        self._found[node.lineno] = Site(self._file, node.lineno, last, where, source, message, len(same))


def name_of(node: ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def what(node: ast.AST) -> ast.expr | None:
    """The argument that says what is wrong."""
    if not isinstance(node, ast.Call):
        return None
    given = node.args[1] if name_of(node) in ("os_problem", "as_failure") and len(node.args) > 1 else None
    first = node.args[0] if node.args else None
    return given or next((k.value for k in node.keywords if k.arg == "what"), first)


def is_argument(node: ast.expr | None, function: ast.FunctionDef) -> bool:
    arguments = (*function.args.args, *function.args.kwonlyargs)
    return isinstance(node, ast.Name) and node.id in {argument.arg for argument in arguments}


def is_text(node: ast.expr | None) -> bool:
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    if isinstance(node, ast.IfExp):
        return is_text(node.body) and is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


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


def met_lines(notes: Path) -> dict[str, set[int]]:
    """{file: lines} of all notes of a run."""
    lines: dict[str, set[int]] = {}
    for file in notes.iterdir():
        for line in file.read_text().splitlines():
            where, _, number = line.rpartition(":")
            lines.setdefault(where, set()).add(int(number))
    return lines


def met_keys(lines: Mapping[str, set[int]]) -> Iterator[str]:
    for site in sites():
        if lines.get(str(ROOT / site.file), set()).intersection(range(site.line, site.last_line + 1)):
            yield site.key


def run_and_keep(arguments: list[str], known: Path) -> int:
    """Run the tests; the file *known* grows by what they met."""
    with tempfile.TemporaryDirectory(prefix="raise-sites-") as notes:
        code = run_tests(arguments, notes)
        keys = set(met_keys(met_lines(Path(notes))))
    with known.open("a") as file:
        file.writelines(f"{key!r}\n" for key in sorted(keys))
    return code


def main() -> int:
    """Run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--notes", help="keep what is met in this directory, and count what earlier runs kept there")
    parser.add_argument("--report", action="store_true", help="report on the notes, run nothing")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="raise-sites-") as made:
        known = Path(options.notes or made) / "met"
        known.parent.mkdir(exist_ok=True)
        code = 0 if options.report else run_and_keep(arguments, known)
        met = set(map(ast.literal_eval, known.read_text().splitlines())) if known.exists() else set()
    everything = list(sites())
    missing = [str(site) for site in everything if site.key not in met]
    print("\n".join(missing))
    print(f"{len(missing)} of {len(everything)} places that make an error are met by no test")
    return code or (1 if missing else 0)


if __name__ == "__main__":
    sys.exit(main())
