"""``ckpt-train --dry-run``: report what would run, the memory and disk space it needs, and where it would resume."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.base.durable_io import free_bytes, overlay_warning
from automodel_ckpt.base.store_url import is_store_url, is_url
from automodel_ckpt.base.units import counted, size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.run.directory import check_writable
from automodel_ckpt.config.callables.sent_values import values_of
from automodel_ckpt.config.changes import (
    change_lines,
    changed_keys,
    check_overrides,
    has_settings_in_state,
    ignored_by_resume,
    saved_recipe,
)
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.config.recipe_rules import unused_without_checkpoints
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.config.tree.references import is_reference
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.config.tree.yaml_tree import DEFAULT, texts
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, hide, printable
from automodel_ckpt.parallel.mesh_sizes import Sizes

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.manifest import Manifest
    from automodel_ckpt.training.forecast.memory import Memory
    from automodel_ckpt.training.forecast.plan import Plan
    from automodel_ckpt.training.forecast.rank_parts import MicroBatchShape
    from automodel_ckpt.training.recipe import Recipe

Rows = Iterator[tuple[str, str]]
"""Title and text of each line of the report; lines without a title continue the line before."""
_DATA = ("dataset", "validation_dataset")
_PARTS = [
    "weights",
    "gradients",
    "optimizer",
    "average",
    "others",
    "gathered",
    "activations",
    "process",
]
_PART_TITLES = {"others": "other models"}
# How many changes the report lists.
_MAX_LINES = 12


def report(
    loaded: LoadedRecipe,
    recipe_class: type[Recipe],
    flags: LaunchFlags,
    sizes: Sizes | None,
    device_bytes: int | None = None,
) -> str:
    """Return the text of a dry run with the parallel *sizes* (None: the number of ranks is not known yet).

    *device_bytes* is the memory of the GPU that the forecast is for; None: the forecast is for this machine.
    Raises :class:`RecipeError` if the recipe could not train: unreadable data or model, sizes that do not fit, or a
    checkpoint.checkpoint_dir that cannot be written.
    """
    from automodel_ckpt.training.forecast.plan import ForecastDevice, plan

    loaded = replace(loaded, config=with_local_directory(loaded.config))
    _check_data(loaded)
    written = loaded.tree.at("checkpoint.checkpoint_dir")
    if written is not None and is_reference(str(written.value)):
        # The name of a directory for a URL has parts of the URL.
        hide(Path(loaded.config.checkpoint.checkpoint_dir).name, "(hidden)")
    rows = list(_run_rows(loaded, recipe_class, flags, sizes))
    if loaded.config.checkpoint.enabled:
        check_writable(Path(loaded.config.checkpoint.checkpoint_dir))
    recipe = recipe_class(loaded.config, config_yaml=loaded.to_yaml())
    device = None if device_bytes is None else ForecastDevice("cuda", device_bytes, "GPU")
    planned = plan(recipe, sizes or Sizes(), device)
    resume_rows = []
    if loaded.config.checkpoint.enabled:
        resume_rows = list(_resume_rows(loaded, recipe, sizes, planned.config_json))
    resumes = any(title == "resume" and text.startswith("from ") for title, text in resume_rows)
    rows += _resource_rows(loaded, planned, flags, resumes=resumes)
    rows += resume_rows
    if not resumes:
        rows += _init_from_rows(loaded, recipe)
    lines = [f"{loaded.path} is valid; nothing was trained or written"]
    for title, text in rows:
        label = f"{title}:" if title else ""
        lines.append(f"  {label:13}{printable(text)}")
    return "\n".join(lines) + "\n"


def _check_data(loaded: LoadedRecipe) -> None:
    """Raise :class:`RecipeError` for data in a store: the store's library would send credentials."""
    for value in values_of(loaded.tree):
        if value.key.startswith(_DATA) and is_store_url(value.text):
            raise RecipeError(
                "a dry run does not read data that need credentials",
                value.node.origin,
                f"{value.key}: {value.node}",
                "copy a part of the data to a local file for the dry run, or start without it",
            )


