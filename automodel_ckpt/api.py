"""Training from Python: :func:`load_recipe` and :func:`train`.

    from automodel_ckpt import load_recipe, train

    recipe = load_recipe("recipe.yaml", {"optimizer.lr": 2e-5})
    result = train(recipe)
    print(result.loss, result.checkpoint, result.export)

The command line does the same with one process for each rank.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.python_child import check_temporary_directory
from automodel_ckpt.config import load
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import Override
from automodel_ckpt.config.tree.yaml_tree import OVERRIDES, node_of
from automodel_ckpt.errors import RecipeError, Stopped

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TrainingResult", "load_recipe", "train"]

log = logging.getLogger("automodel_ckpt")

_MAPPING = Path("recipe")
"""Stands for the file of a recipe that is given as a mapping."""


@dataclass(frozen=True)
class TrainingResult:
    """What a run left: the trained *model* on its device, and where it was saved.

    *step* is the last step of the run, and *loss* its training loss; the loss is None when this process made no step,
    because the run was complete already. *checkpoint* and *export* (Hugging Face files) are None when nothing was
    saved or exported. *is_stopped*: SIGINT or SIGTERM ended the run early, after it had saved.
    """

    model: nn.Module
    step: int
    loss: float | None
    checkpoint: Path | None
    export: Path | None
    is_stopped: bool = False


def load_recipe(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> LoadedRecipe:
    """Load and validate a recipe: a YAML file, or the same as a mapping. Imports no torch.

    *overrides* maps dotted keys to values, such as ``{"optimizer.lr": 1e-5}``. Raises
    :class:`~automodel_ckpt.errors.RecipeError` with all mistakes together.
    """
    changes = []
    for key, value in _checked_overrides(overrides).items():
        changes.append(Override(key, node_of(value, f"{OVERRIDES}[{key!r}]")))
    if isinstance(recipe, Mapping):
        root = node_of(dict(recipe), "the recipe's mapping")
        return load.bind_recipe(_MAPPING, root, changes)
    return load.load_recipe(_checked_path(recipe), changes)


def _checked_overrides(overrides: Any) -> Mapping[str, Any]:
    """Return *overrides*, which map dotted keys to values. Raises :class:`RecipeError` for anything else."""
    if overrides is None:
        return {}
    if isinstance(overrides, Mapping) and all(isinstance(key, str) for key in overrides):
        return overrides
    raise RecipeError(
        "overrides must be a mapping from keys to values",
        "load_recipe(overrides=...)",
        f"{overrides!r:.200}",
    )


def _checked_path(recipe: Any) -> Path:
    """Return the path of a recipe. Raises :class:`RecipeError` for what is no path."""
    try:
        text = os.fsdecode(recipe)
    except TypeError:
        text = ""
    if not text or "\n" in text or "\0" in text:
        raise RecipeError(
            "this is neither the path of a recipe nor a mapping, such as yaml.safe_load returns",
            "load_recipe(recipe)",
            f"{recipe!r:.200}",
        )
    return Path(text)


def train(
    recipe: LoadedRecipe | str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    trust: Sequence[str] = (),
) -> TrainingResult:
    """Train with a recipe in this process, from its newest checkpoint if there is one, and return the trained model.

    *recipe* and *overrides* are as in :func:`load_recipe`; a recipe that is loaded already takes no overrides.
    *trust* names packages and files with code that the recipe may use, as ``--trust``. This process is one rank: under
    torchrun, each process calls this function. Ctrl-C and SIGTERM, in the main thread, save and end the run after the
    current step; a second Ctrl-C raises KeyboardInterrupt. If a step hangs (section ``hangs``) and torchrun has
    restarts left, the process ends with code 1, so that torchrun restarts the ranks.

    Raises the errors of :mod:`automodel_ckpt.errors`: :class:`~automodel_ckpt.errors.RecipeError` before training,
    ``CheckpointUnusable`` and ``SaveFailed`` as the command line reports them.
    """
    from automodel_ckpt.config.callables.prepare import prepare
    from automodel_ckpt.config.callables.trust import Trust
    from automodel_ckpt.parallel.ranks.hangs import ending_processes

    if isinstance(trust, str):
        # It is a sequence, too: of its characters.
        trust = [trust]
    if isinstance(recipe, LoadedRecipe):
        if overrides:
            raise RecipeError(
                "a loaded recipe takes no overrides: give them to load_recipe",
                "train(overrides=...)",
                ", ".join(overrides),
            )
        loaded = recipe
    else:
        loaded = load_recipe(recipe, overrides)
    loaded, recipe_class = prepare(loaded, Trust(list(trust)))
    run = recipe_class(loaded.config, config_yaml=loaded.to_yaml())
    run.origins = loaded.origins
    run.overridden = frozenset(loaded.overridden)
    is_stopped = False
    check_temporary_directory()
    with _stopping_after_a_step(), ending_processes():
        try:
            run.setup()
            try:
                run.run()
            except Stopped:
                is_stopped = True
            return _result(run, is_stopped)
        except Exception:
            run.close()
            _keep_memory(loaded)
            raise
        finally:
            run.close()


def _keep_memory(loaded: LoadedRecipe) -> None:
    """Copy the newest checkpoint in memory to disk after a failure, unless torchrun restarts the ranks."""
    from automodel_ckpt.checkpoint.memory.rescue import keep_on_disk
    from automodel_ckpt.config.tree.urls import with_local_directory
    from automodel_ckpt.parallel.ranks.hangs import has_restarts_left

    section = loaded.config.checkpoint.memory
    if section is None or has_restarts_left(os.environ):
        return
    run = Path(with_local_directory(loaded.config).checkpoint.checkpoint_dir)
    message = keep_on_disk(run, Path(section.directory), by_rank=True)
    if message:
        log.warning("%s", message)


def _result(run: Any, is_stopped: bool) -> TrainingResult:
    """Describe a run of a recipe that is derived from Recipe, before it is closed."""
    from automodel_ckpt.checkpoint.files.layout import CONSOLIDATED, state_directory
    from automodel_ckpt.checkpoint.state.module_tensors import unwrap

    newest = run.saves.last_save or run.saves.resumed
    export = getattr(newest, "export", None)
    if newest is not None and export is None and run.checkpointer.exports.is_exported(newest.path):
        export = Path(newest.path) / state_directory("model") / CONSOLIDATED
    last_step = run.loop.last_step
    return TrainingResult(
        unwrap(run.model),
        run.step_scheduler.step,
        last_step.loss if last_step is not None else None,
        Path(newest.path) if newest is not None else None,
        Path(export) if export is not None else None,
        is_stopped,
    )


@contextmanager
def _stopping_after_a_step() -> Iterator[None]:
    """During the block, let the first SIGINT or SIGTERM end the run after the current step.

    Has no effect outside of the main thread, where Python does not allow handlers.
    """
    from automodel_ckpt.parallel.ranks.stop import stop_request

    request = stop_request()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.note(number)

    # An earlier run of this process may have been stopped.
    request.reset()
    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
