"""Write docs/reference from the code: the keys of a recipe, both commands, every error message.

python -m tools.make_reference            # writes docs/reference/*.md
python -m tools.make_reference --check    # exit code 1 where they differ from the code; the tests do this
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from automodel_ckpt.cli.ckpt import parser
from automodel_ckpt.config import help as help_page
from automodel_ckpt.config.bind import default_of
from automodel_ckpt.config.convert import describe, members, section_type
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.config.nodes import node_of
from automodel_ckpt.config.schema import MISSING, RecipeConfig, Target
from tools.error_messages import Message, messages

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
GENERATED = "<!-- Written by tools/make_reference.py from the code: change that, then run it. -->"
CAUSES = REFERENCE / "causes.yaml"
KINDS = {
    "RecipeError": "the command line or the recipe is wrong (exit code 2)",
    "CheckpointUnusable": "a checkpoint cannot be used (exit code 3)",
    "SaveFailed": "a save failed (exit code 4)",
    "Stopped": "stopped by a signal (exit code 75)",
    "os_problem": "the system refused something",
    "Problem": "found while checking several things at once",
}


def pages() -> dict[str, str]:
    """File name -> text."""
    made = {
        "recipe.md": recipe_page(),
        "ckpt-train.md": train_page(),
        "ckpt.md": ckpt_page(),
        "errors.md": errors_page(),
    }
    return {name: f"{GENERATED}\n\n{text}" for name, text in made.items()}


def recipe_page() -> str:
    """Every key of a recipe file."""
    lines = [
        "# Keys of a recipe",
        "",
        "A recipe is a YAML file; each key can be overridden as `--section.key value`. `ckpt-train --help` prints",
        "the same. *A section with `_target_`* names a callable and its arguments.",
        "",
        *_keys_table(RecipeConfig, "", top=True),
    ]
    for name, hint in typing.get_type_hints(RecipeConfig).items():
        section = section_type(members(hint))
        if section is not None:
            plug_in = " It may be a section with `_target_` instead." if Target in members(hint) else ""
            lines += [
                "",
                f"## {name}",
                "",
                (section.__doc__ or "").strip() + plug_in,
                "",
                *_keys_table(section, f"{name}."),
            ]
    return "\n".join(lines) + "\n"


def _keys_table(section: type, prefix: str, *, top: bool = False) -> Iterator[str]:
    hints, docs = typing.get_type_hints(section), help_page.field_docs(section)
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(section):
        kind = members(hints[field.name])
        if top and section_type(kind):
            continue
        default = default_of(field)
        shown = "*required*" if getattr(default, "_target_", default) == MISSING else f"`{node_of(default)}`"
        cells = (f"`{prefix}{field.name}`", describe(kind), shown, docs.get(field.name, ""))
        yield "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def train_page() -> str:
    """``ckpt-train``: forms, flags, modes, exit codes."""
    docs = help_page.field_docs(LaunchFlags)
    hints = typing.get_type_hints(LaunchFlags)
    names = [field.name for field in dataclasses.fields(LaunchFlags)]
    kinds = {name: _cell(describe(members(hints[name]))) for name in names}
    flags = [f"| `--{name.replace('_', '-')}` | {kinds[name]} | {_cell(docs[name])} |" for name in names]
    return "\n".join([
        "# ckpt-train", "", "```text", help_page.USAGE.rstrip(), "```", "", "## Launch flags", "",
        "| flag | type | meaning |", "|---|---|---|", *flags, "", "```text", help_page.MODES.rstrip(), "",
        help_page.EXIT_CODES.rstrip(), "```", "",
    ])  # fmt: skip


def ckpt_page() -> str:
    """``ckpt``: every command with its arguments."""
    lines = ["# ckpt", "", "Looks after checkpoints: on the CPU, without a network, from any directory.", ""]
    (commands,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        lines += [f"## ckpt {name}", "", command.description or "", "", "| argument | meaning |", "|---|---|"]
        lines += [row for action in command._actions if (row := _argument_row(action))] + [""]
    return "\n".join(lines)


def _argument_row(action: argparse.Action) -> str:
    if isinstance(action, argparse._HelpAction):
        return ""
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    takes_value = action.option_strings and action.nargs != 0
    value = (
        f" {action.metavar or '/'.join(map(str, action.choices or ())) or action.dest.upper()}" if takes_value else ""
    )
    return f"| `{name}{value}` | {_cell(action.help or '')} |"


def errors_page() -> str:
    """Every message that is raised on purpose, with its cause and its fix."""
    lines = [
        "# Every error message",
        "",
        "What the commands say when something is wrong, why that is met, and what to do. `…` stands for a name or a",
        "number. A message also shows *where* and the *value* it met. The most frequent ones, and what goes wrong",
        "without a message, are in [troubleshooting](../troubleshooting.md).",
    ]
    causes = read_causes()
    for kind, title in KINDS.items():
        rows = [_error_row(found, causes) for found in messages() if found.kind == kind]
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", "| symptom | cause | fix |", "|---|---|---|"]
        lines += dict.fromkeys(rows)
    return "\n".join(lines) + "\n"


def _error_row(found: Message, causes: Mapping[str, Cause]) -> str:
    cause = causes.get(found.what, Cause("", ""))
    return f"| {_cell(found.what)} | {_cell(cause.text)} | {_cell(cause.fix or found.remedy)} |"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a message is met; *fix* where the code puts the remedy together from what it finds."""

    text: str
    fix: str


def read_causes() -> dict[str, Cause]:
    """{message: cause} of causes.yaml."""
    read = yaml.safe_load(CAUSES.read_text())
    return {
        what: Cause(given["cause"], given["fix"]) if isinstance(given, dict) else Cause(given, "")
        for what, given in read.items()
    }


def cause_faults() -> list[str]:
    """Messages without a cause or without a fix, causes without a message, fixes that the code gives already."""
    causes, remedies = read_causes(), defaultdict[str, list[str]](list)
    for found in messages():
        remedies[found.what].append(found.remedy)
    silent = {what for what, said in remedies.items() if not all(any(map(str.isalpha, text)) for text in said)}
    fixed = {what for what, cause in causes.items() if cause.fix}
    faults = {
        "no cause": remedies.keys() - causes.keys(), "no message": causes.keys() - remedies.keys(),
        "no fix": silent & causes.keys() - fixed, "a fix beside the code's": fixed & remedies.keys() - silent,
    }  # fmt: skip
    return [f"{CAUSES.name}: {why}: {what}" for why, names in faults.items() for what in sorted(names)]


def main() -> int:
    """Write the pages, or compare them."""
    command = argparse.ArgumentParser(description="Write docs/reference from the code.")
    command.add_argument("--check", action="store_true", help="only compare; exit code 1 where they differ")
    check = command.parse_args().check
    old = []
    for name, text in pages().items():
        file = REFERENCE / name
        if not file.exists() or file.read_text() != text:
            old.append(name)
            if not check:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text)
    print(f"{'differ from the code' if check else 'written'}: {', '.join(old) or 'none'}")
    faults = cause_faults()
    print("\n".join(faults), end="\n" * bool(faults))
    return 1 if faults or (check and old) else 0


if __name__ == "__main__":
    sys.exit(main())