def _run_rows(
    loaded: LoadedRecipe, recipe_class: type, flags: LaunchFlags, sizes: Sizes | None
) -> Rows:
    """Describe the recipe, the ranks, the batch of each step and the end of training."""
    steps = loaded.config.step_scheduler
    yield "recipe", f"{recipe_class.__module__}.{recipe_class.__qualname__}"
    if sizes:
        yield "ranks", str(sizes.world)
    else:
        yield "ranks", f"{flags.nproc_per_node} on each of the nodes ({flags.nnodes})"
    per_step = counted(steps.global_batch_size, getattr(recipe_class, "sample_noun", "sample"))
    if sizes:
        accumulated = steps.global_batch_size // (steps.local_batch_size * sizes.dp)
        per_step += (
            f" = {steps.local_batch_size} x {counted(sizes.dp, 'rank')} x {accumulated} accumulated"
        )
    yield "each step", per_step
    limits = [
        f"{key}: {loaded.tree.at(f'step_scheduler.{key}')}"
        for key in ("num_epochs", "max_steps", "max_time")
    ]
    yield "until", ", ".join(limits)


def _resource_rows(loaded: LoadedRecipe, plan: Plan, flags: LaunchFlags, *, resumes: bool) -> Rows:
    """Describe the model, the number of steps, and the memory and disk space that training needs.

    *resumes* is whether the run continues from a checkpoint.
    """
    trained = "all" if plan.num_trained == plan.num_parameters else f"{plan.num_trained:,}"
    yield "model", f"{plan.model}, {plan.num_parameters:,} parameters, {trained} of them trained"
    yield "steps", "unknown" if plan.steps is None else f"{plan.steps:,}"
    yield "end", plan.end
    yield "memory", _memory_text(plan.memory)
    if plan.micro_batch is not None and plan.memory.activations is not None:
        yield "for", _micro_batch_text(plan.micro_batch)
    yield from _device_rows(plan)
    if plan.checkpoint_bytes is None:
        text = "none, because checkpoint.enabled is false"
        unused = unused_without_checkpoints(loaded.config)
        if unused:
            text += f"; no effect: {', '.join(unused)}"
        yield "checkpoints", text
        return
    section = loaded.config.checkpoint
    yield "checkpoints", _space_text(plan.checkpoint_bytes, "each", section.checkpoint_dir)
    if section.memory is not None:
        num_nodes = int(flags.nnodes.partition(":")[0])
        copies = 1 + min(section.memory.replicas, num_nodes - 1)
        # The newest checkpoint is removed only when the next one is complete.
        needed = 2 * plan.checkpoint_bytes * copies // num_nodes
        yield "in memory", _space_text(needed, "for two checkpoints", section.memory.directory)
    warning = overlay_warning(Path(section.checkpoint_dir))
    if warning is not None:
        yield "warning", warning


def _device_rows(plan: Plan) -> Rows:
    """Describe whether the memory of the device suffices, and which settings use it or fit into it."""
    device, advice = plan.device, plan.advice
    if device is None or device.nbytes is None:
        return
    title = f"{device.name} of {size_text(device.nbytes)}"
    if advice is None:
        yield "device", f"{title}; whether the run fits is unknown"
        return
    if advice.fits:
        unused = device.nbytes - plan.memory.total
        yield "device", f"{title}: fits, {size_text(unused)} are free"
        return
    yield "device", f"{title}: NOT ENOUGH, {size_text(advice.missing_bytes)} too little"
    if advice.memory is None:
        yield "fits", "no smaller local batch, recomputed activations, 64 ranks or offloading"
        return
    memory = f"about {size_text(advice.memory.total)} per rank"
    yield "fits", f"{' '.join(advice.overrides)} ({memory})"


