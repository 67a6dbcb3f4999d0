"""The rows of the mapping from NeMo AutoModel's recipe keys to the keys of this program, and how they are applied.

A row consumes one key of a section of AutoModel's file. What no row consumes stays in the recipe under its name, so
that keys of this program can be written in such a file, and every other key is an error as in any recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from automodel_ckpt.config.automodel.notices import Notice
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.convert import FALSE_WORDS, TRUE_WORDS, untyped
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem

AUTOMODEL_DEFAULT = "default of NeMo AutoModel"
"""The origin of a value that AutoModel uses and the file does not contain."""
GUIDE = "docs/guides/automodel.md lists what is translated"


@dataclass
class Work:
    """The state of one translation: what is left of AutoModel's tree, our tree, and what was decided."""

    source: Node
    recipe: str
    """The name of our recipe: llm_finetune, vlm_finetune, distill, ..."""
    their_class: str
    """The name of AutoModel's recipe class."""
    result: Node = field(default_factory=lambda: Node({}, ""))
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unknown: list[Problem] = field(default_factory=list)
    """Errors about keys that neither program has, in sections of AutoModel."""
    known: set[str] = field(default_factory=set)
    """The dotted keys that rows have looked for, whether or not the file has them: hints suggest these names."""

    @property
    def has_images(self) -> bool:
        """Whether our recipe trains a vision-language model."""
        return self.recipe in ("vlm_finetune", "vlm_distill")

    def section(self, path: str, to: str | None = None) -> Section:
        """Return the view of AutoModel's section at *path*, translated to our section *to* (the same name if None)."""
        if to is None:
            to = path
        return Section(self, path, to)


@dataclass(frozen=True)
class Section:
    """A view of one section: *path* in AutoModel's tree, *to* in ours. Both are empty for the whole file."""

    work: Work
    path: str
    to: str

    @property
    def whole(self) -> Node | None:
        """The node of the section as it is now, whatever its value; None if it does not exist."""
        if not self.path:
            return self.work.source
        return self.work.source.at(self.path)

    @property
    def node(self) -> Node | None:
        """The section as far as it has not been translated yet; None if it does not exist or is not a mapping."""
        node = self.whole
        if node is None or not isinstance(node.value, dict):
            return None
        return node

    @property
    def origin(self) -> str:
        """Where the section begins, for messages."""
        node = self.whole
        if node is None:
            return ""
        return node.origin

    def origin_of(self, name: str) -> str:
        """Where a key is given, for messages; the section's origin if the key is missing or null."""
        node = self.peek(name)
        if node is None:
            return self.origin
        return node.origin

    def inner(self, name: str, to: str | None = None) -> Section:
        """Return the view of a subsection, translated to *to* (a complete key)."""
        if to is None:
            to = join(self.to, name)
        return Section(self.work, join(self.path, name), to)

    def peek(self, name: str) -> Node | None:
        """Return the node at a dotted name; None if it does not exist or is null."""
        self.work.known.add(join(self.path, name))
        if self.node is None:
            return None
        node = self.node.at(name)
        if node is None or node.is_null:
            return None
        return node

    def has(self, name: str) -> bool:
        """Whether the section has a dotted name, possibly with the value null."""
        return self.node is not None and self.node.at(name) is not None

    def take(self, name: str, *, is_ours: bool = True) -> Node | None:
        """Remove and return the node at a dotted name; None if it does not exist or is null.

        *is_ours* is false for a name that is certainly no key of this program.
        """
        self.work.known.add(join(self.path, name))
        parent, _, last = name.rpartition(".")
        section = self.node
        if section is not None and parent:
            section = section.at(parent)
        if section is None or not isinstance(section.value, dict):
            return None
        node = section.value.get(last)
        # A null flag may be meant for a key of this program, where null can differ from no key.
        if node is None or (node.is_null and node.is_flag and is_ours):
            return None
        del section.value[last]
        if node.is_null:
            return None
        return node

    def put(self, name: str, node: Node, *, was: str = "") -> None:
        """Set a key of our section. *was* is AutoModel's name for it, for the notices."""
        put(self.work.result, join(self.to, name), node)
        if was and join(self.path, was) != join(self.to, name):
            self.translated(was, node, join(self.to, name))

    def translated(self, name: str, node: Node, to: str) -> None:
        """Record that a key became our key *to*, or is implied by it."""
        self.work.notices.append(Notice("renamed", join(self.path, name), node.origin, to))

    def put_default(self, name: str, value: str) -> None:
        """Write a default of AutoModel that differs from ours."""
        node = Node(value, AUTOMODEL_DEFAULT)
        put(self.work.result, join(self.to, name), node, section_origin=self.origin)
        self.work.notices.append(Notice("default", "", "", join(self.to, name)))

    def no_effect(self, name: str, node: Node) -> None:
        """Record a key that means nothing here."""
        self._note("no effect", name, node)

    def degraded(self, name: str, node: Node, text: str) -> None:
        """Record a key that is replaced by something weaker or different, with a warning."""
        key = join(self.path, name)
        if isinstance(node.value, str):
            key = f"{key} {node}"
        self.work.notices.append(Notice("degraded", key, node.origin, text=text))

    def note(self, name: str, node: Node, text: str) -> None:
        """Record what a user should know about a key that was translated."""
        self._note("note", name, node, text)

    def _note(self, kind: str, name: str, node: Node, text: str = "") -> None:
        key = join(self.path, name)
        notice = Notice(kind, key, node.origin, text=text)  # type: ignore[arg-type]
        self.work.notices.append(notice)

    def reject(self, name: str, node: Node, what: str, hint: str) -> None:
        """Add an error for a key whose feature does not exist here."""
        value = ""
        if isinstance(node.value, str):
            value = str(node)
        problem = Problem(f"{join(self.path, name)}: {what}", node.origin, value, hint)
        self.work.problems.append(problem)


