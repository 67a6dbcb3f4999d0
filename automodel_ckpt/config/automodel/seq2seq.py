"""Rows for NeMo AutoModel's data set of sources and targets, which its encoder-decoder models train on.

AutoModel truncates both texts to ``seq_length``. Its decoder starts with the padding token unless the data set has
``decoder_start_token_id``; ours starts with the token of the model's configuration, which is the same for T5.
"""

from __future__ import annotations

import json
from string import Formatter

from automodel_ckpt.config.automodel.dataset_rows import LIMIT_OF_SPLIT, SPLIT, TOKENIZER
from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Key,
    NoEffect,
    Row,
    Section,
    Steps,
    is_true,
)
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.yaml_tree import Node

RECIPE = "seq2seq"
_TEMPLATE = "question: {question}  context: {context}"
"""AutoModel's default source, for SQuAD."""


def _source(section: Section) -> None:
    """Translate the source: a template of Python's ``str.format``, or a field."""
    has_template = section.has("source_template")
    given = section.take("source_template")
    key = section.take("source_key")
    if has_template and given is None:
        section.put("source_field", key or Node("question", AUTOMODEL_DEFAULT), was="source_key")
        return
    template = given or Node(_TEMPLATE, AUTOMODEL_DEFAULT, quoted=True)
    if key is not None:
        section.no_effect("source_key", key)
    written = _in_jinja(str(template.value))
    if written is None:
        hint = 'write it as a Jinja template in source_field, such as "{{ question }}"'
        section.reject("source_template", template, "this template is not supported", hint)
        return
    section.put("source_field", Node(written, template.origin, quoted=True), was="source_template")


def _in_jinja(template: str) -> str | None:
    """A template of ``str.format`` as one of Jinja; None if it formats values, or is not valid."""
    parts = []
    try:
        for literal, name, spec, conversion in Formatter().parse(template):
            has_braces = "{" in literal or "}" in literal
            parts.append(f"{{{{ {json.dumps(literal)} }}}}" if has_braces else literal)
            if name is None:
                continue
            if not name.isidentifier() or spec or conversion:
                return None
            parts.append(f"{{{{ {name} }}}}")
    except ValueError:
        return None
    return "".join(parts)


def _target(section: Section) -> None:
    """Translate the target: a field with text, or with SQuAD's answers, of which the first is used."""
    given = section.take("target_key")
    name = "answers" if given is None else str(given.value)
    origin = AUTOMODEL_DEFAULT if given is None else given.origin
    first = f"{{% if {name} is mapping %}}{{{{ {name}.text[0] | trim }}}}"
    text = f"{first}{{% else %}}{{{{ {name} | trim }}}}{{% endif %}}"
    section.put("target_field", Node(text, origin, quoted=True), was="target_key")


def _length(section: Section) -> None:
    """Translate the limit of both texts; without one, our limit is the model's context."""
    truncates = section.take("truncation")
    limit = section.take("seq_length")
    is_ignored = truncates is not None and not is_true(truncates) and truncates.value != "right"
    if limit is None or is_ignored:
        section.put_default("seq_length", "null")
        if limit is not None:
            section.note("seq_length", limit, "without truncation: true, AutoModel ignores it")
    else:
        section.put("seq_length", limit)
    if truncates is not None:
        section.translated("truncation", truncates, join(section.to, "truncation"))
    section.put("truncation", Node("right", AUTOMODEL_DEFAULT))


ROWS: tuple[Row, ...] = (
    Key("dataset_name", "path", default="rajpurkar/squad"),
    SPLIT,
    LIMIT_OF_SPLIT,
    Steps(_source, ("source_template", "source_key")),
    Steps(_target, ("target_key",)),
    Key("decoder_start_token_id", where="model.config_overrides.decoder_start_token_id"),
    NoEffect("fp8"),
    Steps(_length, ("seq_length", "truncation")),
    TOKENIZER,
)
