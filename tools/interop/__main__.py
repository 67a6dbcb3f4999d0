"""``python -m tools.interop [NAME ...]``: run the checks of the named programs, or of all.

The rows of these programs in docs/clients.md are replaced; other rows stay. The exit code is 1 if a check fails.
"""

import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module

from tools.interop.environments import asked, python_of
from tools.interop.program import Check, Workplace
from tools.interop.table import PROGRAMS, Program
from tools.support import ROOT

HOME = ROOT / ".peers"
PAGE = ROOT / "docs" / "clients.md"
_COLUMNS = "| program | versions | date | compared | passed |\n|---|---|---|---|---|\n"
_VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"


def main() -> int:
    names = sys.argv[1:] or list(PROGRAMS)
    unknown = sorted(set(names) - set(PROGRAMS))
    if unknown:
        sys.exit(f"unknown program: {', '.join(unknown)}; known: {', '.join(PROGRAMS)}")
    num_failed = 0
    for name in names:
        print(f"{PROGRAMS[name].name}:", flush=True)
        versions, checks = _run(name, PROGRAMS[name])
        replace_row(PROGRAMS[name], versions, checks)
        num_failed += sum(not check.good for check in checks)
    print(f"{num_failed} checks failed" if num_failed else "all checks passed")
    return 1 if num_failed else 0


def _run(name: str, program: Program) -> tuple[str, list[Check]]:
    work, log = HOME / "work" / name, HOME / f"{name}.log"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    log.write_text("")
    checks: list[Check] = []
    versions = ""

    def note(check: Check) -> None:
        checks.append(check)
        print(f"  {'ok  ' if check.good else 'FAIL'} {check.what}: {check.found}", flush=True)

    try:
        python = python_of(program.steps, program.without_gpu, HOME / name)
        numbers = asked(python, _VERSIONS, *program.packages)
        versions = ", ".join(map(" ".join, zip(program.packages, numbers, strict=True)))
        place = Workplace(python, work, log, dict(program.variables))
        for check in import_module(f"tools.interop.{name}").checks(place):
            note(check)
    # A check that cannot be made counts as failed, whatever its reason, and the next program has its turn.
    except Exception as error:
        with open(log, "a") as output:
            traceback.print_exc(file=output)
        note(Check("its checks end", f"{type(error).__name__} (see {log})", False))
    return versions, checks


def replace_row(program: Program, versions: str, checks: Sequence[Check]) -> None:
    """Replace the row of *program* in docs/clients.md; other rows stay."""
    text, _, table = PAGE.read_text().partition(_COLUMNS)
    rows = [line for line in table.splitlines() if not line.startswith(f"| {program.name} |")]
    passed = f"{sum(check.good for check in checks)} of {len(checks)}"
    passed += "".join(f"; **failed: {one.what}: {one.found}**" for one in checks if not one.good)
    cells = [program.name, versions, time.strftime("%Y-%m-%d"), program.compared, passed]
    rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    rows.sort(key=lambda row: row.split(" | ")[0].lower())
    PAGE.write_text(text + _COLUMNS + "\n".join(rows) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
