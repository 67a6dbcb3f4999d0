"""Checks that what a user's recipe overrides is called: classes, hidden methods, and losses of a pipeline."""

from __future__ import annotations

from typing import Any

from automodel_ckpt.errors import RecipeError

_PACKAGE = "automodel_ckpt."


def check_classes(recipe_class: Any, base: Any) -> None:
    """Raise :class:`RecipeError` if *recipe_class* names a class of another kind than *base*, :class:`Recipe`, does."""
    for name in ("objective_class", "loop_class", "saves_class"):
        named, kind = getattr(recipe_class, name), getattr(base, name)
        if not isinstance(named, type) or not issubclass(named, kind):
            raise RecipeError(
                f"{name} of the recipe must be a subclass of {kind.__name__}",
                where=f"{recipe_class.__name__}.{name}",
                value=named,
                hint=f"derive the class from {kind.__module__}.{kind.__name__}",
            )


def built(recipe: object, name: str, part: object, kind: type) -> Any:
    """Return the *part* that ``build_NAME`` of a *recipe* made.

    Raises :class:`RecipeError` if it is of another *kind*.
    """
    if isinstance(part, kind):
        return part
    raise RecipeError(
        f"build_{name}() must return a {kind.__module__}.{kind.__name__}",
        where=f"{type(recipe).__name__}.build_{name}",
        value=type(part).__name__,
        hint=f"return one, or the changed result of super().build_{name}()",
    )


def check_model(recipe: Any) -> None:
    """Raise :class:`RecipeError` if ``build`` created no model, or replaced ``model`` alone: the loop would train the
    former one."""
    if not hasattr(recipe, "model") or not hasattr(recipe, "trainable"):
        raise RecipeError(
            "the recipe's build() has created no model",
            where=f"{type(recipe).__name__}.build",
            value="",
            hint="call super().build() in it, and then add your own attributes",
        )
    if recipe.model is recipe.trainable.model:
        return
    raise RecipeError(
        "the recipe replaces model after build_trainable, and the loop trains trainable.model",
        where=f"{type(recipe).__name__}.build",
        value=type(recipe.model).__name__,
        hint="extend build_trainable to return dataclasses.replace(trainable, model=...)",
    )


def check_hidden_methods(recipe: object) -> None:
    """Raise :class:`RecipeError` if ``build`` gave an attribute the name of a method.

    It would be called in the method's place, perhaps hours later.
    """
    hidden = []
    for name, value in vars(recipe).items():
        if callable(getattr(type(recipe), name, None)) and not callable(value):
            hidden.append(name)
    if hidden:
        raise RecipeError(
            "an attribute hides a method of the recipe",
            where=f"{type(recipe).__name__}.build",
            value=", ".join(sorted(hidden)),
            hint="give the attribute another name",
        )


def check_pipeline_extensions(recipe: Any, base: Any) -> None:
    """Raise :class:`RecipeError` for a loss or a step that a pipeline would not call."""
    recipe_class = type(recipe)
    own = []
    # What the recipes of this package add to an objective, the last stage applies.
    if not getattr(recipe.build_objective, "__module__", "").startswith(_PACKAGE):
        own.append(f"{recipe_class.__name__}.build_objective")
    for name, method in (("loop_class", "train_step"), ("objective_class", "loss")):
        of_recipe = getattr(recipe, name)
        if getattr(of_recipe, method) is not getattr(getattr(base, name), method):
            own.append(f"{of_recipe.__name__}.{method}")
    if own:
        hint = "leave pp_size out"
        if not recipe_class.__module__.startswith(_PACKAGE):
            hint += ", or override Objective.row_loss instead, which the last stage calls"
        raise RecipeError(
            "a pipeline computes the loss stage by stage, and this recipe computes it in its own way",
            where="distributed.pp_size",
            value=own[0],
            hint=hint,
        )
