"""The JSON schema of a recipe file, with which editors complete keys and mark mistakes (``ckpt-train --schema``).

It is generated from the dataclass ``RecipeConfig`` and the dataclasses of its sections. It is less strict than the
program: rules on values are described in words, and the relations between keys and the arguments of ``_target_`` are
left out.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from automodel_ckpt.config.callables.allowlist import PURPOSES, entries_for
from automodel_ckpt.config.help.listing import field_docs, section_doc
from automodel_ckpt.config.registry import registered
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import default_of, hints_of
from automodel_ckpt.config.tree.convert import (
    choices,
    find,
    is_open,
    members,
    section_type,
    target_type,
)
from automodel_ckpt.config.tree.extends import KEY as EXTENDS
from automodel_ckpt.config.tree.rules import MISSING, Target

Schema = dict[str, Any]

FILE_NAME = "recipe.schema.json"
"""Name of the file that the first line of each example refers to."""
_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}
"""A value that is a reference, whatever type it must have."""
_NULL: Schema = {"enum": [None, "none", "None"]}
_SCALARS: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    # Unquoted digits are a number for an editor, and text for a key that is text.
    str: {"type": ["string", "number"]},
    Path: {"type": "string"},
    type(None): _NULL,
}


def schema_text() -> str:
    """Return :func:`recipe_schema` as the content of a file."""
    return json.dumps(recipe_schema(), indent=1) + "\n"


def recipe_schema() -> Schema:
    """Return the schema of a recipe file, in JSON Schema's draft 7."""
    maker = _Maker()
    properties = maker.properties(RecipeConfig, "")
    path: Schema = {"type": "string"}
    properties[EXTENDS] = {
        "description": "Recipe files that this one extends; paths relative to this file.",
        "anyOf": [path, {"type": "array", "items": path}],
    }
    # A recipe class of the user can have further sections.
    is_ours = {"properties": {"recipe": {"enum": sorted(registered())}}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Recipe of automodel_ckpt",
        "type": "object",
        "properties": properties,
        "if": is_ours,
        "then": {"propertyNames": {"enum": sorted(properties)}},
        "definitions": maker.definitions,
    }


class _Maker:
    """Converts types to schemas. ``definitions`` has the schema of each section."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def properties(self, section: type[Any], prefix: str) -> dict[str, Schema]:
        """The schema of each field of a section. The section's keys begin with *prefix*."""
        hints = hints_of(section)
        docs = field_docs(section)
        schemas = {}
        for field in dataclasses.fields(section):
            schema = self._of(members(hints[field.name]), PURPOSES.get(prefix + field.name))
            described: Schema = {}
            text = _description(field, docs.get(field.name, ""))
            if text:
                described["description"] = text
            default = default_of(field)
            if default != MISSING and isinstance(default, bool | int | float | str):
                described["default"] = default
            if "$ref" in schema:
                # Draft 7 ignores the keywords next to $ref.
                schema = {"allOf": [schema]}
            schemas[field.name] = described | schema
        return schemas

    def _of(self, alternatives: tuple[Any, ...], purpose: str | None = None) -> Schema:
        """The schema of a value that has one of several types; *purpose* is the purpose of its ``_target_``."""
        if any(is_open(member) or member is Any for member in alternatives):
            return {}
        section = section_type(alternatives)
        target = target_type(alternatives)
        schemas: list[Schema] = []
        if section and target:
            # Two schemas of mappings: an editor would report the mistakes in one as those in both.
            has_target = {"type": "object", "required": ["_target_"]}
            both = {"if": has_target, "then": self._target(target, purpose)}
            schemas.append({"type": "object", **both, "else": self._section(section)})
        for member in alternatives:
            if member not in (section, target) or not (section and target):
                schemas.append(self._one(member, purpose))
        is_text = str in alternatives
        if not is_text and any(member in _SCALARS for member in alternatives):
            schemas.append(_REFERENCE)
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _one(self, member: Any, purpose: str | None) -> Schema:
        """The schema of a value of one type."""
        if member in _SCALARS:
            return _SCALARS[member]
        listed = choices((member,))
        arguments = [each for each in typing.get_args(member) if each is not ...]
        if listed:
            # As an editor parses them.
            return {"enum": [{"true": True, "false": False}.get(each, each) for each in listed]}
        if find((member,), list, tuple, set):
            items = self._of(members(arguments[0])) if arguments else {}
            return {"type": "array", "items": items}
        if find((member,), dict):
            item = arguments[1] if arguments else Any
            values = {} if item is Any else self._of(members(item), purpose)
            return {"type": "object", "additionalProperties": values}
        target = target_type((member,))
        if target is not None:
            return self._target(target, purpose)
        return self._section(member) if dataclasses.is_dataclass(member) else {}

    def _section(self, section: Any) -> Schema:
        """A reference to the schema of a section, which is made once."""
        name = section.__name__
        if name not in self.definitions:
            schema: Schema = {"type": ["object", "null"], "description": section_doc(section)}
            self.definitions[name] = schema
            properties = self.properties(section, "")
            takes_any = bool(getattr(section, "takes_any", False))
            if takes_any:
                # In a plug-in, kwargs is the rest of the section and no key.
                properties.pop("kwargs")
            schema["properties"] = properties
            schema["additionalProperties"] = takes_any
        return {"$ref": f"#/definitions/{name}"}

    def _target(self, target: type[Target], purpose: str | None) -> Schema:
        """A reference to the schema of a section with ``_target_``, which may have any arguments."""
        name = f"{target.__name__} {purpose or ''}".strip().replace(" ", "-")
        if name not in self.definitions:
            schema: Schema = {"type": "object", "required": ["_target_"]}
            self.definitions[name] = schema
            properties = schema["properties"] = self.properties(target, "")
            properties.pop("kwargs")
            named: Schema = {"type": "string", "description": "Dotted name of a class or function."}
            if purpose:
                shown = [entry.shown for entry in entries_for(purpose)]
                named["examples"] = [each for each in shown if "*" not in each]
            properties["_target_"] = named
        return {"$ref": f"#/definitions/{name}"}


def _description(field: dataclasses.Field[Any], text: str) -> str:
    """The documentation of a field, with its rules in words."""
    rules = [f"It must be {rule.expected}." for rule in field.metadata.get("rules", ())]
    return " ".join([text, *rules]).strip()
