"""The text of ``ckpt-train --help``, generated from the schema: each key with its type, default and documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Collection, Iterator, Sequence
from shutil import get_terminal_size
from typing import Any

from automodel_ckpt.config.callables.allowlist import ALLOWED, PURPOSES
from automodel_ckpt.config.help.plugin_help import (
    DATA,
    PACKAGE,
    Argument,
    BuilderHelp,
    builder_help,
    builders_of,
    other_names_of,
    plain,
)
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import closest, default_node, default_of, field_at, keys_of
from automodel_ckpt.config.tree.convert import describe, members, section_type
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.rules import MISSING
from automodel_ckpt.errors import RecipeError

USAGE = """\
usage: ckpt-train RECIPE.yaml [--dotted.key VALUE ...] [flags]
       ckpt-train --model MODEL --data DATA [--lora] [--dotted.key ...] [flags]

Fine-tunes Hugging Face models with checkpoints. The same command resumes a run.
"""
VALUES = """\
Flags, recipe and overrides can be given in any order. Later overrides take precedence.

--k v  --k=v  --k (true)  --a.b null  --a.list '[1, 2]'  --a.list.0 x  --section '{key: value}'

Values are parsed according to the type of the key, in the file and on the command line. null, none, None and ~ mean
null, unless the key lists none as a value; quoted ('none') they are text. Brackets and {{ }} in a text value are text.
An empty optional section is an error: write {} to use its defaults, or null to disable it.
"""
"""How values are written on the command line."""
_OPTIONS = """
--model MODEL | Without a recipe: a model of the Hub or a directory; writes a recipe to the working directory
--data DATA | Without a recipe: a JSONL file, or what dataset.path takes; the columns of its first row determine the
  builder: messages; prompt and completion; instruction and output; text
--lora | Without a recipe: train LoRA adapters of rank 16 on all linear layers, instead of all weights
--verbose | Show debug messages too, such as what is saved where; the same as -v and --logging.level debug
--dry-run | Check recipe, data and model without loading weights; print memory, disk use and the resume point
--device-memory SIZE | With --dry-run: forecast for a GPU with this memory, such as 80GiB, also on another machine
--show-samples N | Print the first N samples with the trained tokens marked; and their lengths
--print-config | Print the recipe with defaults and overrides, and the origin of each value
--convert-recipe | Print a recipe of axolotl, LLaMA-Factory, TRL or NeMo AutoModel as a recipe of this program,
  with a comment for each changed key
--write-launcher slurm,k8s,skypilot | Print a batch script for Slurm, a TrainJob of Kubeflow, an indexed Job of
  Kubernetes or a task of SkyPilot that runs the recipe with the given --nnodes and --nproc-per-node; submits nothing
--output FILE | With --write-launcher: write it to a new file
--time-limit TIME | With --write-launcher slurm: [DAYS-]HH:MM:SS, default 08:00:00
--image IMAGE | With --write-launcher k8s or skypilot: the image of the container
--volume-claim NAME | With --write-launcher k8s: the claim of the volume, default training
--list | List the example recipes
--copy NAME DIR | Copy an example recipe to a directory; also the JSON schema that it names
--schema | Print the JSON schema of a recipe, for editors
--version | Print the version
--selftest-resume | Train a few steps without interruption, then with a stop and a resume, and compare the results bit
  by bit
--selftest-steps N | With --selftest-resume: number of steps, default 6 or a smaller step_scheduler.max_steps
--selftest-nproc N | With --selftest-resume: number of ranks to resume on
--json | With --selftest-resume: print JSON
--help TOPIC | Describe a section, a key or a builder, such as checkpoint, optimizer.lr, dataset, dataset.messages; all
  describes everything
