"""The text of ``ckpt-train --help``, generated from the schema: each key with its type, default and documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Collection, Iterator
from shutil import get_terminal_size
from typing import Any

from automodel_ckpt.config.callables.allowlist import ALLOWED, PURPOSES
from automodel_ckpt.config.help.plugin_help import (
    DATA,
    BuilderHelp,
    builders_of,
    other_names_of,
    plain,
)
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import closest, default_node, default_of, field_at, keys_of
from automodel_ckpt.config.tree.convert import describe, members, section_type, target_type
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.rules import MISSING
from automodel_ckpt.errors import RecipeError

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
  --help TOPIC    describe a section, a key or a builder, such as checkpoint, optimizer.lr, dataset, dataset.messages
  --print-config  print the recipe with defaults and overrides, and the origin of each value
  --convert-recipe
                  print a recipe of axolotl, LLaMA-Factory, TRL or NeMo AutoModel as a recipe of this program, with a
                  comment for each changed key
  --dry-run       check recipe, data and model without loading weights; print memory, disk use and the resume point
                  (--device-memory SIZE, such as 80GiB: forecast for a GPU with this memory, also on another machine)
  --show-samples N
                  print the first N samples as they are trained, with the trained tokens marked, and their lengths
  --write-launcher slurm|k8s|skypilot
                  print a batch script for Slurm, a TrainJob of Kubeflow, an indexed Job of Kubernetes or a task of
                  SkyPilot that runs the recipe with the given --nnodes and --nproc-per-node; submits nothing
                  (--output FILE: write it to a new file; --time-limit [DAYS-]HH:MM:SS for slurm, default 08:00:00;
                  --image IMAGE for the others; --volume-claim NAME for Kubernetes, default training)
  --list          list the example recipes
  --copy NAME DIR copy an example recipe, and the JSON schema that it names, to a directory
  --schema        print the JSON schema of a recipe, for editors
  --version       print the version
  --selftest-resume
                  train a few steps without interruption, then with a stop and a resume, and compare the results bit
                  by bit (--selftest-steps N, default 6 or a smaller step_scheduler.max_steps; --selftest-nproc N:
                  number of ranks to resume on; --json)
"""
VERBOSE = """\
  -v, --verbose     Show debug messages too, such as what is saved where; the same as --logging.level debug.
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


def topic_text(topic: str) -> str:
    """Return the text of ``--help TOPIC``.

    A topic is a section (``checkpoint``), a key (``optimizer.lr``), or a builder of a section (``dataset.messages``).
    Raises :class:`RecipeError` for any other topic.
    """
    name, _, rest = topic.partition(".")
    hints = typing.get_type_hints(RecipeConfig)
    if name not in hints:
        raise _unknown_topic(topic, [*hints, *keys_of(RecipeConfig)])
    purpose = PURPOSES.get(name)
    builders = list(builders_of(purpose)) if purpose else []
    for builder in builders:
        if rest in (builder.short_name, builder.name):
            return "\n".join(_builder_lines(builder, name)) + "\n"
    if rest:
        return _key_text(topic, [f"{name}.{builder.short_name}" for builder in builders])
    if section_type(members(hints[name])) is None and purpose is None:
        return _key_text(topic, [])
    return "\n".join(_section_lines(name, hints[name], builders)) + "\n"


def _section_lines(name: str, hint: Any, builders: list[BuilderHelp]) -> Iterator[str]:
    """The lines of a section: its documentation, its keys, and the callables that it may name."""
    section = section_type(members(hint))
    about = field_docs(RecipeConfig).get(name, "")
    if section is not None:
        about = section_doc(section) or about
    yield from _wrapped(f"{name}: {plain(about)}")
    if section is not None:
        yield ""
        yield from _described_rows(section, f"{name}.")
    purpose = PURPOSES.get(name)
    if purpose is None or not ALLOWED[purpose]:
        return
    if purpose == "dataset":
        for paragraph in DATA:
            yield ""
            yield from _wrapped(paragraph)
    yield f"\n{name}._target_ without --trust:\n"
    for builder in builders:
        yield f"  {builder.name}"
        yield from _wrapped(plain(builder.summary), indent=6)
    for other in other_names_of(purpose):
        yield f"  {other}"
    if builders:
        yield f"\nckpt-train --help {name}.{builders[0].short_name} describes the arguments of a builder."


def _builder_lines(builder: BuilderHelp, section: str) -> Iterator[str]:
    """The lines of one builder: how it is named, what it does, and its arguments."""
    yield f"{section}._target_: {builder.name}\n"
    yield from _wrapped(plain(builder.summary))
    for paragraph in plain(builder.text).split("\n\n"):
        if paragraph:
            yield ""
            yield from _wrapped(paragraph)
    yield ""
    for argument in builder.arguments:
        presence = "required" if argument.default is None else f"default {argument.default}"
        yield f"  {section}.{argument.name}  [{argument.kind}; {presence}]"
        yield from _wrapped(argument.text, indent=6)


def _key_text(key: str, others: list[str]) -> str:
    """The documentation of one key. Raises :class:`RecipeError` if it does not exist."""
    found = field_at(RecipeConfig, key)
    if found is None:
        raise _unknown_topic(key, [*keys_of(RecipeConfig), *others])
    section, field = found
    others_here = {each.name for each in dataclasses.fields(section)} - {field.name}
    return (
        "\n".join(_described_rows(section, key.removesuffix(field.name), skip=others_here)) + "\n"
    )


def _described_rows(section: type[Any], prefix: str, skip: Collection[str] = ()) -> Iterator[str]:
    """Each key on a line with its type and default, and its documentation below."""
    for name, text, values in _keys(section, prefix, skip):
        yield f"  {name}  {values}"
        yield from _wrapped(text, indent=6)


def _keys(
    section: type[Any], prefix: str, skip: Collection[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, documentation, type and default) of the keys of a section and its subsections."""
    hints = typing.get_type_hints(section)
    docs = field_docs(section)
    for field in dataclasses.fields(section):
        # In a plug-in, kwargs is the rest of the section and no key.
        is_rest = field.name == "kwargs" and getattr(section, "takes_any", False)
        if field.name in skip or is_rest:
            continue
        name = f"{prefix}{field.name}"
        yield name, docs.get(field.name, ""), _values(field, hints[field.name])
        nested = section_type(members(hints[field.name]))
        if nested is not None:
            yield from _keys(nested, f"{name}.")


