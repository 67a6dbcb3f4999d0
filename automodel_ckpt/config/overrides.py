"""The command line of ``ckpt-train``: launch flags, one recipe file, and overrides of its keys."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from automodel_ckpt.config.bind import LISTED, Binder
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import (
    annotation_at,
    closest,
    default_at,
    hints_of,
    is_number,
    with_underscores,
)
from automodel_ckpt.config.tree.convert import FALSE_WORDS, TRUE_WORDS, members
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.yaml_tree import NULL_WORDS, Node, read_text
from automodel_ckpt.errors import Problem

MODES = {
    "data": ["DATA"],
    "lora": [],
    "help": [],
    "version": [],
    "print_config": [],
    "convert_recipe": [],
    "dry_run": [],
    "device_memory": ["SIZE"],
    "show_samples": ["N"],
    "write_launcher": ["KIND"],
    "output": ["FILE"],
    "time_limit": ["TIME"],
    "image": ["IMAGE"],
    "volume_claim": ["NAME"],
    "list": [],
    "schema": [],
    "copy": ["NAME", "DIR"],
    "selftest_resume": [],
    "selftest_steps": ["N"],
    "selftest_nproc": ["N"],
    "json": [],
}
"""Options that do something other than training, or replace the recipe, with the names of their arguments."""
VERBOSE = ("-v", "--verbose")
"""Short forms of ``--logging.level debug``."""
_SUFFIXES = (".yaml", ".yml")
_CONFIG = ("config", "config_file")
"""Options of other programs with the recipe as their value."""
_RUN_DIRECTORY = "checkpoint.checkpoint_dir"
_LAUNCH = typing.get_type_hints(LaunchFlags)


@dataclass(frozen=True)
class Override:
    """A dotted key and the value that the command line gives it.

    With *is_below*, the value is the name of a directory in the one that the recipe gives (``--run-name``).
    """

    key: str
    node: Node
    is_below: bool = False


@dataclass
class CommandLine:
    """A parsed command line. ``words`` are positional arguments; ``problems`` are arguments that cannot be parsed."""

    words: list[str] = field(default_factory=list)
    overrides: list[Override] = field(default_factory=list)
    flags: LaunchFlags = field(default_factory=LaunchFlags)
    modes: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> CommandLine:
    """Parse a command line; flags, recipe and overrides may be in any order."""
    words = list(arguments)
    parser = _Parser()
    while words:
        parser.take(words)
    return parser.finish()


class _Parser:
    """Parses arguments from left to right. Binding the launch flags, in :meth:`finish`, is the last step."""

    def __init__(self) -> None:
        self.line = CommandLine()
        self.launch: dict[str, Node] = {}

    def take(self, words: list[str]) -> None:
        """Parse the first argument, and remove it and its value from ``words``."""
        word = words.pop(0)
        if word == "-h":
            self.line.modes["help"] = []
        elif word == "-c":
            self._recipe(word, None, words)
        elif word in VERBOSE:
            self.line.overrides.append(Override("logging.level", Node("debug", word)))
        elif not word.startswith("-") or word == "-":
            self.line.words.append(word)
        elif not word.startswith("--") or word == "--":
            self._note(word, f"unknown argument {word}", LISTED)
        else:
            flag, equals, value = word.partition("=")
            self._option(flag, value if equals else None, words)

    def finish(self) -> CommandLine:
        if run_name := self.launch.get("run_name"):
            self.line.overrides.append(Override(_RUN_DIRECTORY, run_name, is_below=True))
        tree = Node(dict(self.launch), "command line")
        flags = Binder(LaunchFlags, self.line.problems).section(LaunchFlags, tree, "")
        if isinstance(flags, LaunchFlags):  # INVALID otherwise, with a problem in the line
            self.line.flags = flags
        return self.line

    def _option(self, flag: str, value: str | None, words: list[str]) -> None:
        name = flag[2:].replace("-", "_")
        if name in MODES:
            self._mode(flag, name, value, words)
        elif name in _LAUNCH:
            self._launch(flag, name, value, words)
        elif name in _CONFIG:
            self._recipe(flag, value, words)
        elif meant := self._meant_flag(name):
            hint = f"did you mean --{meant.replace('_', '-')}?"
            self._note(flag, f"unknown option {flag}", hint)
        else:
            self._override(flag, value, words)

    def _mode(self, flag: str, name: str, value: str | None, words: list[str]) -> None:
        names = MODES[name]
        if name == "help":
            # Optional: what follows can also be the recipe, or another option.
            is_topic = words and not words[0].startswith("-") and not words[0].endswith(_SUFFIXES)
            names = ["TOPIC"] if value is not None or is_topic else []
        given = [value] if value is not None else words[: len(names)]
        if len(given) != len(names):
            expected = " ".join(names) or "no value"
            self._note(flag, f"{flag} takes {expected}", LISTED)
            return
        if value is None:
            del words[: len(given)]
        self.line.modes[name] = given

    def _launch(self, flag: str, name: str, value: str | None, words: list[str]) -> None:
        if value is None:
            value = self._next(flag, words)
        if value is None:
            return
        # Quoted: a job ID such as null or none is text, not the absence of a value.
        node = Node(value, flag, quoted=True)
        if name == "trust":
            items = self.launch.setdefault(name, Node([], flag)).value
            assert isinstance(items, list)
            items.append(node)
        else:
            self.launch[name] = node

    def _override(self, flag: str, value: str | None, words: list[str]) -> None:
        """Parse ``--key value``. The type of the key decides whether the next argument is its value."""
        key = with_underscores(RecipeConfig, flag[2:])
        if value is None:
            value = self._value_of(flag, annotation_at(RecipeConfig, key) or Any, words)
        if value is not None:
            # An empty value of the shell is empty text. Unquoted, it would mean an empty section.
            node = Node(value, flag, quoted=value == "")
            self.line.overrides.append(Override(key, node))

    def _value_of(self, flag: str, annotation: Any, words: list[str]) -> str | None:
        """Take the value of a key from the next argument; ``true`` for a boolean without a value."""
        kinds = members(annotation)
        if bool in kinds and set(kinds) <= {bool, type(None)}:
            accepted = TRUE_WORDS | FALSE_WORDS
            if type(None) in kinds:
                accepted |= NULL_WORDS
            # The next argument may be the recipe: --deterministic recipe.yaml.
            is_value = words and {words[0], words[0].lower()} & accepted
            return words.pop(0) if is_value else "true"
        is_last = not words or words[0].startswith("--")
        # Words other than true and false: --model.activation_checkpointing recipe.yaml.
        is_switch = bool in kinds and any(
            typing.get_origin(kind) is typing.Literal for kind in kinds
        )
        has_no_value = is_last or (is_switch and words[0].endswith(_SUFFIXES))
        if has_no_value and (is_switch or Any in kinds):
            return "true"
        return self._next(flag, words)

    def _next(self, flag: str, words: list[str]) -> str | None:
        # Only two dashes begin an option: -1 is a value.
        if words and not words[0].startswith("--"):
            return words.pop(0)
        self._note(flag, f"{flag} needs a value", f"write {flag} VALUE or {flag}=VALUE")
        return None

    def _recipe(self, flag: str, value: str | None, words: list[str]) -> None:
        """Take the recipe of ``-c FILE``, as other programs name it."""
        path = self._next(flag, words) if value is None else value
        if path is not None:
            self.line.words.append(path)

    def _meant_flag(self, name: str) -> str | None:
        if "." in name or name in hints_of(RecipeConfig) or name in OTHER_NAMES:
            return None
        return closest(name, [*_LAUNCH, *MODES])

    def _note(self, flag: str, what: str, hint: str) -> None:
        self.line.problems.append(Problem(what, flag, "", hint))


def graft(root: Node, override: Override, problems: list[Problem]) -> None:
    """Insert an override's value into the tree, and create missing sections."""
    if override.is_below:
        override = Override(override.key, _below(root, override))
    origin = override.node.origin
    *parents, last = override.key.split(".")
    try:
        section = _container(root, origin, problems)
        for part in parents:
            section = _container(_child(section, part, origin), origin, problems)
        _put(section, last, override.node)
    except LookupError as error:
        problems.append(
            Problem(
                f"{override.key} cannot be set: {error}",
                origin,
                override.node,
                "ckpt-train --print-config shows the current values",
            )
        )


