"""Canonical YAML scalars: a validated recipe is rewritten so that every YAML reader parses the same values.

YAML 1.1 and 1.2 differ (``1e-5`` and ``017`` are text and a number in one, a number and text in the other), and a
field's type decides here. Printed and saved recipes therefore contain ``true``, ``1.0e-05``, ``17`` or ``'017'``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from automodel_ckpt.config.keys.optimizer import OptionsGroup
from automodel_ckpt.config.tree.references import is_reference
from automodel_ckpt.config.tree.rules import Target, own_keys
from automodel_ckpt.config.tree.yaml_tree import Node, is_misread, scalar_text, untyped


def canonical_tree(node: Node, value: Any, *, with_arguments: bool) -> Node:
    """Return a copy of *node* whose scalars are written as the typed *value* that was converted from it.

    References to environment variables are copied as written. Without ``with_arguments``, the numbers among the
    arguments of a plug-in are copied as written too, because the types of the parameters are not known yet.
    """
    if isinstance(node.value, str):
        return _canonical_scalar(node, value)
    if isinstance(value, Target | OptionsGroup):
        values = {name: getattr(value, name) for name in own_keys(value)}
        arguments = value.kwargs
    else:
        values = _items(value)
        arguments = {}
    children = {}
    for name, child in node.children():
        if name in arguments and not with_arguments:
            children[name] = _quote_words(child)
        elif name in arguments or name in values:
            item = arguments[name] if name in arguments else values[name]
            children[name] = canonical_tree(child, item, with_arguments=with_arguments)
        else:
            children[name] = child.copy()
    return _with_children(node, children)


def _items(value: Any) -> dict[str, Any]:
    """Map the keys of a section or mapping, or the indices of a list, to the values."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): item for name, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): item for index, item in enumerate(value)}
    return {}


def _with_children(node: Node, children: dict[str, Node]) -> Node:
    """Return a copy of a mapping or list with other children."""
    if isinstance(node.value, list):
        return dataclasses.replace(node, value=list(children.values()))
    return dataclasses.replace(node, value=children)


def _quote_words(node: Node) -> Node:
    """Return a copy with quotes around words that other YAML readers would not parse as text."""
    if not isinstance(node.value, str):
        children = {name: _quote_words(child) for name, child in node.children()}
        return _with_children(node, children)
    is_text = isinstance(untyped(node.value), str)
    if node.is_null or not is_text:
        return node.copy()
    return _canonical_scalar(node, node.value)


def _canonical_scalar(node: Node, value: Any) -> Node:
    assert isinstance(node.value, str)
    if is_reference(node.value):
        return node.copy()
    if isinstance(value, str | Path):
        return dataclasses.replace(node, quoted=node.quoted or is_misread(node.value))
    if value is None or type(value) in (bool, int, float):
        return dataclasses.replace(node, value=scalar_text(value), quoted=False)
    return node.copy()
