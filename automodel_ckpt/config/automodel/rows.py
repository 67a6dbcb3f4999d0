"""How the keys of NeMo AutoModel's recipes become keys of this program: sections, and tables of their names.

A table has one line for each key of a section of AutoModel:

    name                          our key has the same name
    name -> key                   our key; /section.key is one of another section
    name -> key @words = value    with words of :data:`WORDS` replaced, and AutoModel's default where ours differs
    - name name                   keys that mean nothing here, or that this program determines itself
    ~ name: text                  replaced by something weaker or different: a warning with this text
    ! name: feature | hint        the feature does not exist here: an error
    * step step                   functions for keys that depend on each other

``~`` and ``!`` apply to values that request something; with ``name in WORD WORD:`` to these words, and with ``name not
in WORD WORD:`` to others. A key that no line names stays in the recipe, so that keys of this program can be written in
such a file, and every other key is an error as in any recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from automodel_ckpt.base.units import counted
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import annotation_at, join
from automodel_ckpt.config.tree.convert import FALSE_WORDS, TRUE_WORDS, members
from automodel_ckpt.config.tree.yaml_tree import Node, untyped
from automodel_ckpt.errors import Problem

AUTOMODEL_DEFAULT = "default of NeMo AutoModel"
"""The origin of a value that AutoModel uses and the file does not contain."""
GUIDE = "docs/guides/automodel.md lists what is translated"
DTYPES = {
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp16": "float16",
    "torch.float16": "float16",
    "fp32": "float32",
    "torch.float32": "float32",
}
"""AutoModel's names of data types -> ours. Others are the same."""
WORDS: dict[str, dict[str, str]] = {
    "dtypes": DTYPES,
    "not_nccl": {"nccl": ""},
    "not_default": {"default": ""},
    "metrics": {"default": "val_loss"},
    "schemes": {"int8_dynact_int4weight": "W4A8", "int4_weight_only": "W4A16"},
    # transformers chooses sdpa for all models that support it, which GPT-OSS does not.
    "attentions": {
        "sdpa": "",
        **dict.fromkeys(
            ("te", "ffpa", "magi", "cudnn", "tilelang"),
            "~transformers does not have this attention; its default is used",
        ),
    },
}
"""Values of AutoModel, and ours; an empty one leaves the key out, and one with ``~`` does so with this warning."""
_NAME = re.compile(
    r"(?P<name>[\w.]+)(?: -> (?P<to>[\w./]+))?(?: @(?P<words>\w+))?(?: = (?P<default>.+))?"
)
_REQUEST = re.compile(r"(?P<name>[\w.]+)(?: (?P<only>not in|in) (?P<words>[^:]+))?: (?P<text>.+)")


@dataclass
class Work:
    """The state of one translation: what is left of AutoModel's tree, our tree, and what was decided."""

    source: Node
    recipe: str
    """The name of our recipe: llm_finetune, vlm_finetune, distill, ..."""
    result: Node = field(default_factory=lambda: Node({}, ""))
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unknown: list[Problem] = field(default_factory=list)
    """Errors about keys that neither program has, in sections of AutoModel."""
    known: set[str] = field(default_factory=set)
    """The dotted keys that were looked for, whether or not the file has them: hints suggest these names."""

    @property
    def has_images(self) -> bool:
        """Whether our recipe trains a vision-language model."""
        return self.recipe in ("vlm_finetune", "vlm_distill")

    def section(self, path: str, to: str | None = None) -> Section:
        """Return the view of AutoModel's section at *path*, translated to our section *to* (the same name if None)."""
        return Section(self, path, path if to is None else to)


