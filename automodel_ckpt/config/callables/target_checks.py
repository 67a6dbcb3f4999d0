"""Import the plug-ins of a recipe, and check and convert their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from automodel_ckpt.config.bind import INVALID, Binder
from automodel_ckpt.config.callables import allowlist
from automodel_ckpt.config.callables.allowlist import CUSTOM
from automodel_ckpt.config.callables.allowlist_entries import Entry
from automodel_ckpt.config.callables.argument_values import argument_problem
from automodel_ckpt.config.callables.builders import missing_argument, unknown_argument
from automodel_ckpt.config.callables.plugins import remember
from automodel_ckpt.config.callables.signatures import (
    CALLED_WITH,
    Signature,
    is_called_directly,
    signature_of,
)
from automodel_ckpt.config.callables.target_names import SECTIONS, check_names, problem_of
from automodel_ckpt.config.callables.trust import (
    Rejected,
    Trust,
    record_remote_code,
    resolve_entry,
    trust_hint,
)
from automodel_ckpt.config.keys.optimizer import OptionsGroup
from automodel_ckpt.config.load import LoadedRecipe, distinct
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.canonical_yaml import canonical_tree
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.config.tree.yaml_tree import Node
from automodel_ckpt.errors import Problem, RecipeError


def check_targets(loaded: LoadedRecipe, trust: Trust) -> LoadedRecipe:
    """Import every plug-in, and convert its keyword arguments to the types of the parameters.

    Returns the recipe with converted arguments. ``loaded`` is not modified.

    Raises:
        RecipeError: with all problems found.
    """
    check_names(loaded, trust)
    record_remote_code(trust)
    tree = loaded.tree.copy()
    checker = _Checker(tree, type(loaded.config), trust)
    config = checker.convert(loaded.config, "", ())
    if problems := distinct([*loaded.problems, *checker.problems]):
        raise RecipeError.all_of(problems)
    tree = canonical_tree(tree, config, with_arguments=True)
    return dataclasses.replace(loaded, config=config, tree=tree)


class _Checker:
    """Imports plug-ins and converts their keyword arguments to the types of the parameters.

    ``problems`` collects all mistakes. ``tree`` is the checker's own copy: converting a node may rewrite it.
    """

    def __init__(self, tree: Node, schema: type[Any], trust: Trust) -> None:
        self.tree = tree
        self.trust = trust
        self.problems: list[Problem] = []
        self.binder = Binder(schema, self.problems)

    def convert(
        self, value: Any, key: str, supplied: tuple[str, ...], purpose: str | None = None
    ) -> Any:
        """Return a value of the configuration in which the arguments of all plug-ins are converted.

        *supplied* are the names of the arguments that the recipe's class adds. *purpose* is that of the parameter of
        an enclosing plug-in; None outside of plug-ins. A value without plug-ins is returned as it is.
        """
        if isinstance(value, Target):
            if purpose is not None:
                return self._target(value, key, supplied, purpose)
            converted = self._target(value, key, supplied, allowlist.purpose_of(key, SECTIONS))
            return self._section(converted, key, supplied, purpose)
        if dataclasses.is_dataclass(value):
            return self._section(value, key, supplied, purpose)
        if isinstance(value, dict):
            items = {}
            for name, item in value.items():
                items[name] = self.convert(item, join(key, str(name)), supplied, purpose)
            is_changed = any(items[name] is not item for name, item in value.items())
            return items if is_changed else value
        if isinstance(value, list | tuple):
            values = []
            for index, item in enumerate(value):
                values.append(self.convert(item, join(key, str(index)), supplied, purpose))
            is_changed = any(new is not old for new, old in zip(values, value, strict=True))
            return type(value)(values) if is_changed else value
        return value

    def _section(
        self, section: Any, key: str, supplied: tuple[str, ...], purpose: str | None
    ) -> Any:
        """Convert the plug-ins in the fields of a section. :meth:`_target` has converted its ``kwargs``."""
        changed = {}
        for field in dataclasses.fields(section):
            if field.name == "kwargs" and getattr(section, "takes_any", False):
                continue
            if purpose is None:
                supplied = field.metadata.get("supplied", ())
            before = getattr(section, field.name)
            after = self.convert(before, join(key, field.name), supplied, purpose)
            if after is not before:
                changed[field.name] = after
        return dataclasses.replace(section, **changed) if changed else section

    def _target(self, target: Target, key: str, supplied: tuple[str, ...], purpose: str) -> Target:
        """Return a plug-in with converted arguments."""
        try:
            function, entry = resolve_entry(target._target_, self.trust, purpose)
        except Rejected as error:
            self.problems.append(problem_of(key, error, self.tree.at(join(key, "_target_"))))
            return target
        remember(target._target_, function)
        signature = signature_of(function)
        is_direct = is_called_directly(key, function, {*target.kwargs, *supplied})
        if signature.positional_only and not is_direct:
            self._note_positional_only(key, target, signature.positional_only)
        kwargs = {}
        for name, value in target.kwargs.items():
            node = self._node(join(key, name))
            if not signature.accepts(name):
                self._note_unknown(key, target, name, node, signature)
                continue
            if entry is not None:
                self._check_allowed(target, name, node, join(key, name), entry)
            if not isinstance(value, Target):
                annotation = signature.types.get(name, Any)
                value = self._value(annotation, node, join(key, name))
            nested = CUSTOM if entry is None else allowlist.NESTED.get(name, "")
            kwargs[name] = self.convert(value, join(key, name), supplied, nested)
        converted = self._with_groups(dataclasses.replace(target, kwargs=kwargs), key, signature)
        if is_direct:
            return converted
        for name in signature.missing({*target.kwargs, *supplied}):
            section = self.tree.at(key)
            problem = missing_argument(key, target._target_, name, section)
            if key in CALLED_WITH:
                hint = f"{problem.hint}; a function that training calls itself begins with {CALLED_WITH[key]}"
                problem = dataclasses.replace(problem, hint=hint)
            self.problems.append(problem)
        return converted

    def _with_groups(self, target: Target, key: str, signature: Signature) -> Target:
        """Convert the options of an optimizer's parameter groups to the types of the optimizer's arguments."""
        groups = []
        for number, group in enumerate(getattr(target, "groups", ())):
            if not isinstance(group, OptionsGroup):
                groups.append(group)
                continue
            group_key = join(key, "groups", str(number))
            kwargs = {}
            for name in group.kwargs:
                node = self._node(join(group_key, name))
                if not signature.accepts(name):
                    self._note_unknown(group_key, target, name, node, signature)
                    continue
                annotation = signature.types.get(name, Any)
                value = self._value(annotation, node, join(group_key, name))
                kwargs[name] = self.convert(value, join(group_key, name), (), "")
            groups.append(dataclasses.replace(group, kwargs=kwargs))
        if not groups:
            return target
        converted: Target = dataclasses.replace(target, groups=groups)  # type: ignore[call-arg]
        return converted

    def _node(self, key: str) -> Node:
        node = self.tree.at(key)
        assert node is not None
        return node

    def _value(self, annotation: Any, node: Node, key: str) -> Any:
        """Convert a node to the type of a parameter; None if that is impossible and a problem was added."""
        value = self.binder.value(annotation, node, key)
        return None if value is INVALID else value

    def _check_allowed(self, target: Target, name: str, node: Node, key: str, entry: Entry) -> None:
        """Add a problem for an argument that a callable of the allowlist accepts only with trust."""
        reason = argument_problem(entry, name, target.kwargs[name])
        if reason is None:
            return
        what = f"{key}: {target._target_} does not allow this argument without trust: {reason}"
        self.problems.append(Problem(what, node.origin, str(node), trust_hint(target._target_)))

    def _note_positional_only(self, key: str, target: Target, names: Sequence[str]) -> None:
        what = f"{key}: {target._target_} has positional-only parameters ({', '.join(names)})"
        where = self._node(join(key, "_target_")).origin
        hint = "write a wrapper with keyword arguments in your own package, and trust it"
        self.problems.append(Problem(what, where, "", hint))

    def _note_unknown(
        self, key: str, target: Target, name: str, node: Node, signature: Signature
    ) -> None:
        problem = unknown_argument(key, target._target_, name, node, signature.required)
        self.problems.append(problem)