def _memory_text(memory: Memory) -> str:
    parts = []
    for name in _PARTS:
        if nbytes := getattr(memory, name):
            parts.append(f"{_PART_TITLES.get(name, name)} {size_text(nbytes)}")
    unknown = "" if memory.activations is not None else "; activations unknown"
    return f"about {size_text(memory.total)} per rank: {', '.join(parts)}{unknown}"


def _micro_batch_text(shape: MicroBatchShape) -> str:
    """Describe the micro-batch that the activations are for: shorter samples need less."""
    text = f"{counted(shape.rows, 'row')} of {counted(shape.tokens_per_row, 'token')}"
    if shape.targets_per_row is not None:
        text += f", with targets of {counted(shape.targets_per_row, 'token')}"
    return f"{text}, the largest micro-batch of a rank; shorter texts need less"


def _space_text(nbytes: int, what: str, directory: str) -> str:
    """Describe the space that *what* takes in a *directory*, and whether its file system has enough."""
    free = free_bytes(Path(directory))
    text = f"{size_text(nbytes)} {what} in {directory}; {size_text(free)} free"
    return f"{text}, NOT ENOUGH" if nbytes > free else text


def _listed(title: str, lines: Sequence[str]) -> Rows:
    """Yield at most _MAX_LINES of *lines*, the first one with the title."""
    for line in lines[:_MAX_LINES]:
        yield title, line
        title = ""
    if len(lines) > _MAX_LINES:
        yield "", f"and {len(lines) - _MAX_LINES} more"


def _resume_rows(
    loaded: LoadedRecipe, recipe: Recipe, sizes: Sizes | None, config_json: bytes | None
) -> Rows:
    """Describe the checkpoint that the run would resume from, the ones it would skip, and what has changed since.

    Raises :class:`CheckpointUnusable` if the start would, because the checkpoint has only weights.
    """
    from automodel_ckpt.checkpoint.memory.directory import memory_of
    from automodel_ckpt.checkpoint.parts.manifest import Manifest
    from automodel_ckpt.checkpoint.parts.verify import verify
    from automodel_ckpt.checkpoint.run import resume
    from automodel_ckpt.checkpoint.run.links import own_name

    section = loaded.config.checkpoint
    root = Path(section.checkpoint_dir).absolute()
    memory = None
    if section.memory is not None:
        memory = memory_of(root, Path(section.memory.directory))
    if section.remote is not None:
        yield "store", f"{section.remote.url}; local directory {root}"
    if is_url(section.restore_from or ""):
        yield "resume", "unknown from the store, which a dry run does not read"
        return
    request = resume.candidates(root, own_name(section.restore_from, section.remote), memory)
    if request.note:
        yield "resume", request.note
    why = "the newest usable"
    if request.by_name:
        why = f"selected by checkpoint.restore_from {section.restore_from}"
    for path in request.candidates:
        try:
            manifest = Manifest.read(path)
            # Digests would read all data.
            CheckpointUnusable.check(verify(path, manifest, "size"))
        except CheckpointUnusable as error:
            yield "skip", f"{path.name}: {error.problems[0].what}"
            continue
        checked = "file sizes verified; digests are verified at the start"
        where = " in memory" if path.parent == memory else ""
        _check_training_state(path, manifest, recipe, section.allow_missing_state)
        yield "resume", f"from {path.name}{where}, {why} ({checked})"
        yield from _recipe_change_rows(loaded, path, manifest, sizes)
        yield from _model_change_rows(path, config_json, allowed=section.allow_changed_model)
        return
    yield "resume", "no: this is a new run" if section.remote is None else "unknown from the store"


def _check_training_state(
    path: Path, manifest: Manifest, recipe: Recipe, allowed: Iterable[str]
) -> None:
    from automodel_ckpt.checkpoint import discover
    from automodel_ckpt.checkpoint.state.mismatch import has_weights_only, weights_only

    if not has_weights_only(manifest):
        return
    missing = set(discover(recipe)).difference(manifest.state, allowed)
    if missing:
        raise weights_only(path, sorted(missing))


