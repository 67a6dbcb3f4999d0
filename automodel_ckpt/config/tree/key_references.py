"""References to other keys of the recipe, such as ``${checkpoint.checkpoint_dir}``, replaced by the values.

They are replaced in the tree of the recipe after the overrides, so that an override of a key also changes the values
that refer to it. A value keeps its own file and line. References to environment variables (``references.py``) are
copied as they are written, because their values may be secret.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from automodel_ckpt.config.defaults import default_node
from automodel_ckpt.config.schema_keys import closest, hints_of, join, keys_of
from automodel_ckpt.config.tree.convert import members, section_type
from automodel_ckpt.config.tree.references import KEY_REFERENCE
from automodel_ckpt.config.tree.yaml_tree import MAX_NODES, Node
from automodel_ckpt.errors import Problem

_MAX_CHARACTERS = 100_000
"""Maximum length of a value: a few references that double a text would otherwise fill the memory."""


def resolve_keys(root: Node, schema: type[Any], problems: list[Problem]) -> Node:
    """Return a copy of a recipe's tree in which references to keys are replaced by the values of these keys.

    A value that is one reference becomes a copy of the node, which can be a list or a section. Within other text, the
    reference must be to a single value. A key that the recipe does not give has its default in *schema*. Adds a
    problem for each reference to an unknown key, to a section within text, or to itself.
    """
    resolver = _Resolver(root, schema, problems)
    return resolver.node(root, "", ())


class _Resolver:
    def __init__(self, root: Node, schema: type[Any], problems: list[Problem]) -> None:
        self._root = root
        self._schema = schema
        self._problems = problems
        self._num_nodes = 0

    def node(self, node: Node, key: str, chain: tuple[str, ...]) -> Node:
        """Return a copy of *node*, which is found at *key*, without references.

        *chain* contains the keys whose references led here.
        """
        self._num_nodes += 1
        if isinstance(node.value, dict):
            children = {}
            for name, child in node.value.items():
                children[name] = self.node(child, join(key, name), chain)
            return dataclasses.replace(node, value=children)
        if isinstance(node.value, list):
            items = []
            for index, child in enumerate(node.value):
                items.append(self.node(child, join(key, str(index)), chain))
            return dataclasses.replace(node, value=items)
        return self._scalar(node, (*chain, key))

    def _scalar(self, node: Node, chain: tuple[str, ...]) -> Node:
        assert isinstance(node.value, str)
        if "${" not in node.value:
            return node.copy()
        whole = KEY_REFERENCE.fullmatch(node.value)
        if whole and not whole["slashes"]:
            found = self._lookup(whole["key"], node, chain)
            if found is None:
                return node.copy()
            return dataclasses.replace(found, origin=node.origin, is_indirect=True)
        text = KEY_REFERENCE.sub(lambda match: self._text_of(match, node, chain), node.value)
        if len(text) > _MAX_CHARACTERS:
            self._note("the text with its references is too long", node, "write a shorter text")
            return node.copy()
        is_indirect = node.is_indirect or text != node.value
        return dataclasses.replace(node, value=text, is_indirect=is_indirect)

    def _text_of(self, match: re.Match[str], node: Node, chain: tuple[str, ...]) -> str:
        """The text that replaces one reference within other text."""
        found = self._lookup(match["key"], node, chain)
        if found is None:
            return match[0]
        if not isinstance(found.value, str):
            what = f"${{{match['key']}}} is a section or a list, which text cannot contain"
            self._note(what, node, "refer to a single value")
            return match[0]
        if found.value.startswith("${"):
            # The backslashes are read together with this reference to an environment variable.
            return match["slashes"] + found.value
        # Two backslashes are one, as in omegaconf.
        return match["slashes"][::2] + found.value

    def _lookup(self, key: str, node: Node, chain: tuple[str, ...]) -> Node | None:
        """Return the value at *key* without references. Adds a problem, and returns None, if there is none."""
        contains_itself = any(each == key or each.startswith(f"{key}.") for each in chain)
        if contains_itself or self._num_nodes > MAX_NODES:
            self._note(f"${{{key}}} refers to itself", node, "remove one of the references")
            return None
        found = self._root.at(key) or default_at(self._schema, key)
        if found is not None:
            return self.node(found, key, chain)
        meant = closest(key, keys_of(self._schema))
        variable = "NAME" if "." in key or "-" in key else key
        hint = f"an environment variable is ${{oc.env:{variable}}}"
        if meant:
            hint = f"did you mean ${{{meant}}}?"
        self._note(f"${{{key}}} refers to a key that does not exist", node, hint)
        return None

    def _note(self, what: str, node: Node, hint: str) -> None:
        hint = f"{hint}; \\${{ is a literal ${{"
        self._problems.append(Problem(what, node.origin, str(node), hint))


def default_at(schema: type[Any], key: str) -> Node | None:
    """The node of the default of the field at a dotted key of *schema*; None if it has no such field."""
    section: type[Any] | None = schema
    *parents, last = key.split(".")
    for name in parents:
        section = section_type(members(hints_of(section).get(name, Any))) if section else None
    if section is None:
        return None
    for field in dataclasses.fields(section):
        if field.name == last:
            return default_node(field, hints_of(section)[last])
    return None