def _below(root: Node, override: Override) -> Node:
    """The path of the directory with the name *override* in the one that the tree has at its key, or in the default."""
    present = root.at(override.key)
    if present is None or not isinstance(present.value, str) or present.is_null:
        present = default_at(RecipeConfig, override.key)
        assert present is not None
    return dataclasses.replace(
        override.node,
        value=f"{str(present.value).rstrip('/')}/{override.node.value}",
        is_indirect=not present.is_from_user,
    )


def _container(node: Node, origin: str, problems: list[Problem]) -> Node:
    """Return *node* as a mapping or list: text of a flag is parsed, and null becomes a section. Raises LookupError."""
    if isinstance(node.value, str):
        if node.is_flag and node.value[:1] in ("[", "{"):
            node.value = read_text(node.value, node.origin, problems).value
        elif node.is_null:
            node.value, node.origin = {}, origin
        else:
            raise LookupError(f"the value {node} ({node.origin}) is not a section")
    return node


def _child(node: Node, part: str, origin: str) -> Node:
    if isinstance(node.value, list):
        return node.value[_index(node.value, part, len(node.value) - 1)]
    assert isinstance(node.value, dict)
    return node.value.setdefault(part, Node({}, origin))


def _put(node: Node, part: str, value: Node) -> None:
    value = value.copy()  # an override can be applied to several trees
    if isinstance(node.value, list):
        index = _index(node.value, part, len(node.value))
        node.value[index : index + 1] = [value]
    elif isinstance(node.value, dict):
        node.value[part] = value


def _index(items: list[Node], part: str, last: int) -> int:
    if not is_number(part) or int(part) > last:
        raise LookupError(f"index {part} is out of range for a list of {len(items)} items")
    return int(part)
