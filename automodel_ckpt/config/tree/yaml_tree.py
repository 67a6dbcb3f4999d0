"""The untyped tree of a recipe: scalars as written, each with its origin."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from automodel_ckpt.errors import TO_UTF8, Problem, os_problem

DEFAULT = "default"
STREAM = "standard input"
OVERRIDES = "overrides"
"""The origin of values that a program gives begins with it."""
MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 40
MAX_NODES = 20_000  # aliases expanded: a few lines of YAML can stand for billions of values
NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL", "none", "None", "NONE"})
_NONE_WORDS = frozenset({"none", "None", "NONE"})
"""Null here and text for other YAML readers. If a field lists none as a value, they are that value."""
_RESOLVER = yaml.SafeLoader("")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+")  # written in YAML without quotes
# YAML 1.2's core schema, except that a leading zero makes no number: an identifier such as 017 stays as it is.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
UNREADABLE = "use plain YAML: keys, text, numbers, lists and mappings"
QUOTED = "quote words that begin with *, &, %, @ or a backquote, such as ['*.embed_tokens.*']"
_MARKED_WORD = re.compile(r"[\s\[{,:-]?[*&%@`]")


@dataclass
class Node:
    """A scalar's text, a list or a mapping; ``origin`` is ``file:line``, a flag as typed, or ``default``.

    ``text`` is the value of a flag before it was parsed as YAML, for a parameter that turns out to be text. With
    ``is_indirect``, a reference or a run's name has added text of other keys to the value.
    """

    value: str | list[Node] | dict[str, Node]
    origin: str
    quoted: bool = False
    text: str | None = None
    is_indirect: bool = False

    @property
    def is_null(self) -> bool:
        return not self.quoted and isinstance(self.value, str) and self.value in NULL_WORDS

    @property
    def is_flag(self) -> bool:
        return self.origin.startswith("-")

    @property
    def is_from_user(self) -> bool:
        """Whether the whole value was given on the command line or by a program, and none of it by a recipe file."""
        return not self.is_indirect and (self.is_flag or self.origin.startswith(OVERRIDES))

    def __str__(self) -> str:
        """The value as one line of YAML, with environment references unresolved."""
        if isinstance(self.value, str) and not self.quoted and _WORD.fullmatch(self.value):
            return "null" if self.is_null and self.value not in _NONE_WORDS else self.value
        text = ""
        # Not all characters that PyYAML writes as they are can be printed, such as marks of direction.
        for allow_unicode in (True, False):
            document = yaml.serialize(
                _to_yaml(self), width=float("inf"), allow_unicode=allow_unicode
            )
            text = str(document).removesuffix("\n...\n").rstrip("\n")
            if text.isprintable():
                break
        return text

    def copy(self) -> Node:
        """Copy the tree below this node."""
        value = self.value
        if isinstance(value, dict):
            value = {key: child.copy() for key, child in value.items()}
        elif isinstance(value, list):
            value = [child.copy() for child in value]
        return dataclasses.replace(self, value=value)

    def children(self) -> list[tuple[str, Node]]:
        """Return (key or index, node) pairs of a mapping or list; empty for a scalar."""
        if isinstance(self.value, dict):
            return list(self.value.items())
        if isinstance(self.value, list):
            return [(str(index), item) for index, item in enumerate(self.value)]
        return []

    def walk(self, key: str = "") -> Iterator[tuple[str, Node]]:
        """Yield (dotted key, node) of this node, which is at *key*, and of all nodes below it."""
        yield key, self
        for name, child in self.children():
            yield from child.walk(f"{key}.{name}" if key else name)

    def at(self, key: str) -> Node | None:
        """The node at a dotted key, with list items addressed by index. Returns None when it does not exist."""
        node: Node | None = self
        for part in key.split("."):
            node = dict(node.children()).get(part) if node else None
        return node


def values(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Yield (dotted key, node) for each value of a tree at *key*; a list counts as one value."""
    if isinstance(node.value, dict) and node.value:
        for name, child in node.children():
            yield from values(child, f"{key}.{name}" if key else name)
    else:
        yield key, node


def texts(tree: Node) -> dict[str, str]:
    """Map the dotted keys of a recipe's tree to their values as text."""
    return {key: str(node) for key, node in values(tree)}


