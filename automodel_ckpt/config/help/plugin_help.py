"""Documentation of the callables that ``_target_`` may name, read from their source without importing them.

``ckpt-train --help dataset.messages`` prints it, and ``tools/make_reference.py`` writes docs/reference/data.md from it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.sample_kinds import recipes_of_builder
from automodel_ckpt.config.tree.convert import describe, members

PACKAGE = "automodel_ckpt."
SUPPLIED = ("tokenizer", "processor", "params", "reduction", "model", "labels")
"""Parameters that the recipe's class adds; they are no keys of a recipe."""
_ROW_DEFAULTS = "automodel_ckpt.data.collate.ROW_DEFAULTS"
_NAMES: dict[str, Any] = {
    "Any": Any,
    "Literal": Literal,
    **{each.__name__: each for each in (bool, dict, float, int, list, str, tuple)},
}
"""The names that an annotation may consist of. An annotation with another name accepts any value."""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


@dataclass(frozen=True)
class Parameter:
    """A parameter of a builder that can be passed as a keyword."""

    annotation: Any
    default: ast.expr | None


@functools.cache
def signature(name: str) -> Mapping[str, Parameter] | None:
    """Read the parameters of a function or class of this package from its source.

    Returns None when that is impossible.
    """
    found = definition(name)
    if isinstance(found, ast.ClassDef):
        methods = [each for each in found.body if isinstance(each, ast.FunctionDef)]
        found = next((each for each in methods if each.name == "__init__"), None)
    # A decorator may change the signature.
    if not isinstance(found, ast.FunctionDef) or found.decorator_list or found.args.posonlyargs:
        return None
    options = _options(found.args.kwarg, name.rpartition(".")[0])
    if options is None:
        return None
    arguments = found.args
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    given = [
        *zip(arguments.args, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    own = {each.arg: Parameter(_type(each), default) for each, default in given}
    own.pop("self", None)
    return own | options


def definition(name: str) -> Definition | None:
    """Find the function, class or constant with a dotted name of this package in its source.

    Follows an import from another module of this package. Returns None when it is not found.
    """
    module, _, wanted = name.rpartition(".")
    parts = module.split(".")
    if not name.startswith(PACKAGE) or not all(part.isidentifier() for part in parts):
        return None
    file = Path(__file__).parents[2].joinpath(*parts[1:]).with_suffix(".py")
    for statement in _statements(file) if file.is_file() else ():
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == wanted:
            return statement
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == wanted:
            return statement
        imported = statement.names if isinstance(statement, ast.ImportFrom) else []
        if isinstance(statement, ast.ImportFrom) and wanted in [each.name for each in imported]:
            return definition(f"{statement.module}.{wanted}")
    return None


@functools.cache
def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def _options(argument: ast.arg | None, module: str) -> dict[str, Parameter] | None:
    """The fields of ``**options: Unpack[TYPED_DICT]`` in *module*; None for other keywords."""
    if argument is None:
        return {}
    annotation = argument.annotation
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Unpack":
        return None
    found, rows = definition(f"{module}.{ast.unparse(annotation.slice)}"), definition(_ROW_DEFAULTS)
    assert isinstance(found, ast.ClassDef) and isinstance(rows, ast.Assign)
    assert isinstance(rows.value, ast.Call)
    defaults = {each.arg: each.value for each in rows.value.keywords}
    fields = [each for each in found.body if isinstance(each, ast.AnnAssign)]
    names = [ast.unparse(field.target) for field in fields]
    return {
        name: Parameter(_type(field), defaults[name])
        for name, field in zip(names, fields, strict=True)
    }


def _type(argument: ast.arg | ast.AnnAssign) -> Any:
    if argument.annotation is None:
        return Any
    names = {node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)}
    if not names <= _NAMES.keys():
        return Any
    # This is safe: the source is installed code, and the annotation contains only the names above.
    return eval(ast.unparse(argument.annotation), {"__builtins__": {}}, _NAMES)


DATA = (
    "A data section names a builder in _target_, with the builder's arguments next to it.",
    "A recipe trains on the samples of certain builders. Each builder states its recipes.",
    "Only tokens with labels are trained on. The end token of an answer or a document is added, and has a label.",
    "Relative paths start from the working directory, and images in a data file from the directory of that file.",
    "A sample that is longer than seq_length is an error with its location, unless truncation is set.",
)
"""What all data sections have in common, one paragraph each."""

_ARGUMENTS = """\
path | a data file, a directory, a pattern, a list of these, or the name of a data set on the Hub
name | configuration of a data set on the Hub
split | split of a data set on the Hub; slices such as train[:90%] are possible
revision | branch, tag or commit of a data set on the Hub
seq_length | maximum tokens of a sample; null: no limit
truncation | samples of more than seq_length tokens: error; right: truncate them, or skip them if no label remains
truncation of messages | samples of more than seq_length tokens: error; right: truncate them, or skip them if no
  label remains; skip; history: remove the oldest exchanges, each from a message of the user to the next, until the
  rest fits, and skip the conversation if the last one does not fit
truncation of pairs | answers of more than seq_length tokens with their prompt: error; right: truncate them, or skip
  the pair if no label remains; skip the pair
truncation of preferences | answers of more than seq_length tokens with their prompt: error; right: truncate them,
  or skip the pair if no label remains; skip the pair
seq_length of random_tokens | tokens of a sample, or their maximum with mean_length
seq_length of megatron | tokens of a sample
seq_length of nanogpt | tokens of a sample
seq_length of language_modeling | tokens of a block
seq_length of docstring_pairs | maximum tokens of a sample
seq_length of pairs | maximum tokens of a prompt with an answer; null: no limit
seq_length of preferences | maximum tokens of a prompt with an answer
seq_length of retrieval | maximum tokens of a text; null: no limit
query_length | maximum tokens of a query; null: seq_length
truncation of retrieval | texts of more than seq_length tokens: error; right: truncate them
num_negatives | documents of each query that do not answer it
instructions | write the instructions of the corpus before queries and documents
seed of retrieval | seed of the rows of a source with num_samples
system_field | field of a system message, for prompts that are rendered as messages; null: there is none
max_samples of split_pairs | use only the first pairs
max_samples of judged_docstrings | use only the first pairs
as_chat | render texts by the chat template: true, false, or auto (if the tokenizer has one)
label_field | field that is true or 1 for desirable completions, and false or 0 for others
chosen_field | field of the preferred answer, or a template of fields
rejected_field | field of the rejected answer, or a template of fields
margin_field | field of a number, if the data has it: how much better the preferred answer is
prompt_field | field of the prompt, or a template of fields
completion_field | field of the completion, or a template of fields
query_field | field of the question
query_field of text_pairs | field of the query, or a template of fields
positive_field | field of the document that belongs to the query, or a template of fields
negative_fields | fields of documents that do not belong to the query
query_prompt | supplied by the recipe: embedding.query_prompt
document_prompt | supplied by the recipe: embedding.document_prompt
source_field | field of the source, or a template of fields
target_field | field of the target, or a template of fields
source_prompt | text before each source, such as a task
seq_length of source_target | maximum tokens of a source; null: no limit
target_length | maximum tokens of a target; null: seq_length
truncation of source_target | texts of more than seq_length or target_length tokens: error; right: truncate them;
  skip the row
start_token_id | supplied by the recipe: the token with which the decoder starts
pair_template | supplied by the recipe: reranker.template
answer_prefix | text before each answer that gets no labels
num_images_per_sample | number of images of each sample
prompt of mock_images | the question
max_samples | use only the first samples
streaming | read and tokenize rows during training, instead of all rows before it
shuffle_block | with streaming: rows that are shuffled together
learn | which tokens have labels; completion: only the answer
learn of messages | all: all turns of the assistant have labels; last: only the last one
learn of conversations | all: all turns of the assistant have labels; last: only the last one
chat_template | a Jinja template or the path of a template file; null: the tokenizer's, or the training template
  that replaces it; original: always the tokenizer's; training: the replacement, or an error
template_kwargs | further variables of the chat template, such as {enable_thinking: false}
mask_reasoning | render the reasoning of answers (reasoning_content, reasoning or thinking) without labels
drop_earlier_reasoning | render only the reasoning of the last answer
end_with_answer | remove messages after the last answer
skip_unanswered | skip conversations without an answer, which are errors otherwise
messages_field | field with the list of messages
tools_field | field with the tools that the template shows to the model
seed | seed of the random samples
num_samples | number of samples of an epoch
vocab_size | tokens must be below this number
"""
ARGUMENTS = {
    name: text
    for name, _, text in (
        line.partition(" | ") for line in re.sub(r"\n +", " ", _ARGUMENTS).splitlines()
    )
}
"""Name of an argument, or ``NAME of BUILDER`` -> what it means in the data builders."""

_ROLE = re.compile(r":\w+:`~?([^`]*)`")
_CODE = re.compile(r"``([^`]*)``")
_ITALICS = re.compile(r"(?<![\w*`])\*(\w+)\*(?!\w)")


@dataclass(frozen=True)
class Argument:
    """An argument of a builder. *default* is its text in a recipe; None: it is required."""

    name: str
    kind: str
    default: str | None
    text: str


@dataclass(frozen=True)
class BuilderHelp:
    """What a recipe's author needs of one callable: its dotted *name*, *summary*, further *text* and *arguments*."""

    name: str
    summary: str
    text: str
    arguments: tuple[Argument, ...]

    @property
    def short_name(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def builders_of(purpose: str) -> Iterator[BuilderHelp]:
    """Yield the callables of this package that the sections of a *purpose* of the allowlist may name."""
    for entry in allowlist.entries_for(purpose):
        if entry.shown.startswith(PACKAGE):
            yield builder_help(entry.shown)


def other_names_of(purpose: str) -> list[str]:
    """The callables of other packages that the sections of a *purpose* may name; classes as ``package.*``."""
    shown = [entry.shown for entry in allowlist.entries_for(purpose)]
    return [name for name in shown if not name.startswith(PACKAGE)]


def builder_help(name: str) -> BuilderHelp:
    """Read the documentation of a callable of this package from its source."""
    found = definition(name)
    assert isinstance(found, ast.FunctionDef | ast.ClassDef), name
    summary, _, text = (ast.get_docstring(found) or "").partition("\n")
    parameters = signature(name) or {}
    module = name.rpartition(".")[0]
    short_name = name.rpartition(".")[2]
    arguments = []
    for parameter_name, parameter in parameters.items():
        if parameter_name not in SUPPLIED:
            default = None if parameter.default is None else _text_of(parameter.default, module)
            kind = "any value"
            if parameter.annotation is not Any:
                kind = describe(members(parameter.annotation))
            about = ARGUMENTS.get(f"{parameter_name} of {short_name}")
            about = about or ARGUMENTS.get(parameter_name, "")
            arguments.append(Argument(parameter_name, kind, default, about))
    paragraphs = [text.strip()] if text.strip() else []
    recipes = recipes_of_builder(name)
    if recipes:
        paragraphs.append(f"For ``recipe: {'`` or ``'.join(recipes)}``.")
    return BuilderHelp(name, summary, "\n\n".join(paragraphs), tuple(arguments))


def _text_of(default: ast.expr, module: str) -> str:
    """A default as it would be written in a recipe."""
    if isinstance(default, ast.Name):
        constant = definition(f"{module}.{default.id}")
        if isinstance(constant, ast.Assign):
            default = constant.value
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or "''"
    return str(value)


def plain(text: str) -> str:
    """Remove the markup of a docstring: ``code``, *names* and roles."""
    text = _ROLE.sub(lambda match: match[1].rpartition(".")[2], text)
    return _ITALICS.sub(r"\1", _CODE.sub(r"\1", text))


def markdown(text: str) -> str:
    """Convert the markup of a docstring to Markdown."""
    text = _ROLE.sub(lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return _ITALICS.sub(r"`\1`", _CODE.sub(r"`\1`", text))
