"""Function calling data in the format of xLAM: a question, the functions that may be called, and the expected calls.

The facts of the format are from the data set ``Salesforce/xlam-function-calling-60k``: ``tools`` and ``answers``
are JSON texts, and the type of a parameter is a Python type such as ``str`` or ``List[int]``, with ``, optional`` if it
is not required.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.chat import conversations_of
from automodel_ckpt.data.collate import RowOptions
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.messages import (
    CALL,
    Object,
    Turns,
    UnusableSample,
    parsed,
    turns_of,
)
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples, Truncation

_TYPES = {
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "double": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "array": "array",
    "dict": "object",
    "object": "object",
}
"""Name of a Python type -> type in JSON schema; others are strings."""
_HINT = 'use tools [{"name": ..., "description": ..., "parameters": {name: {"type": ..., "description": ...}}}]'


def xlam(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str] = "Salesforce/xlam-function-calling-60k",
    seq_length: int | None = 2048,
    query_field: str = "query",
    answers_field: str = "answers",
    tools_field: str = "tools",
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one sample per row: a question with the available functions, and the assistant's calls with labels.

    *tools_field* contains the functions (xLAM's format, or already JSON schema as in OpenAI's) and *answers_field* the
    calls, ``[{"name": ..., "arguments": {...}}]``; both may be JSON text. *chat_template* renders them, by default the
    tokenizer's. For the other arguments see :func:`~automodel_ckpt.data.chat.messages`. Raises :class:`RecipeError`
    with the row's location for a row in another format, and if the chat template omits the calls.
    """
    text = template_of(tokenizer, chat_template)
    template = ChatTemplate(tokenizer, text, dict(template_kwargs or {}), False)
    fields = (query_field, answers_field, tools_field)

    def encode(rows: Rows) -> Samples:
        queries, answers, tools = rows.columns(fields)

        def conversation(row: int) -> tuple[Turns, Any]:
            calls = parsed(answers[row])
            if not isinstance(calls, list) or not calls:
                raise UnusableSample(
                    "the calls are not a list",
                    answers[row],
                    'use answers [{"name": "...", "arguments": {...}}]',
                )
            turns = [{"role": "user", "content": queries[row]}]
            turns += [{"role": CALL, "content": call} for call in calls]
            return turns_of(turns), schemas(tools[row])

        return conversations_of(template, rows, conversation)

    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        fields=fields,
        key=("xlam", *fields, *template.key),
        template=template.method,
        **options,
    )


def schemas(tools: Any) -> Turns:
    """Convert the functions of a row to JSON schema; functions that are JSON schema already are returned unchanged.

    Raises :class:`UnusableSample` for a value that is not a list of functions.
    """
    given = parsed(tools)
    if not isinstance(given, list):
        raise UnusableSample("the functions are not a list", tools, _HINT)
    return [_schema(tool) for tool in given]


def _schema(tool: Any) -> Object:
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" in tool:
        return tool
    given = tool if isinstance(tool, Mapping) else {}
    name, parameters = given.get("name"), given.get("parameters") or {}
    are_described = isinstance(parameters, Mapping) and all(
        isinstance(each, Mapping) for each in parameters.values()
    )
    if not isinstance(name, str) or not are_described:
        raise UnusableSample(
            "a function has no name, or no descriptions of its parameters", tool, _HINT
        )
    properties = {}
    required = []
    for parameter, described in parameters.items():
        kind = str(described.get("type", "str"))
        # For example "List[int], optional": the name of the outermost type.
        found = re.match(r"\w+", kind.strip())
        properties[parameter] = {
            "type": _TYPES.get(found[0].lower() if found else "str", "string"),
            "description": described.get("description", ""),
        }
        for key in [key for key in ("enum", "default") if key in described]:
            properties[parameter][key] = described[key]
        if "default" not in described and "optional" not in kind:
            required.append(parameter)
    schema: Object = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    description = tool.get("description", "")
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}