def node_of(value: Any, origin: str = DEFAULT) -> Node:
    """Convert a Python value, such as a schema default, to a node that parses back to it."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return Node({str(key): node_of(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([node_of(item, origin) for item in value], origin)
    if isinstance(value, str):
        return Node(value, origin, quoted=is_misread(value) or value in NULL_WORDS)
    return Node(scalar_text(value), origin)


def scalar_text(value: float | None) -> str:
    """Write null, a boolean or a number so that YAML 1.1 and 1.2 parse it as the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    # repr is the shortest text that parses to exactly this number.
    text = repr(value)
    # YAML 1.1 parses 1e-05 as text, and 1.0e-05 as a number.
    return text if "." in text else text.replace("e", ".0e")


def untyped(text: str, *, quoted: bool = False) -> Any:
    """Convert text without a declared type, as YAML 1.2 does; ``1e-5`` is a float, ``017`` and ``on`` are text.

    The words none and None are null too, as in every field.
    """
    if quoted:
        return text
    if text in NULL_WORDS:
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def is_misread(text: str) -> bool:
    """Whether YAML 1.1 or 1.2 would parse unquoted *text* as something other than text."""
    resolver: Any = _RESOLVER
    tag = resolver.resolve(yaml.ScalarNode, text, (True, False))
    # Unquoted none is text only where a field lists it as a value, and it is parsed as that value again.
    return tag != "tag:yaml.org,2002:str" or not isinstance(untyped(text), str | None)


def is_stream(path: str | Path) -> bool:
    """Whether a recipe is read from a pipe: ``-`` (standard input), a shell's ``<(...)``, or a named pipe."""
    # Neither raises for a path that cannot exist, such as one with a null character.
    return str(path) == "-" or (
        os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    )


def read_file(path: Path, problems: list[Problem]) -> Node | None:
    """Read the mapping in a YAML file. Returns None and adds to ``problems`` if that fails."""
    is_standard_input = str(path) == "-"
    origin = STREAM if is_standard_input else str(path)
    try:
        # If descriptor 0 were closed, the next file that is opened would become standard input.
        with open(0 if is_standard_input else path, "rb", closefd=not is_standard_input) as file:
            # Bounded, because the path may be a device without an end, such as /dev/zero.
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        hint = "grant this user read permission"
        problems.append(os_problem(error, "the recipe cannot be read", hint=hint))
        return None
    # Before it is decoded: the last character of a longer file can be cut in two.
    if len(content) > MAX_FILE_BYTES:
        problems.append(Problem("the recipe is too large", origin, f"over {MAX_FILE_BYTES} bytes"))
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{origin}, byte {error.start}"
        problems.append(Problem("the recipe is not UTF-8 text", where, "", TO_UTF8))
        return None
    num_before = len(problems)
    root = read_text(text, origin, problems, lines=True)
    if isinstance(root.value, dict):
        return root
    if len(problems) == num_before:
        problems.append(Problem("a recipe must be a mapping of sections", origin, str(root)))
    return None


def read_text(text: str, origin: str, problems: list[Problem], *, lines: bool = False) -> Node:
    """Parse YAML text to a node; with ``lines``, origins include line numbers. Adds errors to ``problems``."""
    try:
        reader = _Reader(text, origin, problems, lines=lines)
        tree = reader.get_single_node()
        return Node("", origin) if tree is None else reader.node(tree, origin)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origin}:{mark.line + 1}" if mark and lines else origin
        said = [getattr(error, "context", None), getattr(error, "problem", None)]
        what = ", ".join(filter(None, said)) or str(error).splitlines()[0]
        hint = UNREADABLE
        if mark and mark.buffer and _MARKED_WORD.match(mark.buffer[mark.index - 1 :]):
            hint = QUOTED
        problems.append(Problem(f"invalid YAML: {what}", where, "", hint))
    return Node("", origin)