"""
OPTIONS: Sequence[tuple[str, str]] = tuple(
    (name, text)
    for name, _, text in (
        line.partition(" | ") for line in _OPTIONS.replace("\n  ", " ").strip().splitlines()
    )
)
"""The flags that are neither launch flags nor keys, with their values, and their documentation."""
_NUM_FIRST = 3
"""The options of a run without a recipe, which are the first."""
_USUAL_FLAGS = """
--model --data --lora --nproc-per-node --nnodes --run-name --trust --verbose
--dry-run --show-samples --print-config --list --copy
"""
_USUAL_KEYS = """
recipe model.from_pretrained model.activation_checkpointing peft.r peft.target_modules
dataset._target_ dataset.path dataset.seq_length validation_dataset packed_sequence.size
optimizer.lr lr_scheduler.name lr_scheduler.warmup_ratio
step_scheduler.global_batch_size step_scheduler.local_batch_size step_scheduler.num_epochs step_scheduler.max_steps
step_scheduler.ckpt_every_steps checkpoint.checkpoint_dir checkpoint.keep_last
"""
_MORE = """\
ckpt-train --help TOPIC: a section, key or builder, such as dataset.messages
ckpt-train --help all: everything
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

    A topic is a section (``checkpoint``), a key (``optimizer.lr``), a builder of a section (``dataset.messages``), or
    ``all``.
    Raises :class:`RecipeError` for any other topic.
    """
    if topic == "all":
        return all_text()
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
        yield f"  {section}.{argument.name}  {_of_argument(argument)}"
        yield from _wrapped(argument.text, indent=6)


def _of_argument(argument: Argument) -> str:
    """The type and the default of an argument of a builder, as :func:`_values` of a key."""
    presence = "required" if argument.default is None else f"default {argument.default}"
    return f"[{argument.kind}; {presence}]"


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
        yield from _wrapped(f"{name}  {values}", indent=2)
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
    spaces = " " * indent
    # A long name, such as a path, is longer than a line rather than cut.
    yield from textwrap.wrap(
        text,
        _width(),
        initial_indent=spaces,
        subsequent_indent=spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    return min(get_terminal_size((100, 24)).columns, 100)


def _unknown_topic(topic: str, known: list[str]) -> RecipeError:
    meant = closest(topic, known)
    hint = f"did you mean --help {meant}?" if meant else "ckpt-train --help all lists all keys"
    return RecipeError("there is no help on this topic", "--help", topic, hint)


def help_text() -> str:
    """Return the text of ``--help``, which fits on a screen."""
    usual = [
        (flag, text.partition(";")[0].rstrip("."))
        for flag, text in flags()
        if flag.partition(" ")[0] in _USUAL_FLAGS.split()
    ]
    known = {name: (values, text) for name, text, values in _keys(RecipeConfig, "")}
    for each in builder_help(f"{PACKAGE}data.chat.messages").arguments:
        known[f"dataset.{each.name}"] = _of_argument(each), each.text
    keys = []
    for key in _USUAL_KEYS.split():
        values, text = known.get(key) or known[key.rpartition(".")[0]]
        default = values[1:-1].rpartition("; ")[2].removeprefix("default ")
        brief = re.split("[;:.] ", text)[0].rstrip(".")
        keys.append((key, f"{default:12}  {brief[0].upper()}{brief[1:]}"))
    keys_title = "\nkeys that people set, with their defaults:"
    parts = [USAGE, "flags:", *_in_columns(usual), keys_title, *_in_columns(keys), f"\n{_MORE}"]
    return "\n".join(parts)


def all_text() -> str:
    """Return the text of ``--help all``."""
    lines = [USAGE]
    for paragraph in VALUES.split("\n\n"):
        lines += [*_wrapped(paragraph), ""]
    lines.append("flags:")
    for flag, text in flags():
        lines += [f"  {flag}", *_wrapped(text, indent=6)]
    lines.append("\nkeys of a recipe:")
    topics = [topic_text(field.name) for field in dataclasses.fields(RecipeConfig)]
    return "\n".join([*lines, *topics, EXIT_CODES])


def flags() -> Iterator[tuple[str, str]]:
    """Each flag with the name of its value, and its documentation."""
    yield from OPTIONS[:_NUM_FIRST]
    for name, text in field_docs(LaunchFlags).items():
        yield f"--{name.replace('_', '-')}", text
    yield from OPTIONS[_NUM_FIRST:]


def _in_columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """One line for each name with its text, which is cut at the width of the terminal."""
    indent = max(len(name) for name, _ in rows) + 4
    for name, text in rows:
        yield f"  {name:{indent - 4}}  {_cut(text, max(_width() - indent, 20))}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rpartition(' ')[0]} ..."


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


def _values(field: dataclasses.Field[Any], hint: Any) -> str:
    """The type and the default of a field, such as ``[a number; default 1.0]``."""
    default = default_of(field)
    # The default of a mandatory plug-in is a Target without a name.
    is_required = getattr(default, "_target_", default) == MISSING
    presence = "required" if is_required else f"default {default_node(field, hint)}"
    return f"[{describe(members(hint))}; {presence}]"
