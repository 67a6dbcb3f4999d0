"""Write docs/reference and docs/features.md from the code: python -m tools.make_reference"""

import argparse
import dataclasses
import re
import typing
from collections import Counter
from collections.abc import Iterable, Iterator

from automodel_ckpt.cli.ckpt import parser
from automodel_ckpt.config.help import listing as help_page
from automodel_ckpt.config.help.plugin_help import (
    DATA,
    Argument,
    BuilderHelp,
    builders_of,
    markdown,
    other_names_of,
)
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import default_node, default_of
from automodel_ckpt.config.tree.convert import describe, members, section_type, target_type
from automodel_ckpt.config.tree.rules import MISSING
from automodel_ckpt.data.collate import RowOptions
from tools import features
from tools.support import ROOT, parser_of, table

REFERENCE = ROOT / "docs" / "reference"
EXAMPLES = "automodel_ckpt.examples.data."
RAISES = re.compile(r"\s*Raises\s+:class:[^\n]*(\n[^\n]*)*\Z")
"""What a docstring says about exceptions at its end, which a recipe's author does not need."""
SHARED = 2
"""Builders with the same argument, from which the page describes it once."""
KEY_HEADER = ("key", "type", "default", "meaning")
GENERATED = "<!-- Written by tools/make_reference.py from the code: change that, then run it. -->"


def pages() -> dict[str, str]:
    made = {
        "recipe.md": recipe_page(),
        "ckpt-train.md": train_page(),
        "ckpt.md": ckpt_page(),
        "data.md": data_page(),
        "names.md": names_page(),
    }
    return {name: f"{GENERATED}\n\n{text}" for name, text in made.items()}


def recipe_page() -> str:
    page = f"""# Keys of a recipe

A recipe is a YAML file; each key can be overridden as `--section.key value`. `ckpt-train --help all` prints
the same. *A section with `_target_`* names a callable and its arguments.

{table(KEY_HEADER, _key_rows(RecipeConfig, "", top=True))}
"""
    for name, hint in typing.get_type_hints(RecipeConfig).items():
        section = section_type(members(hint))
        if section is not None:
            text = help_page.section_doc(section)
            if target_type(members(hint)):
                text += " It may be a section with `_target_` instead."
            rows = table(KEY_HEADER, _key_rows(section, f"{name}."))
            page += f"\n## {name}\n\n{text}\n\n{rows}\n"
    return page


def _key_rows(section: type, prefix: str, *, top: bool = False) -> Iterator[tuple[str, ...]]:
    """The rows of the keys of a section, followed by the rows of the sections in it."""
    hints, docs = typing.get_type_hints(section), help_page.field_docs(section)
    for field in dataclasses.fields(section):
        kind = members(hints[field.name])
        if top and section_type(kind):
            continue
        default = default_of(field)
        is_required = getattr(default, "_target_", default) == MISSING
        shown = "*required*" if is_required else f"`{default_node(field, hints[field.name])}`"
        cells = (f"`{prefix}{field.name}`", describe(kind), shown, docs.get(field.name, ""))
        yield tuple(map(_cell, cells))
        nested = section_type(kind)
        if nested is not None:
            yield from _key_rows(nested, f"{prefix}{field.name}.")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def train_page() -> str:
    """``ckpt-train``: forms, flags, modes, exit codes."""
    flags = [(f"`{flag}`", _cell(text)) for flag, text in help_page.flags()]
    usage = f"```text\n{help_page.USAGE}\n{help_page.VALUES}```"
    codes = f"```text\n{help_page.EXIT_CODES.rstrip()}\n```"
    return f"# ckpt-train\n\n{usage}\n\n{table(('flag', 'meaning'), flags)}\n\n{codes}\n"


