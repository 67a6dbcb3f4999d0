"""The table that `make interop` writes keeps the rows of programs that were not run."""

from __future__ import annotations

from pathlib import Path

from tools.interop.page import replace_rows, section_of
from tools.interop.program import Check


def test_a_run_of_one_program_replaces_its_rows_and_keeps_all_others(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text("# Clients\n\n| vLLM | 1 |\n")
    first = [Check("weights read here", "0 tensors differ", True), Check("losses", "0|1", False)]
    replace_rows(page, "DeepSpeed", "deepspeed 0.19", "2026-11-22", first)
    replace_rows(page, "Axolotl", "axolotl 1", "2026-11-22", [Check("weights", "equal", True)])
    replace_rows(page, "DeepSpeed", "deepspeed 0.20", "2026-11-23", first[1:])
    text = page.read_text()
    assert text.startswith("# Clients\n\n| vLLM | 1 |\n\n## ")
    assert [line for line in section_of(text).splitlines() if line.startswith("| ")][1:] == [
        "| Axolotl | axolotl 1 | 2026-11-22 | weights | equal | yes |",
        "| DeepSpeed | deepspeed 0.20 | 2026-11-23 | losses | 0/1 | **no** |",
    ]
