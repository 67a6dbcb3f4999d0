"""Canonical YAML scalars: a validated recipe is rewritten so that every YAML reader parses the same values.

YAML 1.1 and 1.2 differ (``1e-5`` and ``017`` are text and a number in one, a number and text in the other), and a
field's type decides here. What is printed and saved therefore says ``true``, ``1.0e-05``, ``17`` or ``'017'``.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import yaml

from automodel_ckpt.config.convert import untyped
from automodel_ckpt.config.references import is_reference
from automodel_ckpt.config.schema import OptionsGroup, Target, own_keys
from automodel_ckpt.config.yaml_tree import Node

_RESOLVER: Any = yaml.SafeLoader("")


def settle(node: Node, value: Any, *, with_arguments: bool) -> None:
    """Rewrite the scalars of *node* in place to match the typed *value* converted from it. References stay.

    Without ``with_arguments`` the numbers among a plug-in's arguments stay as written, since their types are not known.
    """
    if isinstance(value, Target | OptionsGroup):
        for name, argument in value.kwargs.items():
            _settle_child(node, name, argument, with_arguments=with_arguments, is_argument=True)
        for name in own_keys(value):
            _settle_child(node, name, getattr(value, name), with_arguments=with_arguments)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _settle_child(
                node, field.name, getattr(value, field.name), with_arguments=with_arguments
            )
    elif isinstance(node.value, str):
        _settle_scalar(node, value)
    elif isinstance(value, dict | list | tuple):
        for name, item in dict(value if isinstance(value, dict) else enumerate(value)).items():
            _settle_child(node, str(name), item, with_arguments=with_arguments)


def _settle_child(
    node: Node, name: str, value: Any, *, with_arguments: bool, is_argument: bool = False
) -> None:
    child = dict(node.children()).get(name)
    if child is None:
        return
    if is_argument and not with_arguments:
        _quote_words(child)
    else:
        settle(child, value, with_arguments=with_arguments)


def _quote_words(node: Node) -> None:
    """Quote words that are text here for any type of parameter, but not for other YAML readers."""
    for _, child in node.children():
        _quote_words(child)
    if isinstance(node.value, str) and not node.is_null and isinstance(untyped(node.value), str):
        _settle_scalar(node, node.value)


def _settle_scalar(node: Node, value: Any) -> None:
    assert isinstance(node.value, str)
    if is_reference(node.value):
        return
    if value is None or isinstance(value, bool):
        node.value, node.quoted = "null" if value is None else str(value).lower(), False
    elif type(value) is int:
        node.value, node.quoted = str(value), False
    elif type(value) is float:
        node.value, node.quoted = _number(value), False
    elif isinstance(value, str | Path):
        node.quoted = node.quoted or _is_misread(node.value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")  # YAML 1.1 wants a point


def _is_misread(text: str) -> bool:
    """Whether YAML 1.1 or 1.2 would parse unquoted *text* as something other than text."""
    tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))
    # none without quotes is text only as one of the values that a field lists, and is read as that again.
    return tag != "tag:yaml.org,2002:str" or not isinstance(untyped(text), str | None)
