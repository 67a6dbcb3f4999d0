"""``ckpt-train --dry-run``: what would run, what it would take, and what it would go on from. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.file_system import overlay_warning
from automodel_ckpt.cli.terminal import printable, size_text
from automodel_ckpt.config.bind import unused_without_checkpoints
from automodel_ckpt.config.changes import (
    changed_keys,
    check_overrides,
    ignored_by_resume,
    saved_recipe,
)
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.yaml_tree import DEFAULT, leaves
from automodel_ckpt.distributed.mesh_sizes import Sizes
from automodel_ckpt.errors import CheckpointUnusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.manifest import Manifest
    from automodel_ckpt.recipes.memory_estimate import Plan
    from automodel_ckpt.recipes.recipe import Recipe

Rows = Iterator[tuple[str, str]]
_MOST_CHANGES = 12


def report(loaded: LoadedRecipe, recipe: type, flags: LaunchFlags, sizes: Sizes | None) -> str:
    """The text of a dry run on a grid of *sizes*; None where the number of ranks is not known yet.

    Raises :class:`RecipeError` for what could not train: data or a model that cannot be read, sizes that do not fit.
    """
    from automodel_ckpt.recipes.memory_estimate import plan
    from automodel_ckpt.recipes.recipe import Recipe

    rows, made, planned = [*_what_runs(loaded, recipe, flags, sizes)], None, None
    if issubclass(recipe, Recipe):
        planned = recipe(loaded.config, config_yaml=loaded.to_yaml())
        made = plan(planned, sizes or Sizes())
        rows += [*_what_it_takes(loaded, made)]
    if loaded.config.checkpoint.enabled:
        rows += [
            *_what_it_goes_on_from(loaded, sizes, made.config_json if made is not None else None)
        ]
    if not any(name == "resume" and text.startswith("from ") for name, text in rows):
        rows += [*_what_it_starts_from(loaded, planned)]
    body = "".join(f"  {name + ':' if name else '':13}{printable(text)}\n" for name, text in rows)
    return f"{loaded.path} is valid; nothing was trained or written\n{body}"


def _what_runs(loaded: LoadedRecipe, recipe: type, flags: LaunchFlags, sizes: Sizes | None) -> Rows:
    steps, tree = loaded.config.step_scheduler, loaded.tree
    yield "recipe", f"{recipe.__module__}.{recipe.__qualname__}"
    yield (
        "ranks",
        f"{sizes.world}" if sizes else f"{flags.nproc_per_node} on each of {flags.nnodes} nodes",
    )
    per_step = f"{steps.global_batch_size} samples"
    if sizes:
        accumulated = steps.global_batch_size // (steps.local_batch_size * sizes.dp)
        per_step += f" = {steps.local_batch_size} x {sizes.dp} ranks x {accumulated} accumulated"
    yield "each step", per_step
    ends = [
        f"{key}: {tree.at(f'step_scheduler.{key}')}"
        for key in ("num_epochs", "max_steps", "max_time")
    ]
    yield "until", ", ".join(ends)


def _what_it_takes(loaded: LoadedRecipe, plan: Plan) -> Rows:
    trained = "all" if plan.num_trained == plan.num_parameters else f"{plan.num_trained:,}"
    yield "model", f"{plan.model}, {plan.num_parameters:,} parameters, {trained} of them trained"
    yield "steps", "unknown" if plan.steps is None else f"{plan.steps:,}"
    yield "end", plan.end
    memory = plan.memory
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "gathered": memory.gathered,
        "activations": memory.activations,
        "process": memory.process,
    }
    listed = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts.items() if nbytes)
    unknown = "" if memory.activations is not None else "; activations unknown"
    yield "memory", f"about {size_text(memory.total)} per rank: {listed}{unknown}"
    if plan.checkpoint_bytes is None:
        unused = ", ".join(unused_without_checkpoints(loaded.config))
        yield (
            "checkpoints",
            "none, because checkpoint.enabled is false"
            + (f"; no effect: {unused}" if unused else ""),
        )
        return
    yield "checkpoints", _checkpoints(loaded, plan, plan.checkpoint_bytes)
    if (
        warning := overlay_warning(Path(loaded.config.checkpoint.checkpoint_dir).expanduser())
    ) is not None:
        yield "warning", warning


def _checkpoints(loaded: LoadedRecipe, plan: Plan, nbytes: int) -> str:
    from automodel_ckpt.checkpoint.run.resume import checkpoint_names
    from automodel_ckpt.checkpoint.saving.forecast import free_bytes
    from automodel_ckpt.recipes.disk_use import kept_at_once, still_to_come

    section = loaded.config.checkpoint
    directory = Path(section.checkpoint_dir).expanduser()
    free, existing = free_bytes(directory), [name.step for name in checkpoint_names(directory)]
    most = kept_at_once(loaded.config, plan.steps, plan.steps_per_epoch, existing)
    more = still_to_come(loaded.config, plan.steps, plan.steps_per_epoch, existing)
    text = f"{size_text(nbytes)} each in {section.checkpoint_dir}"
    if most is not None:
        text += f", {most} kept at most: {size_text(most * nbytes)}"
    return (
        text
        + f"; {size_text(free)} free"
        + ("" if nbytes * (more or 1) <= free else ", NOT ENOUGH")
    )


def _what_it_goes_on_from(
    loaded: LoadedRecipe, sizes: Sizes | None, config_json: bytes | None
) -> Rows:
    from automodel_ckpt.checkpoint.manifest import Manifest
    from automodel_ckpt.checkpoint.run import resume
    from automodel_ckpt.checkpoint.verify import verify

    section = loaded.config.checkpoint
    root = Path(section.checkpoint_dir).expanduser().absolute()
    request = resume.candidates(root, section.restore_from)
    if request.note:
        yield "resume", request.note
    for path in request.candidates:
        try:
            manifest = Manifest.read(path)
            problems = [str(problem).splitlines()[0] for problem in verify(path, manifest, "size")]
        except CheckpointUnusable as error:
            manifest, problems = None, [error.problems[0].what]
        if manifest is not None and not problems:
            why = (
                f"selected by checkpoint.restore_from {section.restore_from}"
                if request.by_name
                else "the newest usable"
            )
            yield (
                "resume",
                f"from {path.name}, {why} (file sizes verified; digests are verified at the start)",
            )
            yield from difference_rows(loaded, path, manifest, sizes)
            yield from model_rows(path, config_json, allowed=section.allow_changed_model)
            return
        yield "skip", f"{path.name}: {problems[0]}"
    yield "resume", "no: this is a new run"


def _what_it_starts_from(loaded: LoadedRecipe, planned: Recipe | None) -> Rows:
    """The weights of ``init_from``, opened as far as their headers, and how they match the model.

    Raises :class:`RecipeError` and :class:`CheckpointUnusable` as the start would.
    """
    from torch import nn

    from automodel_ckpt.checkpoint import discover
    from automodel_ckpt.recipes.init_from import inspect_start

    section = loaded.config.init_from
    if section is None:
        return
    if planned is None:
        yield "init_from", f"{section.path}, which this recipe reads as it likes"
        return
    modules = {
        name: value for name, value in discover(planned).items() if isinstance(value, nn.Module)
    }
    found = inspect_start(section, modules, resizable=planned.trainable.resized)
    if found is None:
        yield (
            "init_from",
            f"{section.path}: not in the cache; it is downloaded and checked at the start",
        )
        return
    weights, verdict = found
    num_here = len(verdict.matches) + len(verdict.new)
    yield (
        "init_from",
        f"{weights.path}: {len(verdict.matches)} of {num_here} tensors match (names and shapes compared)",
    )
    differences = verdict.lines(allowed=True)
    for line in differences[:_MOST_CHANGES]:
        yield "", line
    if len(differences) > _MOST_CHANGES:
        yield "", f"and {len(differences) - _MOST_CHANGES} more"


def model_rows(checkpoint: Path, config_json: bytes | None, *, allowed: bool) -> Rows:
    """What changed in the model's config. Raises :class:`CheckpointUnusable` where a resume would."""
    from automodel_ckpt.checkpoint.state.model_config import model_changes, require_same_function

    if config_json is None:
        return
    changes = model_changes(checkpoint, {"model": config_json})
    if not allowed:
        require_same_function(checkpoint, changes)
    for line in (*changes.function, *changes.training):
        yield "model config", line


def difference_rows(
    loaded: LoadedRecipe, path: Path, manifest: Manifest, sizes: Sizes | None
) -> Rows:
    """What changed in the recipe. Raises :class:`RecipeError` where a resume would: for overrides without effect."""
    given = {key for key, origin in loaded.origins.items() if origin != DEFAULT}
    changed = changed_keys(saved_recipe(path / layout.CONFIG), dict(leaves(loaded.tree)), given)
    on_resume = getattr(loaded.config.optimizer, "on_resume", "checkpoint")
    ignored = ignored_by_resume(changed, manifest.saved, on_resume)
    check_overrides(ignored, [override.key for override in loaded.overrides], path)
    changes = [
        f"{change} (not applied)" if change in ignored else str(change) for change in changed
    ]
    if sizes and manifest.world_size != sizes.world:
        changes.insert(
            0,
            f"ranks: {manifest.world_size} -> {sizes.world} (same global batches; new random states)",
        )
    for number, change in enumerate(changes[:_MOST_CHANGES]):
        yield ("" if number else "changed"), change
    if len(changes) > _MOST_CHANGES:
        yield "", f"and {len(changes) - _MOST_CHANGES} more: `ckpt diff` lists all differences"