def ckpt_page() -> str:
    """``ckpt``: every command with its arguments."""
    (commands,) = [
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    printing, sections = [], []
    for name, command in commands.choices.items():
        rows = []
        for action in command._actions:
            if action.option_strings == ["--json"] and action.help == "print JSON":
                printing.append(f"`{name}`")
            elif not isinstance(action, argparse._HelpAction):
                rows.append(_argument_row(action))
        arguments = table(("argument", "meaning"), rows)
        sections.append(f"\n## ckpt {name}\n\n{command.description or ''}\n\n{arguments}\n")
    head = "# ckpt\n\nLooks after checkpoints: on the CPU, without a network, from any directory.\n"
    head += f"With `--json`, these commands print JSON: {', '.join(printing)}.\n"
    return head + "".join(sections)


def data_page() -> str:
    builders = list(builders_of("dataset"))
    own_builders = [each for each in builders if not each.name.startswith(EXAMPLES)]
    shared = _shared_arguments(own_builders)
    rows = [each for each in shared if each in typing.get_type_hints(RowOptions)]
    paragraphs = "\n\n".join(f"* {paragraph}" for paragraph in DATA)
    sections = "\n\n".join("\n".join(_builder_section(each, shared, rows)) for each in own_builders)
    samples = [
        (f"`{each.name.removeprefix(EXAMPLES)}`", _cell(markdown(each.summary)))
        for each in builders
        if each not in own_builders
    ]
    return f"""# Data builders

For `dataset`, `validation_dataset` and the sets of `validation_datasets`. `ckpt-train --help dataset.NAME`
prints the same. [Your data](../guides/your-data.md) shows them with examples of rows.

{paragraphs}

## Shared arguments

Each builder lists the shared arguments that it has, with its default where it is another one.

{_argument_table(each for each in shared.values() if each.name not in rows)}

### Row options

Which rows a builder reads, and when.

{_argument_table(shared[name] for name in rows)}

{sections}

## Data of the examples

Modules of `{EXAMPLES[:-1]}`; `ckpt-train --help dataset.NAME` prints their arguments.

{table(("builder", "samples"), samples)}

## Other builders

Without `--trust`: {", ".join(f"`{name}`" for name in other_names_of("dataset"))}.
"""


def _shared_arguments(builders: list[BuilderHelp]) -> dict[str, Argument]:
    """The described arguments that several builders have, with the most frequent default; by name."""
    counts = Counter(each for builder in builders for each in builder.arguments if each.text)
    most_frequent: dict[str, Argument] = {}
    for argument, _ in counts.most_common():
        most_frequent.setdefault(argument.name, argument)
    users = Counter(each.name for each in counts.elements())
    return {name: each for name, each in most_frequent.items() if users[name] >= SHARED}


def _builder_section(
    builder: BuilderHelp, shared: dict[str, Argument], row_options: list[str]
) -> Iterator[str]:
    yield from (f"## {builder.short_name}", "", f"`_target_: {builder.name}`")
    for paragraph in (builder.summary, *builder.text.split("\n\n")):
        text = RAISES.sub("", paragraph).strip()
        if text:
            yield from ("", markdown(text))
    own, described, also = [], [], []
    for each in builder.arguments:
        usual = shared.get(each.name)
        default = f" ({each.kind}, default `{each.default}`)"
        if usual == each:
            also.append(f"`{each.name}`")
        elif usual and (usual.text, usual.kind) == (each.text, each.kind):
            also.append(f"`{each.name}` (`{each.default}`)")
        elif each.text:
            own.append(each)
        else:
            described.append(f"`{each.name}`{default if each.default else ''}")
    if own:
        yield from ("", _argument_table(own))
    if described:
        yield from ("", f"Described above: {', '.join(described)}.")
    rows = [f"`{name}`" for name in row_options]
    if set(rows) <= set(also):
        also = [*(name for name in also if name not in rows), "the [row options](#row-options)"]
    if also:
        yield from ("", f"Shared arguments: {', '.join(also)}.")


def _argument_table(arguments: Iterable[Argument]) -> str:
    rows = []
    for each in arguments:
        default = "*required*" if each.default is None else f"`{each.default}`"
        rows.append(map(_cell, (f"`{each.name}`", each.kind, default, each.text)))
    return table(("argument", *KEY_HEADER[1:]), map(list, rows))


def names_page() -> str:
    names: dict[tuple[str, str], list[str]] = {}
    for name, counterpart in sorted(OTHER_NAMES.items()):
        keys = ", ".join(f"`{key}`" for key in counterpart.keys)
        names.setdefault((keys, counterpart.note), []).append(f"`{name}`")
    rows = [
        (keys, ", ".join(elsewhere), _cell(note))
        for (keys, note), elsewhere in sorted(names.items())
    ]
    return f"""# Names of settings in other programs

What transformers' TrainingArguments, TRL, axolotl, LLaMA-Factory and torchtune call a setting,
and the key of a recipe for it. A recipe with one of these names is rejected with the same hint.

{table(("key here", "names elsewhere", "note"), rows)}
"""


def _argument_row(action: argparse.Action) -> tuple[str, str]:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    takes_value = action.option_strings and action.nargs != 0
    if takes_value:
        choices = "/".join(map(str, action.choices or ()))
        name += f" {action.metavar or choices or action.dest.upper()}"
    return f"`{name}`", _cell(action.help or "")


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
    features.PAGE.write_text(features.page())