def lines(node: Node, indent: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (line of YAML, origin) for a mapping, with sections as blocks and lists on one line."""
    assert isinstance(node.value, dict)
    for key, child in node.value.items():
        name = " " * indent + str(_key(key))
        if isinstance(child.value, dict) and child.value:
            yield f"{name}:", ""
            yield from lines(child, indent + 2)
        else:
            yield f"{name}: {child}", _origin(child)


def _origin(node: Node) -> str:
    """Origin of a node, and for a list also of the items that overrides replaced."""
    items = node.value if isinstance(node.value, list) else []
    return ", ".join(dict.fromkeys([node.origin, *(item.origin for item in items if item.is_flag)]))


def _key(text: str) -> Node:
    """Node of a mapping's key, quoted if a YAML reader could take it for something other than text."""
    return Node(text, "", quoted=is_misread(text) or text in NULL_WORDS)


def _to_yaml(node: Node) -> yaml.Node:
    if isinstance(node.value, dict):
        pairs = [(_to_yaml(_key(key)), _to_yaml(child)) for key, child in node.value.items()]
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=True)
    if isinstance(node.value, list):
        items = [_to_yaml(item) for item in node.value]
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=True)
    # none may be one of the values that a field lists: it is shown as it was written.
    text = "null" if node.is_null and node.value not in _NONE_WORDS else node.value
    if "\n" in text or not text.isprintable():
        return yaml.ScalarNode("tag:yaml.org,2002:str", text, style='"')
    if node.quoted:
        return yaml.ScalarNode("tag:yaml.org,2002:str", text, style="'")
    resolver: Any = _RESOLVER
    return yaml.ScalarNode(resolver.resolve(yaml.ScalarNode, text, (True, False)), text)


class _Reader(yaml.SafeLoader):
    """Composes YAML without constructing objects; reports tags, duplicate keys and oversized documents."""

    def __init__(self, text: str, origin: str, problems: list[Problem], *, lines: bool) -> None:
        self.origin, self.problems, self.lines = origin, problems, lines
        self.depth = self.num_nodes = 0
        super().__init__(text)

    def place(self, mark: yaml.Mark) -> str:
        return f"{self.origin}:{mark.line + 1}" if self.lines else self.origin

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None):
            self._note(
                "YAML tags are not allowed",
                self.place(event.start_mark),
                event.tag,
                "remove the tag; the key determines the type of its value",
            )
        # PyYAML composes nodes recursively: deep nesting would end in a RecursionError.
        self.depth += 1
        self._limit(self.depth, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _note(self, what: str, where: str, value: str, hint: str) -> None:
        self.problems.append(Problem(what, where, value, hint))

    def node(self, tree: yaml.Node, origin: str, depth: int = 0) -> Node:
        """Convert the tree with aliases expanded, so that an override changes only one place."""
        self.num_nodes += 1
        self._limit(depth, tree.start_mark)
        if isinstance(tree, yaml.MappingNode):
            return Node(self._mapping(tree, depth), origin)
        if isinstance(tree, yaml.SequenceNode):
            items = [(item, self.place(item.start_mark)) for item in tree.value]
            return Node([self.node(item, place, depth + 1) for item, place in items], origin)
        assert isinstance(tree, yaml.ScalarNode)
        return Node(tree.value, origin, quoted=tree.style is not None)

    def _mapping(self, tree: yaml.MappingNode, depth: int) -> dict[str, Node]:
        mapping: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        first: dict[str, str] = {}
        for key, value in tree.value:
            where = self.place(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                self._note("keys must be single words", where, "", UNREADABLE)
            elif key.value in first:
                self._note(
                    f"duplicate key {key.value!r}",
                    where,
                    "",
                    f"remove one of them; the other is at {first[key.value]}",
                )
            elif key.tag == "tag:yaml.org,2002:merge":
                first[key.value] = where
                merged = self._merged(value, where, depth)
            else:
                first[key.value] = where
                mapping[key.value] = self.node(value, where, depth + 1)
        # The keys of the mapping itself take precedence, wherever the merge key is.
        return merged | mapping

    def _merged(self, value: yaml.Node, where: str, depth: int) -> dict[str, Node]:
        """Return the keys that a merge key (``<<``) adds. In a list of mappings, an earlier one takes precedence.

        PyYAML's flatten_mapping builds lists of all keys before they are counted, without end for merges of merges.
        """
        node = self.node(value, where, depth + 1)
        keys: dict[str, Node] = {}
        for each in node.value if isinstance(node.value, list) else [node]:
            if isinstance(each.value, dict):
                keys = each.value | keys
            else:
                self._note(
                    "a merge key (<<) needs a mapping or a list of mappings",
                    where,
                    str(each),
                    "write <<: *anchor",
                )
        return keys

    def _limit(self, depth: int, mark: yaml.Mark) -> None:
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=mark
            )
        if self.num_nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES} values", problem_mark=mark)