@dataclass(frozen=True)
class Section:
    """A view of one section: *path* in AutoModel's tree, *to* in ours. Both are empty for the whole file."""

    work: Work
    path: str
    to: str

    @property
    def node(self) -> Node | None:
        """The section as far as it has not been translated yet. None when it does not exist or is not a mapping."""
        node = self.theirs(self.path)
        return node if node is not None and isinstance(node.value, dict) else None

    @property
    def origin(self) -> str:
        """Where the section begins, for messages."""
        node = self.theirs(self.path) if self.path else None
        return "" if node is None else node.origin

    def theirs(self, key: str) -> Node | None:
        """Return the node at a dotted key of AutoModel's recipe that has not been translated yet."""
        return self.work.source.at(key) if key else self.work.source

    def ours(self, key: str) -> Node | None:
        """Return the node at a dotted key of our recipe."""
        return self.work.result.at(key)

    def names(self) -> list[str]:
        """Return the names of the keys that have not been translated yet."""
        return [] if self.node is None else [name for name, _ in self.node.children()]

    def inner(self, name: str, to: str | None = None) -> Section:
        """Return the view of a subsection, translated to *to* (a complete key)."""
        path = join(self.path, name)
        return Section(self.work, path, join(self.to, name) if to is None else to)

    def get(self, name: str) -> Node | None:
        """Return the node at a dotted name, possibly with the value null. Returns None when it does not exist."""
        self.work.known.add(join(self.path, name))
        return None if self.node is None else self.node.at(name)

    def peek(self, name: str) -> Node | None:
        """Return the node at a dotted name. Returns None when it does not exist or is null."""
        node = self.get(name)
        return None if node is None or node.is_null else node

    def take(self, name: str) -> Node | None:
        """Remove and return the node at a dotted name. Returns None when it does not exist or is null."""
        found = self.peek(name)
        parent, _, last = join(self.path, name).rpartition(".")
        section = self.theirs(parent)
        if section is not None and isinstance(section.value, dict):
            section.value.pop(last, None)
        return found

    def flag(self, name: str) -> Node | None:
        """Remove a key, and return its node if it is true. Another value has no effect."""
        node = self.take(name)
        if node is not None and not is_true(node):
            self.no_effect(name, node)
            return None
        return node

    def is_on(self, name: str) -> bool:
        """Whether a key, which is not removed, is a word that means true. A word without a meaning is an error."""
        node = self.peek(name)
        if node is not None and str(node.value).lower() not in TRUE_WORDS | FALSE_WORDS:
            self.reject(name, node, "must be true or false", "correct the value")
        return is_true(node)

    def text(self, name: str) -> str:
        """Return the value of a key as text; empty without it. It is not removed."""
        node = self.peek(name)
        return "" if node is None else str(node.value)

    def put(self, name: str, node: Node) -> None:
        """Set a key of our section."""
        put(self.work.result, join(self.to, name), node)

    def put_root(self, key: str, node: Node) -> None:
        """Set a key of ours by its whole dotted name."""
        put(self.work.result, key, node)

    def put_default(self, name: str, value: str) -> None:
        """Write a default of AutoModel that differs from ours."""
        key = join(self.to, name)
        put(self.work.result, key, Node(value, AUTOMODEL_DEFAULT), section_origin=self.origin)

    def rename(
        self, name: str, to: str = "", *, words: str = "", default: str | None = None
    ) -> None:
        """Move a key to ours, or write AutoModel's default. The arguments are the parts of a table's line."""
        given = self.get(name)
        node = self.take(name)
        target = replace(self, to="") if to.startswith("/") else self
        to = to.removeprefix("/") or name
        if node is None:
            # A null that is written out means no value, also where the default is one. A null flag may be for our key.
            is_ours = given is not None and given.is_flag and to == name
            if given is None and default is not None:
                target.put_default(to, default)
            elif given is not None and is_ours and not needs_a_value(join(target.to, to)):
                target.put(to, given)
            return
        word = WORDS[words].get(str(node.value)) if words else None
        if word is None:
            target.put(to, node)
        elif word.startswith("~"):
            self.degraded(name, node, word[1:])
        elif word or node.is_flag:
            # A flag of the command line states the value for this program, too.
            target.put(to, replace(node, value=word or node.value, quoted=False))
        else:
            self.no_effect(name, node)

    def drop(self, *names: str) -> None:
        """Remove keys that mean nothing here, or that this program determines itself, and record them."""
        for name in names:
            if node := self.take(name):
                self.no_effect(name, node)

    def no_effect(self, name: str, node: Node) -> None:
        """Record a key that means nothing here."""
        self._notice("no effect", name, node)

    def degraded(self, name: str, node: Node, text: str) -> None:
        """Record a key that is replaced by something weaker or different, with a warning."""
        shown = f"{name} {node}" if isinstance(node.value, str) else name
        self._notice("degraded", shown, node, text)

    def note(self, name: str, node: Node, text: str) -> None:
        """Record what a user should know about a key that was translated."""
        self._notice("note", name, node, text)

    def _notice(self, kind: Kind, name: str, node: Node, text: str = "") -> None:
        self.work.notices.append(Notice(kind, join(self.path, name), node.origin, text=text))

    def reject(self, name: str, node: Node, what: str, hint: str) -> None:
        """Add an error for a key with a feature that does not exist here."""
        value = str(node) if isinstance(node.value, str) else ""
        self.work.problems.append(
            Problem(f"{join(self.path, name)}: {what}", node.origin, value, hint)
        )

    def apply(
        self, table: str, steps: Mapping[str, Callable[[Section], None]] | None = None
    ) -> None:
        """Apply the lines of a table in order. Defaults are written even if the file does not have the section."""
        for line in filter(None, map(str.strip, table.splitlines())):
            mark, _, rest = line.partition(" ")
            if mark == "-":
                self.drop(*rest.split())
            elif mark == "*":
                assert steps is not None
                for step in rest.split():
                    steps[step](self)
            elif mark in ("~", "!"):
                self._apply_request(mark, rest)
            else:
                found = _NAME.fullmatch(line)
                assert found is not None, line
                name, to, words, default = found.groups()
                self.rename(name, to or "", words=words or "", default=default)

    def _apply_request(self, mark: str, line: str) -> None:
        """Remove a key, and warn of it (~) or reject it (!) if its value requests something."""
        found = _REQUEST.fullmatch(line)
        assert found is not None, line
        name, only, words, text = found.groups()
        node = self.take(name)
        if node is None:
            return
        applies = is_enabled(node)
        if only:
            given = "false" if str(node.value).lower() in FALSE_WORDS else str(node.value)
            applies = (given in words.split()) == (only == "in")
        if not applies:
            self.no_effect(name, node)
        elif mark == "~":
            self.degraded(name, node, text)
        else:
            feature, _, hint = text.partition(" | ")
            self.reject(name, node, f"{feature} is not supported", hint)