def _init_from_rows(loaded: LoadedRecipe, recipe: Recipe) -> Rows:
    """Describe how the weights of ``init_from`` match the model. Only their headers are read.

    Raises :class:`RecipeError` and :class:`CheckpointUnusable` if the start would.
    """
    from automodel_ckpt.checkpoint import discover
    from automodel_ckpt.training.parts.init_from import inspect_start, sections_of

    section = loaded.config.init_from
    if not section:
        return
    paths = ", ".join(one.path for one, _ in sections_of(section))
    modules = recipe.modules_to_fill(discover(recipe))
    start = inspect_start(section, modules, resizable=recipe.trainable.resized)
    if start is None:
        missing = "not on this machine; it is downloaded and checked at the start"
        yield "init_from", f"{paths}: {missing}"
        return
    match = start.verdict
    num_matches = len(match.matches)
    matches = f"{num_matches} of {num_matches + len(match.new)} tensors match"
    yield "init_from", f"{start.paths}: {matches} (names and shapes compared)"
    yield from _listed("", match.lines(allowed=True))
    for difference in start.differences:
        yield "", f"{difference.text}:"
        yield from _listed("", [f"  {line}" for line in difference.lines])


def _model_change_rows(checkpoint: Path, config_json: bytes | None, *, allowed: bool) -> Rows:
    """Describe the changes of the model's config. Raises :class:`CheckpointUnusable` if a resume would."""
    from automodel_ckpt.checkpoint.state.model_config import model_changes, require_same_function

    if config_json is None:
        return
    changes = model_changes(checkpoint, {"model": config_json})
    if not allowed:
        require_same_function(checkpoint, changes)
    for line in (*changes.function, *changes.training):
        yield "model config", line


def _recipe_change_rows(
    loaded: LoadedRecipe, path: Path, manifest: Manifest, sizes: Sizes | None
) -> Rows:
    """Describe the changes of the recipe since the checkpoint in *path*.

    Raises :class:`RecipeError` if a resume would: for overrides that have no effect.
    """
    given = {key for key, origin in loaded.origins.items() if origin != DEFAULT}
    saved = saved_recipe(path / layout.CONFIG)
    if not saved and manifest.is_imported_run:
        not_transferred = manifest.lineage.get("not_transferred")
        items = not_transferred if isinstance(not_transferred, list) else []
        yield "imported", f"from {manifest.lineage.get('imported_kind')}, which has no recipe"
        yield "", f"not transferred: {', '.join(map(str, items)) or 'nothing'}"
        return
    changed = changed_keys(saved, texts(loaded.tree), given)
    on_resume = getattr(loaded.config.optimizer, "on_resume", "checkpoint")
    schedule = str(getattr(loaded.config.lr_scheduler, "_target_", ""))
    ignored = ignored_by_resume(
        changed,
        manifest.saved,
        on_resume,
        keeps_schedule=has_settings_in_state(schedule),
    )
    check_overrides(ignored, loaded.overridden, path)
    lines = []
    if sizes and manifest.world_size != sizes.world:
        ranks = f"{manifest.world_size} -> {sizes.world}"
        lines.append(f"ranks: {ranks} (same global batches; new random states)")
    lines += change_lines(changed, ignored)
    yield from _listed("changed", lines)


# ---------------------------------------------------------------- --device-memory SIZE

_MIN_BYTES = 1_000_000
_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)


def device_memory(line: CommandLine) -> int | None:
    """Return the bytes that ``--device-memory`` gives; None without it. Raises :class:`RecipeError` for other text."""
    if "device_memory" not in line.modes:
        return None
    (text,) = line.modes["device_memory"]
    found = _SIZE.fullmatch(text.strip())
    nbytes = 0
    if found is not None:
        power = _UNITS.index(found[2].upper())
        nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    # A number without a unit is bytes, and almost always a mistake.
    if nbytes < _MIN_BYTES:
        raise RecipeError(
            "the memory of a device is a number with a unit, such as 80GiB or 24GB",
            "--device-memory",
            text,
        )
    return nbytes
