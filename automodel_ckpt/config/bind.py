"""Convert a recipe's nodes to typed values, and collect all problems."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.schema_keys import (
    EXTENDS,
    closest,
    default_node,
    default_of,
    has_hints,
    hints_of,
    is_changed,
    is_number,
    join,
    keys_of,
    names_in,
)
from automodel_ckpt.config.tree.convert import (
    choices,
    describe,
    find,
    is_open,
    is_text_only,
    members,
    section_type,
    target_type,
    typed,
)
from automodel_ckpt.config.tree.references import (
    KEY_REFERENCE,
    ReferenceFailed,
    is_reference,
    resolve,
)
from automodel_ckpt.config.tree.rules import MISSING, Condition, Relation, Target
from automodel_ckpt.config.tree.yaml_tree import (
    DEFAULT,
    NULL_WORDS,
    Node,
    is_misread,
    node_of,
    read_text,
    scalar_text,
    untyped,
)
from automodel_ckpt.errors import Problem

_LISTS = (list, tuple, set, Sequence, Iterable)
_MAPPINGS = (dict, Mapping)
# Not None, which is a valid value of many fields.
INVALID = object()
CORRECT = "correct the value, or remove the key to use its default"
"""The hint for a value without a better one."""
LISTED = "ckpt-train --help all lists all keys and options"
REMOTE_CODE = "trust_remote_code"
"""A key of this name is always a boolean: transformers would take the text ``no`` as true."""


_ABBREVIATIONS = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
}
"""Values of other programs, and what they are here."""
_MAX_MEANT = 3
_DOTTED = re.compile(r"\w+(\.\w+)+")


class Binder:
    """Converts nodes to typed values; problems are appended to ``problems``.

    It also adds nodes for defaults, parses the text of flags, and writes each value so that every YAML reader parses
    the same: YAML 1.1 and 1.2 differ (``1e-5`` and ``017`` are text and a number in one, a number and text in the
    other), and the type decides here. Numbers among the arguments of a plug-in stay as written until the types of its
    parameters are known. Give it a copy of the tree (:meth:`Node.copy`).
    """

    def __init__(
        self,
        schema: type[Any],
        problems: list[Problem],
        *,
        open_top: bool = False,
        other_keys: Iterable[str] = (),
    ) -> None:
        """``open_top`` accepts unknown top-level sections, which belong to a custom recipe not imported yet.

        ``other_keys`` are dotted keys that the file may also have had, for hints about unknown ones.
        """
        self.schema = schema
        self.problems = problems
        self.open_top = open_top
        self.other_keys = frozenset(other_keys)
        self._is_argument = False

    def section(self, cls: type[Any], node: Node, key: str) -> Any:
        """Convert a node to an instance of a section's dataclass, and add the missing defaults to the node.

        A section that takes any key has those that are not its fields in ``kwargs``. Elsewhere they are errors.
        """
        assert isinstance(node.value, dict)
        num_before = len(self.problems)
        hints = hints_of(cls)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        takes_any = getattr(cls, "takes_any", False)
        if takes_any:
            del fields["kwargs"]
        others = {name: child for name, child in node.value.items() if name not in fields}
        if not takes_any:
            for name, child in others.items():
                self._note_unknown(cls, name, child, key)
        values = {
            name: self._field(field, hints[name], node, key) for name, field in fields.items()
        }
        if takes_any:
            outside, self._is_argument = self._is_argument, True
            values["kwargs"] = {
                name: self.value(Any, child, join(key, name)) for name, child in others.items()
            }
            self._is_argument = outside
        else:
            # The order of the schema, so that printed recipes can be compared line by line.
            node.value = {name: node.value[name] for name in fields} | others
        for relation in getattr(cls, "relations", ()):
            self._check_relation(relation, values, node, key)
        for condition in getattr(cls, "conditions", ()):
            self._check_condition(condition, cls, values, node, key)
        if len(self.problems) > num_before:
            return INVALID
        try:
            return cls(**values)
        except ValueError as error:  # a custom recipe's section may check itself in __post_init__
            self.note(f"{key}: {error}", node, "", "correct the section")
            return INVALID

    def value(self, annotation: Any, node: Node, key: str) -> Any:
        """Convert a node to a type. Adds a problem and returns ``INVALID`` if that is impossible."""
        if key.rpartition(".")[2] == REMOTE_CODE:
            annotation = bool | None
        alternatives = members(annotation)
        if not self._parse_flag(annotation, node):
            return INVALID
        is_empty = node.value == "" and not node.quoted
        if is_empty and not self._accepts_no_content(alternatives, node, key):
            return INVALID
        if isinstance(node.value, dict):
            return self._mapping(alternatives, node, key)
        if isinstance(node.value, list):
            return self._list(alternatives, node, key)
        return self._scalar(alternatives, node, key)

    def _accepts_no_content(self, alternatives: tuple[Any, ...], node: Node, key: str) -> bool:
        """Handle a key without a value, for example a section with all lines commented out.

        A mandatory section takes its defaults. For an optional section it is unclear whether it is enabled: an error.
        """
        section = section_type(alternatives)
        is_plug_in = section is None and target_type(alternatives) is not None
        if type(None) in alternatives and (section or is_plug_in):
            enable = "add a _target_" if is_plug_in else "write {} to use its defaults"
            self.note(f"{key} is empty", node, "", f"{enable}, or null to disable it")
            return False
        if section:
            node.value = {}
        return True

    def _parse_flag(self, annotation: Any, node: Node) -> bool:
        """Parse a flag's ``[1, 2]`` or ``{a: b}`` as YAML if a list or a section is accepted. False: it is invalid.

        Brackets in a text field are characters. If any type is accepted, text that is not valid YAML and Jinja
        templates stay text.
        """
        has_brackets_as_text = is_text_only(annotation)
        if has_brackets_as_text and node.text is not None:
            # It was read as YAML before the parameter's type was known.
            node.value, node.text = node.text, None
        text = node.value
        if not isinstance(text, str) or not node.is_flag or node.quoted:
            return True
        accepts_any = any(is_open(member) for member in members(annotation))
        is_template = text.startswith(("{{", "{%")) and (accepts_any or str in members(annotation))
        if _is_quoted_word(text, accepts_any):
            node.value, node.quoted = text[1:-1], True
        elif text.startswith(("[", "{")) and not has_brackets_as_text and not is_template:
            problems: list[Problem] = []
            value = read_text(text, node.origin, problems).value
            if not problems:
                node.value, node.text = value, text
            elif not accepts_any:
                self.problems += problems
                return False
        return True

    def _field(
        self, field: dataclasses.Field[Any], annotation: Any, section: Node, key: str
    ) -> Any:
        """Convert the node of a field, or add a node for its default. Checks the field's rules."""
        assert isinstance(section.value, dict)
        full_key = join(key, field.name)
        default = default_of(field)
        node = section.value.get(field.name)
        # The default of a mandatory plug-in is a Target without a name, and the default of a mandatory section its
        # dataclass.
        is_required = getattr(default, "_target_", default) == MISSING
        if node is not None and isinstance(default, list | tuple):
            _replace_items(node, node_of(default))
        if node is None or (is_required and node.value == MISSING):
            node = section.value[field.name] = default_node(field, annotation)
            if is_required:
                self.note(
                    f"{full_key} is missing",
                    section,
                    "",
                    f"add {full_key}: {describe(members(annotation))}",
                )
                return INVALID
        num_before = len(self.problems)
        value = self.value(annotation, node, full_key)
        if node.origin == DEFAULT:
            # What a section lacks that was left out is missing from the one around it.
            for number, problem in enumerate(self.problems[num_before:], num_before):
                self.problems[number] = dataclasses.replace(problem, where=section.origin)
        if value is INVALID or value is None:
            return value
        for rule in field.metadata.get("rules", ()):
            # A mapping with a _target_ is a plug-in, which rules of mappings do not expect.
            if type(value) is Target or not rule.accepts(value):
                value = self._note_invalid(full_key, node, rule.expected)
                break
        return value

    def _mapping(self, alternatives: tuple[Any, ...], node: Node, key: str) -> Any:
        """Convert a mapping to a plug-in, a section, a dict, or a list with items given by index."""
        if find(alternatives, *_LISTS):
            _replace_items(node, Node([], DEFAULT))
        if isinstance(node.value, list):
            return self._list(alternatives, node, key)
        assert isinstance(node.value, dict)
        accepts_any = any(is_open(member) for member in alternatives)
        mapping = find(alternatives, *_MAPPINGS)
        target = target_type(alternatives)
        section = section_type(alternatives)
        # A mapping from names to plug-ins is not a plug-in.
        accepts_plugin = (
            accepts_any or target or (mapping and Target not in typing.get_args(mapping))
        )
        if "_target_" in node.value and accepts_plugin:
            return self.section(target or Target, node, key)
        if section and has_hints(section):
            return self.section(section, node, key)
        if not (mapping or accepts_any or section):
            hint = ""
            if target is not None:
                hint = (
                    f"add {join(key, '_target_')}, the name of what is built with these arguments"
                )
            return self._note_invalid(key, node, describe(alternatives), hint=hint)
        _, item_type = typing.get_args(mapping) or (Any, Any)
        values = {
            name: self.value(item_type, child, join(key, name)) for name, child in node.children()
        }
        return INVALID if INVALID in values.values() else values

    def _list(self, alternatives: tuple[Any, ...], node: Node, key: str) -> Any:
        kind = find(alternatives, *_LISTS)
        if kind is None and not any(is_open(member) for member in alternatives):
            return self._note_invalid(key, node, describe(alternatives))
        container: Any = typing.get_origin(kind) or kind
        if container not in (tuple, set):
            container = list
        children = node.children()
        item_types = typing.get_args(kind) or (Any,)
        if container is tuple and item_types[-1] is not ...:
            if len(item_types) != len(children):
                return self._note_invalid(key, node, f"a list of {len(item_types)}")
        else:
            item_types = (item_types[0],) * len(children)
        values = [
            self.value(item_type, child, join(key, index))
            for item_type, (index, child) in zip(item_types, children, strict=True)
        ]
        return INVALID if INVALID in values else container(values)

    def _scalar(self, alternatives: tuple[Any, ...], node: Node, key: str) -> Any:
        assert isinstance(node.value, str)
        if KEY_REFERENCE.search(node.value):
            return INVALID  # resolve_keys has reported why it cannot be replaced
        try:
            # The node keeps the reference: nodes are printed and saved, and the resolved text may be secret.
            text = resolve(node.value)
            quoted = text is not None and node.quoted
            value = typed("null" if text is None else text, alternatives, quoted=quoted)
            self._rewrite(node, value)
            return value
        except ReferenceFailed as error:
            self.note(f"{key}: {error}", node, node, error.hint)
            return INVALID
        except ValueError:
            hint = _scalar_hint(alternatives, node, key)
            return self._note_invalid(
                key, node, describe(alternatives), choices(alternatives), hint
            )

    def _rewrite(self, node: Node, value: Any) -> None:
        """Write the scalar *node* as its typed *value*. References to environment variables stay as written."""
        assert isinstance(node.value, str)
        if is_reference(node.value):
            return
        if isinstance(value, str | Path):
            node.quoted = node.quoted or is_misread(node.value)
        elif not self._is_argument and (value is None or type(value) in (bool, int, float)):
            node.value, node.quoted = scalar_text(value), False

    def _check_relation(
        self, relation: Relation, values: dict[str, Any], section: Node, key: str
    ) -> None:
        """Add a problem if the values of several fields do not fit together, at the first that the user gave."""
        if not _is_broken(relation, relation.keys, values):
            return
        nodes = {name: section.at(name) for name in relation.keys}
        value = ", ".join(f"{name}: {node}" for name, node in nodes.items())
        what = f"{key}: {relation.problem}" if key else relation.problem
        given = (node for node in nodes.values() if node is not None and node.origin != DEFAULT)
        self.note(what, next(given, section), value, relation.hint)

    def _check_condition(
        self, condition: Condition, cls: type[Any], values: dict[str, Any], section: Node, key: str
    ) -> None:
        """Add a problem for each changed key that has no effect: no value is ignored silently."""
        if not _is_broken(condition, (*condition.keys, *condition.on), values):
            return
        for name in condition.keys:
            node = section.at(name)
            # Values are compared, not origins: config.yaml of a checkpoint contains every default.
            if node is not None and is_changed(cls, values, name):
                self.note(
                    f"{join(key, name)} has no effect: {condition.reason}",
                    node,
                    node,
                    condition.hint,
                )

    def _note_unknown(self, cls: type[Any], name: str, node: Node, key: str) -> None:
        if self.open_top and not key:
            return
        full = join(key, name)
        counterpart = OTHER_NAMES.get(full) or OTHER_NAMES.get(name)
        if counterpart is not None:
            self.note(f"unknown key {full}", node, node, counterpart.hint(str(node)))
            return
        siblings = [*hints_of(cls), *names_in(key, self.other_keys), *([] if key else [EXTENDS])]
        similar = closest(name, siblings)
        meant = [join(key, similar)] if similar else []
        # Of two names of which one begins with the other, such as lr and lr_scheduler, either can be meant.
        if not similar or similar.startswith(f"{name}_"):
            # The key may be right, but in the wrong section.
            known = [each for each in keys_of(self.schema) if each.rpartition(".")[2] == name]
            meant = known[:_MAX_MEANT] or meant
        hint = f"did you mean {' or '.join(meant)}?" if meant else LISTED
        self.note(f"unknown key {full}", node, node, hint)

    def _note_invalid(
        self, key: str, node: Node, expected: str, listed: Sequence[str] = (), hint: str = ""
    ) -> Any:
        meant = closest(str(node.value), listed) or _ABBREVIATIONS.get(str(node.value).lower())
        if meant in listed:
            hint = f"did you mean {meant}?"
        self.note(f"{key} must be {expected}", node, node, hint or CORRECT)
        return INVALID

    def note(self, what: str, node: Node, value: object, hint: str) -> None:
        """Add a problem. The resolved value of an environment reference is not shown, since it may be a secret."""
        shown = str(value)
        if isinstance(value, Node) and isinstance(value.value, str) and is_reference(value.value):
            shown += " (resolved value hidden)"
        self.problems.append(Problem(what, node.origin, shown, hint))


