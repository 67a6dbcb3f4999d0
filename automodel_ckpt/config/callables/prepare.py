"""Import the class of a recipe, and check its plug-ins."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from automodel_ckpt.base.user_code import register_user_code
from automodel_ckpt.config.callables.target_checks import check_targets
from automodel_ckpt.config.callables.target_names import check_names, problem_of
from automodel_ckpt.config.callables.trust import Rejected, Trust, import_failure, resolve
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.registry import target_of
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import closest
from automodel_ckpt.errors import RecipeError

_NEEDED_BY = {"lr_scheduler": "transformers.optimization", "peft": "peft"}
"""Section -> library that it needs. The import takes seconds, so it happens once, before the ranks are forked."""
_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>\w+)")


class PreparedRecipe(NamedTuple):
    """A recipe whose plug-ins have been checked, and its class."""

    loaded: LoadedRecipe
    recipe_class: type[Any]


def prepare(loaded: LoadedRecipe, trust: Trust) -> PreparedRecipe:
    """Import the class of a recipe and its plug-ins, and check all of them. ``loaded`` is not modified.

    The sections that a custom recipe declares in its ``Config`` are validated here.

    Raises:
        RecipeError: with all names that are not trusted or do not exist, and all invalid arguments.
    """
    # Before the recipe's class is imported, because an import already runs code.
    check_names(loaded, trust)
    try:
        recipe_class = resolve_recipe(loaded.config.recipe, trust, loaded.directory)
    except Rejected as error:
        raise RecipeError.all_of([problem_of("recipe", error, loaded.tree.at("recipe"))]) from error
    complete = loaded.with_schema(getattr(recipe_class, "Config", RecipeConfig))
    checked = check_targets(complete, trust)
    for section, library in _NEEDED_BY.items():
        if getattr(checked.config, section, None) is not None:
            importlib.import_module(library)
    return PreparedRecipe(checked, recipe_class)


def resolve_recipe(name: str, trust: Trust, folder: Path = Path()) -> type[Any]:
    """Import a recipe's class: a registered name, ``package.module.Class``, or ``file.py:Class``.

    A file is searched in *folder* and in the working directory. Raises :class:`Rejected`.
    """
    if match := _FILE.fullmatch(name):
        found = _from_file(folder, match["path"], match["name"], trust)
    elif name.endswith(".py"):
        raise Rejected(f"{name} is a file, and no class in it is named", f"write {name}:CLASS")
    else:
        dotted = (target_of(name) or name).replace(":", ".")
        found = resolve(dotted, trust, "recipe")
    methods = ("setup", "run", "close")
    has_methods = all(callable(getattr(found, method, None)) for method in methods)
    if not isinstance(found, type) or not has_methods:
        hint = (
            "derive a class from a recipe, such as automodel_ckpt.recipes.llm_finetune.LLMFinetune; it needs the "
            "methods setup, run and close"
        )
        raise Rejected(f"{name} is not a recipe", hint)
    if not issubclass(getattr(found, "Config", RecipeConfig), RecipeConfig):
        hint = "subclass automodel_ckpt.config.schema.RecipeConfig"
        raise Rejected(f"{name}.Config is not a RecipeConfig", hint)
    return found


def _from_file(folder: Path, written: str, name: str, trust: Trust) -> Any:
    candidates = [folder / written, Path(written)]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        searched = dict.fromkeys((str(folder.resolve()), str(Path.cwd())))
        raise Rejected(f"file {written} not found", f"searched {' and '.join(searched)}")
    if not trust.covers_file(path):
        hint = f"if you trust this code, allow it with --trust {path}"
        raise Rejected(f"{path} is not trusted", hint)
    module_name = f"_recipe_{path.stem}"
    # Before the module runs, so that an error in it is reported as the user's.
    register_user_code(module_name)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module there while it is executed
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise import_failure(path, error) from error
    if not hasattr(module, name):
        raise Rejected(f"{path} has no {name}", f"did you mean {closest(name, dir(module))}?")
    return getattr(module, name)
