"""The text of ``ckpt-train --help``, generated from the schema: each key with its type, default and documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Collection, Iterator
from typing import Any

from automodel_ckpt.config.bind import default_node, default_of
from automodel_ckpt.config.convert import describe, members, section_type, target_type
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.config.schema import MISSING, RecipeConfig

USAGE = """\
usage: ckpt-train [launch flags] RECIPE.yaml [--dotted.key VALUE | --dotted.key=VALUE ...]

Fine-tunes a Hugging Face model according to a recipe file and saves checkpoints. The same command resumes the run.
Flags, recipe and overrides can be given in any order. Later overrides take precedence.

  --k v  --k=v  --k (true)  --a.b null  --a.list '[1, 2]'  --a.list.0 x  --section '{key: value}'

Values are parsed according to the type of the key, in the file and on the command line. null, none, None and ~ mean
null, unless the key lists none as a value; quoted ('none') they are text. Brackets and {{ }} in a text value are text.
An empty optional section is an error: write {} to use its defaults, or null to disable it.
"""
MODES = """\
instead of training:
  --print-config  print the recipe with defaults and overrides, and the origin of each value
  --convert-recipe
                  print a recipe of NeMo AutoModel as a recipe of this program, with a comment for each changed key
  --dry-run       check recipe, data and model without loading weights; print memory, disk use and the resume point
  --list          list the example recipes
  --copy NAME DIR copy an example recipe to a directory
  --version       print the version
  --selftest-resume
                  train a few steps without interruption, then with a stop and a resume, and compare the results bit
                  by bit (--selftest-steps N, default 6; --selftest-nproc N: number of ranks to resume on; --json)
"""
EXIT_CODES = """\
exit codes:
  0   success, or the run was already complete
  1   internal error, or user code failed during training
  2   invalid command line or recipe, or user code failed before training
  3   a checkpoint cannot be used
  4   a save failed
  75  stopped by a signal after saving; run the same command again to resume
"""


def help_text() -> str:
    """Return the text of ``--help``."""
    flags = "\n".join(_rows(LaunchFlags, "", dashes=True))
    keys = "\n".join(_sections(RecipeConfig))
    return f"{USAGE}\nlaunch flags:\n{flags}\n\n{MODES}\nkeys of a recipe:\n{keys}\n\n{EXIT_CODES}"


def field_docs(section: type[Any]) -> dict[str, str]:
    """Field name -> the line of text below it in the source, for a dataclass and its bases."""
    docs: dict[str, str] = {}
    for cls in reversed([base for base in section.__mro__ if dataclasses.is_dataclass(base)]):
        # Python discards the string below a field, so it can only be read from the source.
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        # A field's text is the string expression that follows its assignment.
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
                continue
            if isinstance(field.target, ast.Name):
                docs[field.target.id] = ast.literal_eval(text.value)
    return docs


def _sections(schema: type[Any]) -> Iterator[str]:
    hints = typing.get_type_hints(schema)
    sections = {name: section_type(members(hint)) for name, hint in hints.items()}
    yield from _rows(schema, "", skip={name for name, section in sections.items() if section})
    for name, section in sections.items():
        if section:
            plug_in = (
                "; or _target_ with keyword arguments" if target_type(members(hints[name])) else ""
            )
            yield f"\n{name}: {(section.__doc__ or '').rstrip('.')}{plug_in}"
            yield from _rows(section, f"{name}.")


def _rows(
    section: type[Any], prefix: str, *, dashes: bool = False, skip: Collection[str] = ()
) -> Iterator[str]:
    hints = typing.get_type_hints(section)
    docs = field_docs(section)
    fields = [field for field in dataclasses.fields(section) if field.name not in skip]
    names = [prefix + field.name for field in fields]
    if dashes:
        names = ["--" + name.replace("_", "-") for name in names]
    width = max(len(name) for name in names)
    for name, field in zip(names, fields, strict=True):
        hint = hints[field.name]
        default = default_of(field)
        # A mandatory plug-in has a Target as its default, whose name is missing.
        is_required = getattr(default, "_target_", default) == MISSING
        presence = "required" if is_required else f"default {default_node(field, hint)}"
        text = docs.get(field.name, "")
        kind = describe(members(hint))
        yield f"  {name:{width}}  {text} [{kind}; {presence}]"
