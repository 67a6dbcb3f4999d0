"""``python -m tools.interop [NAME ...]``: run the checks of the named programs, or of all.

The rows of these programs in docs/clients.md are replaced; other rows stay. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

import tools.interop
from tools.interop.environments import python_of
from tools.interop.page import replace_row
from tools.interop.program import Check, Program, Workplace

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".peers"
_NOT_PROGRAMS = ("__main__", "environments", "gguf_models", "losses", "page", "program", "scripts")


def main() -> int:
    """Run the checks and write the table. Returns the exit code."""
    known = program_names()
    names = sys.argv[1:] or known
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"unknown program: {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    HOME.mkdir(exist_ok=True)
    num_failed = 0
    for name in names:
        program: Program = importlib.import_module(f"tools.interop.{name}").PROGRAM
        print(f"{program.name}:", flush=True)
        version, checks = _run(name, program)
        replace_row(program.name, version, time.strftime("%Y-%m-%d"), checks)
        num_failed += sum(not check.good for check in checks)
    print(f"{num_failed} checks failed" if num_failed else "all checks passed")
    return 1 if num_failed else 0


def program_names() -> list[str]:
    """Return the names of the modules of this package that define a program, sorted."""
    names: list[str] = []
    for module in pkgutil.iter_modules(tools.interop.__path__):
        if module.name not in _NOT_PROGRAMS:
            names.append(module.name)
    return sorted(names)


def _run(name: str, program: Program) -> tuple[str, list[Check]]:
    """Return the versions of the program's packages, and its checks."""
    work = HOME / "work" / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    log = HOME / f"{name}.log"
    log.write_text("")
    checks: list[Check] = []
    version = ""
    try:
        python = python_of(program.environment, HOME)
        version = _versions(python, program.packages)
        for check in program.checks(Workplace(python, work, log, dict(program.variables))):
            print(f"  {'ok  ' if check.good else 'FAIL'} {check.what}: {check.found}", flush=True)
            checks.append(check)
    # A check that cannot be made counts as failed, whatever its reason, and the next program has its turn.
    except Exception as error:
        with open(log, "a") as output:
            traceback.print_exc(file=output)
        check = Check("its checks end", f"{type(error).__name__} (see {log})", False)
        print(f"  FAIL {check.what}: {check.found}", flush=True)
        checks.append(check)
    return version, checks


def _versions(python: Path, packages: tuple[str, ...]) -> str:
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    done = subprocess.run(
        [python, "-c", code, *packages], check=True, capture_output=True, text=True
    )
    pairs = zip(packages, done.stdout.split(), strict=True)
    return ", ".join(f"{package} {version}" for package, version in pairs)


if __name__ == "__main__":
    raise SystemExit(main())
