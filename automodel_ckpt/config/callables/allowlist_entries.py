"""The kinds of entries of the allowlist: one callable by its name, or the classes that a package exports."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exact:
    """One callable, by its public name. ``arguments`` are the allowed keywords; None: those of its signature."""

    name: str
    arguments: frozenset[str] | None = None

    def names(self, name: str) -> bool:
        """Whether *name* is this entry's name."""
        return name == self.name

    def is_entry(self, name: str, found: Any) -> bool:
        """Whether the object *found* under *name* belongs to the package of this entry."""
        # The public name is re-exported from a module inside the package, so only the root is
        # compared.
        return _is_within(getattr(found, "__module__", None), self.name.partition(".")[0])


@dataclass(frozen=True)
class ClassesOf:
    """The classes that *package* exports, are subclasses of *base* and defined in the package *defined_in*.

    The public name is ``package.Class``, or ``package.Class.method``; *pattern* restricts the class's name.
    """

    package: str
    base: str
    defined_in: str
    method: str = ""
    pattern: str = r"[A-Z]\w*"
    arguments: frozenset[str] | None = None

    def names(self, name: str) -> bool:
        """Whether *name* matches the pattern of this entry's names."""
        method = re.escape(f".{self.method}") if self.method else ""
        # fullmatch: with a match of the beginning, attributes of an allowed class would be allowed
        # too.
        return (
            re.fullmatch(f"{re.escape(self.package)}\\.({self.pattern}){method}", name) is not None
        )

    def is_entry(self, name: str, found: Any) -> bool:
        """Whether the object *found* under *name* is such a class, or that method of one."""
        class_name = name.removeprefix(f"{self.package}.").partition(".")[0]
        owner = getattr(importlib.import_module(self.package), class_name, None)
        if not isinstance(owner, type) or not issubclass(owner, _object_at(self.base)):
            return False
        # The method is checked too, because it may be inherited from a class of another package.
        return all(
            _is_within(getattr(part, "__module__", None), self.defined_in)
            for part in (owner, found)
        )


Entry = Exact | ClassesOf


@dataclass(frozen=True)
class Group:
    """Entries that are listed for one *reason*."""

    reason: str
    entries: tuple[Entry, ...]


def _object_at(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _is_within(module: Any, package: str) -> bool:
    return isinstance(module, str) and (module == package or module.startswith(f"{package}."))