def put(root: Node, key: str, node: Node, *, section_origin: str = "") -> None:
    """Set the node at a dotted key of a tree of mappings, and create missing sections.

    New sections have the *section_origin*, by default the origin of the node.
    """
    section = root
    *parents, last = key.split(".")
    for part in parents:
        assert isinstance(section.value, dict)
        section = section.value.setdefault(part, Node({}, section_origin or node.origin))
    assert isinstance(section.value, dict)
    section.value[last] = node


def needs_a_value(key: str) -> bool:
    """Whether a dotted key of this program cannot be null; false for the arguments of plug-ins."""
    annotation = annotation_at(RecipeConfig, key)
    return annotation not in (None, Any) and type(None) not in members(annotation)


def is_true(node: Node | None) -> bool:
    """Whether a node is a word that means true."""
    if node is None or not isinstance(node.value, str):
        return False
    return node.value.lower() in TRUE_WORDS


def is_enabled(node: Node) -> bool:
    """Whether a value requests something: not null, false, 0 or a section with ``enabled: false``."""
    if isinstance(node.value, dict):
        switch = node.at("enabled") or node.at("enable")
        return switch is None or is_true(switch)
    return bool(node.value if isinstance(node.value, list) else value_of(node))


def value_of(node: Node | None) -> object:
    """The Python value of a scalar, as YAML 1.2 reads it; None for no node, and for a list or mapping."""
    if node is None or not isinstance(node.value, str):
        return None
    return untyped(node.value, quoted=node.quoted)


def above_1(node: Node | None) -> bool:
    """Whether a node is a number above 1."""
    value = value_of(node)
    return isinstance(value, int | float) and value > 1


def is_of_automodel(target: str) -> bool:
    """Whether a dotted name is in AutoModel's package."""
    return target.partition(".")[0] == "nemo_automodel"


Kind = Literal["no effect", "degraded", "note"]


@dataclass(frozen=True)
class Notice:
    """One decision of the translation.

    *key* and *origin* are from the recipe file. *text* states what happens instead, for the kinds ``degraded`` and
    ``note``.
    """

    kind: Kind
    key: str
    origin: str
    text: str = ""


def report_lines(notices: Iterable[Notice], program: str = "NeMo AutoModel") -> Iterator[str]:
    """Yield what a user must know before training: one line per degraded key and note, one for keys without effect."""
    notices = list(notices)
    for kind, label in (("degraded", "warning"), ("note", "note")):
        for notice in notices:
            if notice.kind == kind:
                yield f"{label}: {notice.origin}: {notice.key}: {notice.text}"
    unused = list(dict.fromkeys(each.key for each in notices if each.kind == "no effect"))
    if unused:
        have = counted(len(unused), f"key of {program} has", f"keys of {program} have")
        yield f"note: {have} no meaning here: {', '.join(unused)}"