def put(root: Node, key: str, node: Node, *, section_origin: str = "") -> None:
    """Set the node at a dotted key of a tree of mappings, and create missing sections.

    These have the *section_origin*, by default that of the node.
    """
    section = root
    *parents, last = key.split(".")
    for part in parents:
        assert isinstance(section.value, dict)
        section = section.value.setdefault(part, Node({}, section_origin or node.origin))
    assert isinstance(section.value, dict)
    section.value[last] = node


def is_true(node: Node | None) -> bool:
    """Whether a node is a word that means true."""
    if node is None or not isinstance(node.value, str):
        return False
    return node.value.lower() in TRUE_WORDS


def is_enabled(node: Node) -> bool:
    """Whether a value requests something: not null, false, 0 or a section whose ``enabled`` is false."""
    if isinstance(node.value, dict):
        switch = node.at("enabled") or node.at("enable")
        return switch is None or is_true(switch)
    return bool(value_of(node))


def value_of(node: Node | None) -> object:
    """The Python value of a scalar, as YAML 1.2 reads it; None for no node, and for a list or mapping."""
    if node is None or not isinstance(node.value, str):
        return None
    return untyped(node.value, quoted=node.quoted)


def above_1(node: Node) -> bool:
    """Whether a node is a number above 1."""
    value = value_of(node)
    return isinstance(value, int | float) and value > 1


@dataclass(frozen=True)
class Key:
    """A key that has a counterpart here: *to* is our key in the section (empty: the same name).

    *words* replaces values (an empty replacement leaves the key out), *default* is AutoModel's default where ours
    differs, and *where* an absolute key of ours in another section.
    """

    name: str
    to: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    where: str = ""

    def apply(self, section: Section) -> None:
        """Move the key, or write AutoModel's default."""
        # A null that is written out means no value, also where the default is one.
        is_given = section.has(self.name)
        to = self.where or self.to or self.name
        node = section.take(self.name, is_ours=to == self.name)
        target = section
        if self.where:
            target = replace(section, to="")
        if node is None:
            if self.default is not None and not is_given:
                target.put_default(to, self.default)
            return
        if isinstance(node.value, str) and node.value in self.words:
            word = self.words[node.value]
            if not word:
                section.no_effect(self.name, node)
                return
            node = replace(node, value=word, quoted=False)
        target.put(to, node, was=self.name)


@dataclass(frozen=True)
class NoEffect:
    """Keys that mean nothing here, or that this program determines itself."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def apply(self, section: Section) -> None:
        """Remove the keys and record them."""
        for name in self.names:
            node = section.take(name)
            if node is not None:
                section.no_effect(name, node)


def take_request(section: Section, name: str, when: Callable[[Node], bool]) -> Node | None:
    """Remove a key, and return its node if the value requests something (*when* is true), else None.

    A value that requests nothing, such as false, is recorded as a key without effect.
    """
    node = section.take(name)
    if node is None or when(node):
        return node
    section.no_effect(name, node)
    return None


def switch(section: Section, name: str) -> bool:
    """Whether a key that has not been removed is true; false without the key. Another word is an error."""
    node = section.peek(name)
    if node is None or is_true(node):
        return node is not None
    if str(node.value).lower() not in FALSE_WORDS:
        section.reject(name, node, "must be true or false", "correct the value")
    return False


@dataclass(frozen=True)
class Degraded:
    """A key that is replaced by something weaker or different: *instead* names the replacement.

    If *when* is false for the value, the key has no effect.
    """

    name: str
    instead: str
    when: Callable[[Node], bool] = is_enabled

    def apply(self, section: Section) -> None:
        """Remove the key, and warn if it requests something."""
        node = take_request(section, self.name, self.when)
        if node is not None:
            section.degraded(self.name, node, self.instead)


@dataclass(frozen=True)
class Needs:
    """A key that needs a feature which does not exist here: an error, unless *when* is false for the value."""

    name: str
    feature: str
    hint: str
    when: Callable[[Node], bool] = is_enabled

    def apply(self, section: Section) -> None:
        """Remove the key, and reject it if it requests something."""
        node = take_request(section, self.name, self.when)
        if node is not None:
            section.reject(self.name, node, f"{self.feature} is not supported", self.hint)


@dataclass(frozen=True)
class Steps:
    """Rows that depend on several keys: *function* consumes the keys in *names* (for readers of the table)."""

    function: Callable[[Section], None]
    names: tuple[str, ...] = ()

    def apply(self, section: Section) -> None:
        """Call the function."""
        self.function(section)


Row = Key | NoEffect | Degraded | Needs | Steps


def apply_rows(rows: Sequence[Row], section: Section) -> None:
    """Apply rows in order. Defaults are written even if the file does not have the section."""
    for row in rows:
        row.apply(section)


def take_target(section: Section) -> str:
    """Remove and return the ``_target_`` of a section; empty if it has none."""
    node = section.take("_target_")
    if node is None:
        return ""
    return str(node.value)


def is_of_automodel(target: str) -> bool:
    """Whether a dotted name is in AutoModel's package."""
    return target.partition(".")[0] == "nemo_automodel"
