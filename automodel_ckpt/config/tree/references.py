"""References to other keys, ``${section.key}``, and to environment variables, ``${oc.env:NAME}``.

No other interpolations exist. The grammar is a part of omegaconf's. It is parsed here alone, so that all code agrees on
which variables a text reads.

References to keys are replaced in the tree of the recipe after the overrides, so that an override of a key also changes
the values that refer to it. A value keeps its own file and line. References to environment variables are copied there
as they are written, because their values may be secret.

Resolved values go into the typed configuration alone; whatever is printed or saved shows the reference, and so do the
messages of errors that come up later (``errors.without_hidden``).
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.config.schema_keys import closest, default_at, join, keys_of
from automodel_ckpt.config.tree.yaml_tree import MAX_NODES, Node
from automodel_ckpt.errors import Problem, hide

ALLOWED = "write ${section.key}, ${oc.env:NAME} or ${oc.env:NAME,default}; \\${ is a literal ${"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of the name of an environment variable. Names are written into shell scripts and manifests."""
SECRET_NAME = re.compile(
    r"TOKEN(?!I[SZ])|SECRET|PASS|KEY|CRED|AUTH|COOKIE|PRIVATE|JWT|CONNECTION_STRING", re.IGNORECASE
)
"""What the name of a variable contains if its value is a secret. A TOKENIZER is none."""
KEY_REFERENCE = re.compile(r"(?<!\\)\$\{(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")
"""A reference to another key. After a backslash, even an escaped one, there is none."""
_OPENING = re.compile(r"(?P<slashes>\\*)\$\{")
# No backslashes in defaults: omegaconf reads them in another way than at the top. Possessive quantifiers: otherwise
# spaces without a closing brace take cubic time.
_REFERENCE = re.compile(
    rf"""oc\.env:[ \t]*+(?P<name>{VARIABLE})[ \t]*+(?:,[ \t]*+(?:
    '(?P<single>(?:[^\\$']|\$(?!\{{))*+)'|"(?P<double>(?:[^\\$"]|\$(?!\{{))*+)"|
    (?P<plain>(?:[^\\${{}},'"]|\$(?!\{{))*+))[ \t]*+)?\}}""",
    re.ASCII | re.VERBOSE,
)
_SHELL = re.compile(r"(?<!\\)\$(?P<name>[A-Za-z_]\w*)")
_PATH = re.compile(
    r"(.*_)?(path|paths|dir|directory|file|files|folder|root|url|uri|template)|from_pretrained|restore_from|reference|"
    "card|collection|extends"
)
"""The names of keys with values that can be paths."""


def shell_variable(name: str, text: str) -> str | None:
    """The hint for a variable as in a shell, such as $HOME, in the value of a key *name* that is a path.

    Returns None without one, and for templates.
    """
    found = _SHELL.search(text) if _PATH.fullmatch(name) and "{{" not in text else None
    return f"write ${{oc.env:{found['name']}}}" if found else None


class ReferenceFailed(Exception):
    """A reference is malformed or its variable is not set. Neither message nor hint contains a value."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


@dataclass(frozen=True)
class _Reference:
    """A variable and its default; None: it has no default."""

    name: str
    default: str | None


def variables_in(tree: Node) -> dict[str, bool]:
    """Map the environment variables that a recipe refers to, sorted, to whether a reference has no default."""
    names: dict[str, bool] = {}
    for _, node in tree.walk():
        for part in _parts(node.value) if isinstance(node.value, str) else ():
            if isinstance(part, _Reference):
                names[part.name] = names.get(part.name, False) or part.default is None
    return dict(sorted(names.items()))


def is_reference(text: str) -> bool:
    """Whether *text* has a ``${`` that is not escaped. As in omegaconf, an odd number of backslashes makes it text."""
    return any(len(match["slashes"]) % 2 == 0 for match in _OPENING.finditer(text))


def resolve(text: str) -> str | None:
    """Replace the references in *text*. Returns None for a reference with the default null."""
    return resolve_with_names(text)[0]


def resolve_with_names(text: str) -> tuple[str | None, list[str]]:
    """Replace the references in *text*, and return with it the names of the variables with a value in the result.

    Returns None as the text of a reference with the default null.

    Raises:
        ReferenceFailed: for other interpolations, and for a variable that is not set and has no default.
    """
    if "${" not in text:
        return text, []
    parts = _parts(text)
    used: list[str] = []
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.name in os.environ:
            used.append(part.name)
            texts.append(os.environ[part.name])
        elif part.default is not None:
            texts.append(part.default)
        else:
            raise ReferenceFailed(
                f"environment variable {part.name} is not set",
                f"set it, or write ${{oc.env:{part.name},default}}",
            )
    value = "".join(texts)
    for name in used:
        hide(os.environ[name], f"${{oc.env:{name}}}")
    if used:
        hide(value, text)
    is_null = not used and isinstance(parts[0], _Reference) and len(parts) == 1
    return (None if is_null and value.lower() == "null" else value), used


def _parts(text: str) -> list[str | _Reference]:
    """Divide *text* into literal text and references. Raises :class:`ReferenceFailed`."""
    parts: list[str | _Reference] = []
    position = 0
    while match := _OPENING.search(text, position):
        slashes = match["slashes"]
        parts.append(text[position : match.start()] + "\\" * (len(slashes) // 2))
        position = match.end()
        if len(slashes) % 2:
            parts.append("${")
            continue
        found = _REFERENCE.match(text, position)
        if found is None:
            raise ReferenceFailed("unsupported interpolation", ALLOWED)
        name, *defaults = found.groups()
        default = next((each for each in defaults if each is not None), None)
        if found["plain"] is not None:
            default = found["plain"].strip(" \t")
        parts.append(_Reference(name, default))
        position = found.end()
    parts.append(text[position:])
    return [part for part in parts if part != ""]


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

        *chain* contains the keys with the references that led here.
        """
        self._num_nodes += 1
        if isinstance(node.value, dict):
            children = {
                name: self.node(child, join(key, name), chain) for name, child in node.children()
            }
            return dataclasses.replace(node, value=children)
        if isinstance(node.value, list):
            items = [self.node(child, join(key, name), chain) for name, child in node.children()]
            return dataclasses.replace(node, value=items)
        return self._scalar(node, (*chain, key))

    def _scalar(self, node: Node, chain: tuple[str, ...]) -> Node:
        assert isinstance(node.value, str)
        if "${" not in node.value:
            return node.copy()
        whole = KEY_REFERENCE.fullmatch(node.value)
        if whole:
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
            self._note(
                f"${{{match['key']}}} is a section or a list, which text cannot contain",
                node,
                "refer to a single value",
            )
            return match[0]
        return found.value

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
