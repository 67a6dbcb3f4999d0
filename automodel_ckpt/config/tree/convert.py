"""Convert text to typed scalars, in the same way for files, the command line and plug-in arguments."""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.config.tree.yaml_tree import NULL_WORDS, untyped

# The words of YAML 1.1, and 1 and 0. Only boolean fields read them: elsewhere on is text.
TRUE_WORDS = frozenset({"true", "yes", "on", "y", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "n", "0"})
# Where a field is a number, leading zeros are harmless. Python's int() and float() also take 1_000 and digits of every
# alphabet, which other readers of the recipe do not.
_DIGITS = re.compile(r"[-+]?[0-9]+")
_DECIMAL = re.compile(
    r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?\.?inf(inity)?|[-+]?\.?nan"
)


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type: Optional and Union are split, Annotated is unwrapped."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        alternatives: list[Any] = []
        for argument in arguments:
            alternatives += members(argument)
        return tuple(alternatives)
    if origin is typing.Annotated:
        return members(arguments[0])
    if annotation is None:
        return (type(None),)
    return (annotation,)


def find(alternatives: Iterable[Any], *kinds: Any) -> Any:
    """Return the first alternative with a type in *kinds*, with its type arguments. Returns None when there is none."""
    for member in alternatives:
        kind = typing.get_origin(member) or member
        if kind in kinds:
            return member
    return None


def section_type(alternatives: Iterable[Any]) -> type[Any] | None:
    """Return the alternative that is a section of keys. Returns None when there is none."""
    for kind in alternatives:
        if not isinstance(kind, type) or issubclass(kind, Target):
            continue
        if dataclasses.is_dataclass(kind):
            return kind
    return None


def target_type(alternatives: Iterable[Any]) -> type[Target] | None:
    """Return the alternative that is a plug-in: :class:`Target` or a subclass of it.

    Returns None when there is none.
    """
    for kind in alternatives:
        if isinstance(kind, type) and issubclass(kind, Target):
            return kind
    return None


def is_text_only(annotation: Any) -> bool:
    """Whether every alternative is a scalar. Brackets in its text are then ordinary characters."""
    kinds = [member for member in members(annotation) if member is not type(None)]
    return all(_parser(kind) is not None for kind in kinds)


def typed(text: str, alternatives: tuple[Any, ...], *, quoted: bool = False) -> Any:
    """Convert text to the first type that accepts it: the type YAML would choose, then the others, text last.

    The words null, none and None are null, unless the type lists one of them as a value. A type that does not determine
    how text is parsed (a callable, a class of a library) accepts the untyped value. Raises ValueError if no type
    accepts the text, or for null if the type is not Optional.
    """
    guess = untyped(text, quoted=quoted)
    accepts_any = any(is_open(member) for member in alternatives)
    if not quoted and text in NULL_WORDS:
        for member in alternatives:
            parse = _parser(member)
            if parse is not None and text in choices((member,)):
                return parse(text)
        if type(None) not in alternatives and not accepts_any:
            raise ValueError(text)
        return None
    # By exact type: isinstance would accept True for int.
    if type(guess) in alternatives:
        return guess
    text_last = sorted(alternatives, key=lambda member: member is str)
    for member in text_last:
        parse = _parser(member)
        if parse is None:
            continue
        try:
            return parse(text)
        except (ValueError, KeyError):
            continue
    if accepts_any:
        return guess
    raise ValueError(text)


def is_open(member: Any) -> bool:
    """Whether a type does not determine how text is parsed: Any, a callable, or a library's class except tensors."""
    kind = typing.get_origin(member) or member
    if kind in (type(None), Target, dict, list, tuple, set, Literal, *_PARSERS):
        return False
    if dataclasses.is_dataclass(member):
        return False
    if isinstance(member, type):
        # A parameter such as lr: float | Tensor must not accept every text because of the tensor.
        return not issubclass(member, enum.Enum) and not _is_tensor(member)
    return True


def _is_tensor(member: Any) -> bool:
    # By name, because torch is not imported; builders.py has a class in its place.
    return getattr(member, "__name__", "") == "Tensor" and member.__module__.startswith("torch")


def describe(alternatives: tuple[Any, ...]) -> str:
    """Describe the accepted values of a type."""
    words: list[str] = []
    for member in alternatives:
        if member is bool:
            words += ["true", "false"]
        elif member is not type(None) and not _is_tensor(member):
            words += choices((member,)) or [_word(member)]
    if type(None) in alternatives:
        words.append("null")
    # Without a word, a tensor is the only type, which no value in a recipe has.
    *others, last = dict.fromkeys(words) or ["a tensor"]
    return f"{', '.join(others)} or {last}" if others else last


def choices(alternatives: tuple[Any, ...]) -> list[str]:
    """The values of the Literal and Enum types among *alternatives*, as text."""
    listed: list[str] = []
    for member in alternatives:
        if typing.get_origin(member) is Literal:
            listed += [str(choice) for choice in typing.get_args(member)]
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            listed += [str(choice.value) for choice in member]
    return listed


def _word(member: Any) -> str:
    if find((member,), list, tuple, set):
        return "a list"
    if target_type((member,)):
        return "a section with _target_"
    if find((member,), dict) or dataclasses.is_dataclass(member):
        return "a section"
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
    }
    return names.get(member, getattr(member, "__name__", str(member)))


def _boolean(text: str) -> bool:
    if text.lower() not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError(text)
    return text.lower() in TRUE_WORDS


def _whole_number(text: str) -> int:
    if not _DIGITS.fullmatch(text.strip()):
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    text = text.strip().lower()
    if not _DECIMAL.fullmatch(text):
        raise ValueError(text)
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _parser(member: Any) -> Callable[[str], Any] | None:
    """Return the function that converts text to a scalar type; None for other types.

    The function raises ValueError or KeyError for text that the type does not accept.
    """
    if typing.get_origin(member) is Literal:
        literals = {str(choice): choice for choice in typing.get_args(member)}
        return literals.__getitem__
    if isinstance(member, type) and issubclass(member, enum.Enum):
        by_name = dict(member.__members__)
        by_value = {str(choice.value): choice for choice in member}
        return (by_name | by_value).__getitem__
    return _PARSERS.get(member)


_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: _boolean,
    int: _whole_number,
    float: _number,
    str: str,
    Path: Path,
}
