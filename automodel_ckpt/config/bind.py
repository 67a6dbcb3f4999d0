"""Convert a recipe's nodes to typed values, and collect all problems."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from automodel_ckpt.config.convert import (
    choices,
    describe,
    find,
    is_open,
    is_text_only,
    members,
    section_type,
    target_type,
    typed,
    untyped,
)
from automodel_ckpt.config.references import ReferenceFailed, is_reference, resolve
from automodel_ckpt.config.schema import MISSING, Condition, Relation, Target
from automodel_ckpt.config.yaml_tree import DEFAULT, NULL_WORDS, Node, node_of, read_text
from automodel_ckpt.errors import Problem

_LISTS = (list, tuple, set, Sequence, Iterable)
_MAPPINGS = (dict, Mapping)
INVALID = object()
REMOTE_CODE = "trust_remote_code"
"""A key of this name is always a boolean: transformers would take the text ``no`` as true."""


def hints_of(section: Any) -> dict[str, Any]:
    """Resolved types of a dataclass's fields, cached because every override looks them up."""
    return _evaluated(section)


@functools.cache
def _evaluated(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _has_hints(section: type[Any]) -> bool:
    """Whether the field types resolve; a library's dataclass may use names that are imported for type checkers only."""
    try:
        hints_of(section)
    except Exception:
        return False
    return True


def annotation_at(schema: type[Any], key: str) -> Any:
    """Type of the field at a dotted key; Any inside plug-ins, mappings and lists; None if the key cannot exist."""
    annotation: Any = schema
    for part in key.split("."):
        alternatives = members(annotation)
        section = section_type(alternatives)
        hints = hints_of(section) if section else {}
        if part in hints:
            annotation = hints[part]
        elif target_type(alternatives) or (section is None and not is_text_only(annotation)):
            return Any
        else:
            return None
    return annotation


def keys_of(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a schema, including sections."""
    hints = hints_of(schema)
    for field in dataclasses.fields(schema):
        yield prefix + field.name
        if section := section_type(members(hints[field.name])):
            yield from keys_of(section, f"{prefix}{field.name}.")


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to *word*; None if none is similar."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.7)
    return matches[0] if matches else None


def is_number(part: str) -> bool:
    """Whether a part of a dotted key is a list index."""
    return part.isascii() and part.isdecimal()


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class Binder:
    """Converts nodes to typed values; problems are appended to ``problems``."""

    def __init__(
        self, schema: type[Any], problems: list[Problem], *, open_top: bool = False
    ) -> None:
        """``open_top`` leaves unknown top-level sections to a custom recipe that is not imported yet."""
        self.schema, self.problems, self.open_top = schema, problems, open_top

    def section(self, cls: type[Any], node: Node, key: str) -> Any:
        """Convert a node to an instance of a section's dataclass, and add the missing defaults to the node."""
        assert isinstance(node.value, dict)
        given = node.value
        num_before = len(self.problems)
        hints = hints_of(cls)
        unknown = {name: child for name, child in given.items() if name not in hints}
        for name, child in unknown.items():
            self._unknown(cls, name, child, key)
        values = {}
        ordered = {}
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            values[field.name] = self._field(field, hint, node, key)
            ordered[field.name] = given.get(field.name) or default_node(field, hint)
        # The order of the schema, so that printed recipes look alike.
        node.value = ordered | unknown
        for relation in getattr(cls, "relations", ()):
            self._relate(relation, values, node, key)
        for condition in getattr(cls, "conditions", ()):
            self._check_effect(condition, cls, values, node, key)
        if len(self.problems) > num_before:
            return INVALID
        return self._construct(cls, values, node, key)

    def value(self, annotation: Any, node: Node, key: str) -> Any:
        """Convert a node to a type. Notes a problem and returns ``INVALID`` if that is impossible."""
        if key.rpartition(".")[2] == REMOTE_CODE:
            annotation = bool | None
        alternatives = members(annotation)
        num_before = len(self.problems)
        self._expand(annotation, node)
        if len(self.problems) > num_before:
            return INVALID
        if (
            node.value == ""
            and not node.quoted
            and not self._accepts_no_content(alternatives, node, key)
        ):
            return INVALID
        if isinstance(node.value, dict):
            return self._mapping(alternatives, node, key)
        if isinstance(node.value, list):
            return self._list(alternatives, node, key)
        return self._scalar(alternatives, node, key)

    def _accepts_no_content(self, alternatives: tuple[Any, ...], node: Node, key: str) -> bool:
        """Handle a key without a value, for example a section whose lines are all commented out.

        A mandatory section takes its defaults. For an optional section it is unclear whether it is enabled: an error.
        """
        section = section_type(alternatives)
        is_plug_in = section is None and target_type(alternatives) is not None
        if type(None) in alternatives and (section or is_plug_in):
            on = "add a _target_" if is_plug_in else "write {} to use its defaults"
            self.note(f"{key} is empty", node, "", f"{on}, or null to disable it")
            return False
        if section:
            node.value = {}
        return True

    def _expand(self, annotation: Any, node: Node) -> None:
        """Parse a flag's ``[1, 2]`` or ``{a: b}`` as YAML if a list or a section is accepted.

        Brackets in a text field are characters. If any type is accepted, text that is not valid YAML and Jinja
        templates stay text.
        """
        if is_text_only(annotation) and node.text is not None:
            # It was read as YAML before the parameter's type was known.
            node.value, node.text = node.text, None
        text = node.value
        if not isinstance(text, str) or not node.is_flag or node.quoted:
            return
        accepts_any = any(is_open(member) for member in members(annotation))
        if _is_quoted_word(text, accepts_any):
            node.value, node.quoted = text[1:-1], True
            return
        is_template = text.startswith(("{{", "{%")) and (accepts_any or str in members(annotation))
        if text[:1] not in ("[", "{") or is_text_only(annotation) or is_template:
            return
        problems: list[Problem] = []
        value = read_text(text, node.origin, problems).value
        if problems and accepts_any:
            return
        self.problems += problems
        node.value, node.text = value, text

    def _field(
        self, field: dataclasses.Field[Any], annotation: Any, section: Node, key: str
    ) -> Any:
        assert isinstance(section.value, dict)
        full_key, default = join(key, field.name), default_of(field)
        node = section.value.get(field.name)
        if node is None:
            if default == MISSING or getattr(default, "_target_", "") == MISSING:
                self.note(
                    f"{full_key} is missing",
                    section,
                    "",
                    f"add {full_key}: {describe(members(annotation))}",
                )
                return INVALID
            node = section.value[field.name] = default_node(field, annotation)
        elif isinstance(default, list | tuple):
            _patch(node, node_of(default))
        value = self.value(annotation, node, full_key)
        for rule in field.metadata.get("rules", ()):
            if value is not INVALID and value is not None and not rule.holds(value):
                self._note_invalid(full_key, node, rule.says)
        return value

    def _mapping(self, alternatives: tuple[Any, ...], node: Node, key: str) -> Any:
        if find(alternatives, *_LISTS):
            _patch(node, Node([], DEFAULT))
        if isinstance(node.value, list):
            return self._list(alternatives, node, key)
        assert isinstance(node.value, dict)
        anything = any(is_open(member) for member in alternatives)
        target = target_type(alternatives)
        if "_target_" in node.value and (anything or target or find(alternatives, *_MAPPINGS)):
            return self._open_section(target or Target, node, key)
        section = section_type(alternatives)
        if section and _has_hints(section):
            if getattr(section, "takes_any", False):
                return self._open_section(section, node, key)
            return self.section(section, node, key)
        if (kind := find(alternatives, *_MAPPINGS)) or anything or section:
            inner = (typing.get_args(kind) or (Any, Any))[1]
            values = {
                name: self.value(inner, child, join(key, name))
                for name, child in node.value.items()
            }
            return INVALID if INVALID in values.values() else values
        return self._note_invalid(key, node, describe(alternatives))

    def _open_section(self, cls: type[Any], node: Node, key: str) -> Any:
        """Convert a node to a dataclass that collects unknown keys in ``kwargs``."""
        assert isinstance(node.value, dict)
        hints = hints_of(cls)
        fields = [field for field in dataclasses.fields(cls) if field.name != "kwargs"]
        own_names = {field.name for field in fields}
        # Taken before the fields are converted, which adds the nodes of their defaults.
        others = [name for name in node.value if name not in own_names]
        num_before = len(self.problems)
        values = {}
        for field in fields:
            values[field.name] = self._field(field, hints[field.name], node, key)
        kwargs = {}
        for name in others:
            kwargs[name] = self.value(Any, node.value[name], join(key, name))
        if len(self.problems) > num_before:
            return INVALID
        return cls(**values, kwargs=kwargs)

    def _list(self, alternatives: tuple[Any, ...], node: Node, key: str) -> Any:
        kind = find(alternatives, *_LISTS)
        if kind is None and not any(is_open(member) for member in alternatives):
            return self._note_invalid(key, node, describe(alternatives))
        container: Any = list
        if find((kind,), tuple, set) is not None:
            container = typing.get_origin(kind) or kind
        item_types = typing.get_args(kind) or (Any,)
        if container is not tuple or item_types[-1] is ...:
            item_types = item_types[:1] * len(node.value)
        if len(item_types) != len(node.value):
            return self._note_invalid(key, node, f"a list of {len(item_types)}")
        values = []
        for item_type, (index, child) in zip(item_types, node.children(), strict=True):
            values.append(self.value(item_type, child, join(key, index)))
        return INVALID if INVALID in values else container(values)

    def _scalar(self, alternatives: tuple[Any, ...], node: Node, key: str) -> Any:
        assert isinstance(node.value, str)
        try:
            text = resolve(node.value)
            return typed(
                "null" if text is None else text,
                alternatives,
                quoted=node.quoted and text is not None,
            )
        except ReferenceFailed as error:
            self.note(f"{key}: {error}", node, node, error.hint)
        except ValueError:
            hint = ""
            if node.is_null and str in alternatives:
                hint = f"quote it to use the text {node.value or '(empty)'}, or remove the key"
            self._note_invalid(key, node, describe(alternatives), choices(alternatives), hint)
        return INVALID

    def _construct(self, cls: type[Any], values: dict[str, Any], node: Node, key: str) -> Any:
        try:
            return cls(**values)
        except ValueError as error:  # a custom recipe's section may check itself in __post_init__
            self.note(f"{key}: {error}", node, "", "correct the section")
            return INVALID

    def _relate(self, relation: Relation, values: dict[str, Any], section: Node, key: str) -> None:
        if INVALID in (values[name.partition(".")[0]] for name in relation.keys):
            return
        if relation.holds(types.SimpleNamespace(**values)):
            return
        nodes = {name: section.at(name) for name in relation.keys}
        value = ", ".join(f"{name}: {node}" for name, node in nodes.items())
        what = f"{key}: {relation.says}" if key else relation.says
        # The problem is reported at the first key that the user gave.
        given = [node for node in nodes.values() if node is not None and node.origin != DEFAULT]
        place = given[0] if given else section
        self.note(what, place, value, relation.hint)

    def _check_effect(
        self, condition: Condition, cls: type[Any], values: dict[str, Any], section: Node, key: str
    ) -> None:
        """Report changed keys that have no effect, because values must never be silently ignored."""
        heads = {name.partition(".")[0] for name in (*condition.keys, *condition.on)}
        if any(values[name] is INVALID for name in heads):
            return
        if condition.holds(types.SimpleNamespace(**values)):
            return
        for name in condition.keys:
            node = section.at(name)
            if node is not None and is_changed(cls, values, name):
                self.note(
                    f"{join(key, name)} has no effect: {condition.says}",
                    node,
                    node,
                    condition.hint,
                )

    def _unknown(self, cls: type[Any], name: str, node: Node, key: str) -> None:
        if self.open_top and not key:
            return
        beside = closest(name, hints_of(cls))
        elsewhere = [known for known in keys_of(self.schema) if known.rpartition(".")[2] == name]
        meant = join(key, beside) if beside else elsewhere[0] if elsewhere else None
        hint = f"did you mean {meant}?" if meant else "remove it; ckpt-train --help lists all keys"
        self.note(f"unknown key {join(key, name)}", node, node, hint)

    def _note_invalid(
        self, key: str, node: Node, expected: str, listed: Iterable[str] = (), hint: str = ""
    ) -> Any:
        meant = closest(str(node.value), listed)
        if meant:
            hint = f"did you mean {meant}?"
        self.note(
            f"{key} must be {expected}",
            node,
            node,
            hint or "correct the value, or remove the key to use its default",
        )
        return INVALID

    def note(self, what: str, node: Node, value: object, hint: str) -> None:
        """Add a problem. The resolved value of an environment reference is not shown, since it may be a secret."""
        hidden = (
            isinstance(value, Node) and isinstance(value.value, str) and is_reference(value.value)
        )
        shown = f"{value} (resolved value hidden)" if hidden else str(value)
        self.problems.append(Problem(what, node.origin, shown, hint))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Default of a field; MISSING if it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else MISSING


def is_changed(cls: type[Any], values: Mapping[str, Any], key: str) -> bool:
    """Whether the value at a dotted key differs from its default; False in a section that is null or a plug-in."""
    name, _, inner = key.partition(".")
    value = values[name]
    if inner:
        return (
            dataclasses.is_dataclass(value)
            and hasattr(value, inner)
            and is_changed(type(value), vars(value), inner)
        )
    (field,) = [field for field in dataclasses.fields(cls) if field.name == name]
    return bool(value != default_of(field))


def _changed_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section, and of those below it, whose values differ from their defaults."""
    values = vars(section)
    for name in values:
        if dataclasses.is_dataclass(values[name]) and not isinstance(values[name], Target):
            yield from _changed_keys(values[name], f"{prefix}{name}.")
        elif is_changed(type(section), values, name):
            yield prefix + name


def unused_without_checkpoints(recipe: Any) -> list[str]:
    """Changed keys that have no effect because ``checkpoint.enabled`` is false."""
    if recipe.checkpoint.enabled:
        return []
    describe_when = [
        f"step_scheduler.{name}" for name in vars(recipe.step_scheduler) if name.startswith("ckpt_")
    ]
    of_checkpoints = (
        "checkpoint.",
        *describe_when,
        "step_scheduler.mtbf_hours",
        "logging.sample_ids",
    )
    return [
        key
        for key in _changed_keys(recipe)
        if key.startswith(of_checkpoints) and key != "checkpoint.enabled"
    ]


def default_node(field: dataclasses.Field[Any], annotation: Any) -> Node:
    """Node of a field's default. Words that the type lists, such as none, are not quoted."""
    default = default_of(field)
    node = node_of(default)
    if isinstance(default, str) and default in choices(members(annotation)):
        node.quoted = False
    return node


def _is_quoted_word(text: str, accepts_any: bool) -> bool:
    """Whether a flag's value is a quoted word that would not be text without quotes: 'none', or '12' for any type."""
    if len(text) < 3 or text[0] not in "'\"" or text[-1] != text[0]:
        return False
    word = text[1:-1]
    return word in NULL_WORDS or (accepts_any and not isinstance(untyped(word), str))


def _patch(node: Node, default: Node) -> None:
    """Apply ``--key.0 value`` to a list that exists only as a default: replace that item in the default list."""
    assert isinstance(default.value, list)
    if (
        not isinstance(node.value, dict)
        or not node.value
        or not all(is_number(part) for part in node.value)
    ):
        return
    items = list(default.value)
    for part, child in sorted(node.value.items(), key=lambda item: int(item[0])):
        if int(part) > len(items):
            return
        items[int(part) : int(part) + 1] = [child]
    node.value = items