def _is_broken(rule: Relation | Condition, keys: Iterable[str], values: Mapping[str, Any]) -> bool:
    """Whether values do not fit together. An invalid one has its own problem: a second would mislead."""
    if any(values[key.partition(".")[0]] is INVALID for key in keys):
        return False
    # Without an instance of the section, a rule sees its fields but not its properties.
    return not rule.accepts(types.SimpleNamespace(**values))


def _scalar_hint(alternatives: tuple[Any, ...], node: Node, key: str) -> str:
    """The hint for a scalar that no type accepts; empty if there is nothing special to say."""
    assert isinstance(node.value, str)
    section = section_type(alternatives)
    if target_type(alternatives) is not None and _DOTTED.fullmatch(node.value):
        return f"name a class or function in {join(key, '_target_')}"
    if section and has_hints(section) and (fields := dataclasses.fields(section)):
        return (
            f"give the keys of the section, such as {join(key, fields[0].name)}, or remove the key"
        )
    if find(alternatives, *_LISTS):
        return "write a list as [A, B]"
    return ""


def _is_quoted_word(text: str, accepts_any: bool) -> bool:
    """Whether a flag's value is a quoted word that would not be text without quotes: 'none', or '12' for any type."""
    if len(text) < 3 or text[0] not in "'\"" or text[-1] != text[0]:
        return False
    word = text[1:-1]
    if word in NULL_WORDS:
        return True
    return accepts_any and not isinstance(untyped(word), str)


def _replace_items(node: Node, default: Node) -> None:
    """Apply ``--key.0 value`` to a list that exists only as a default: replace that item in the default list."""
    assert isinstance(default.value, list)
    if not isinstance(node.value, dict) or not node.value:
        return
    if not all(is_number(part) for part in node.value):
        return
    items = list(default.value)
    # Sorted as numbers: as text, item 10 would come before item 2.
    for part, child in sorted(node.value.items(), key=lambda item: int(item[0])):
        index = int(part)
        # The node remains a mapping, and the caller reports that the key must be a list.
        if index > len(items):
            return
        items[index : index + 1] = [child]
    node.value = items