def _wrapped(text: str, indent: int = 0) -> Iterator[str]:
    """*text* in lines of at most 100 columns, or of the terminal's width if it is narrower."""
    width = min(get_terminal_size().columns, 100)
    spaces = " " * indent
    # A long name, such as a path, is longer than a line rather than cut.
    yield from textwrap.wrap(
        text,
        width,
        initial_indent=spaces,
        subsequent_indent=spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _unknown_topic(topic: str, known: list[str]) -> RecipeError:
    meant = closest(topic, known)
    hint = f"did you mean --help {meant}?" if meant else "ckpt-train --help lists all keys"
    return RecipeError("there is no help on this topic", where="--help", value=topic, hint=hint)


def help_text() -> str:
    """Return the text of ``--help``."""
    flags = "\n".join(_rows(LaunchFlags, "", dashes=True))
    keys = "\n".join(_sections(RecipeConfig))
    return f"{USAGE}\nlaunch flags:\n{flags}\n{VERBOSE}\n{MODES}\nkeys of a recipe:\n{keys}\n\n{EXIT_CODES}"


def field_docs(section: type[Any]) -> dict[str, str]:
    """Field name -> the text below it in the source as one line, for a dataclass and its bases."""
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
                docs[field.target.id] = _one_line(ast.literal_eval(text.value))
    return docs


def section_doc(section: type[Any]) -> str:
    """Return the docstring of a section, as one line; empty if it has none."""
    return _one_line(section.__doc__ or "")


def _one_line(text: str) -> str:
    # The lines of a string in the source are indented.
    return " ".join(text.split())


def _sections(schema: type[Any]) -> Iterator[str]:
    hints = typing.get_type_hints(schema)
    sections = {name: section_type(members(hint)) for name, hint in hints.items()}
    yield from _rows(schema, "", skip={name for name, section in sections.items() if section})
    for name, section in sections.items():
        if section:
            plug_in = (
                "; or _target_ with keyword arguments" if target_type(members(hints[name])) else ""
            )
            yield f"\n{name}: {section_doc(section).rstrip('.')}{plug_in}"
            yield from _rows(section, f"{name}.")


def _rows(
    section: type[Any], prefix: str, *, dashes: bool = False, skip: Collection[str] = ()
) -> Iterator[str]:
    """One line for each key, with the names in a column."""
    rows = list(_keys(section, prefix, skip))
    if dashes:
        rows = [(f"--{name.replace('_', '-')}", *others) for name, *others in rows]  # type: ignore[misc]
    width = max(len(name) for name, _, _ in rows)
    for name, text, values in rows:
        yield f"  {name:{width}}  {text} {values}"


def _values(field: dataclasses.Field[Any], hint: Any) -> str:
    """The type and the default of a field, such as ``[a number; default 1.0]``."""
    default = default_of(field)
    # The default of a mandatory plug-in is a Target without a name.
    is_required = getattr(default, "_target_", default) == MISSING
    presence = "required" if is_required else f"default {default_node(field, hint)}"
    return f"[{describe(members(hint))}; {presence}]"
