"""Choose the checkpoint to load, check that it belongs to this model, and load it on all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.parts.discovery import classify
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.notes import note_verifications
from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets
from automodel_ckpt.checkpoint.saving.save import SaveSettings, json_values
from automodel_ckpt.checkpoint.state.mismatch import first_lines, other_kind_of_run
from automodel_ckpt.checkpoint.state.model_config import (
    CONFIG,
    ConfigChanges,
    model_changes,
    require_same_function,
)
from automodel_ckpt.errors import (
    CheckpointUnusable,
    LeaseLost,
    Problem,
    RecipeError,
    unusable,
)
from automodel_ckpt.parallel.ranks import agree

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.memory.survey import CheckpointOnNodes
    from automodel_ckpt.checkpoint.remote.fetch import Fetched
    from automodel_ckpt.checkpoint.state.loading import Loader
    from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges

    Streamed: TypeAlias = Fetched | CheckpointOnNodes
    """A checkpoint of which each rank reads the tensors that it needs, from a store or from other nodes."""


log = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was loaded: the checkpoint's path, its step and epoch, and its manifest; whether it was one in memory.

    *started_anew* are attributes with saved state that did not match and was left out (``allow_missing_state``).
    """

    path: Path
    step: int
    epoch: int
    manifest: Manifest
    in_memory: bool = False
    started_anew: frozenset[str] = frozenset()

    def note_validation(self, run: RunDirectory, losses: Values) -> None:
        """Record the losses of a validation that ran after the checkpoint was published, so that it can be ranked.

        Called by rank 0. *run* is the run directory: a checkpoint that is elsewhere is not ranked.
        """
        # A lost lease is raised on all ranks before the next step.
        if self.path.parent == run.root:
            with contextlib.suppress(LeaseLost):
                run.note_validation(self.path.name, self.manifest.digest, json_values(losses))

    @property
    def loaded(self) -> frozenset[str]:
        """The names, aliases included, of the attributes that were loaded."""
        return self.manifest.saved - self.started_anew


class CheckpointLoader:
    """Loads checkpoints of the run with *settings* on all its ranks.

    With ``on_incompatible: sibling`` it may replace the run directory in *settings* by a sibling of it.
    """

    def __init__(self, settings: SaveSettings) -> None:
        self._settings, self._options = settings, settings.options
        self.on_nodes: Mapping[Path, Streamed] = {}
        """The checkpoints that are distributed over several nodes, by path."""

    @property
    def _run(self) -> RunDirectory:
        return self._settings.run

    def load(
        self,
        state: Values,
        before_loading: Callable[[Path, Manifest], None] | None,
        fetched: Fetched | None = None,
    ) -> Resumed | None:
        """Load the newest usable checkpoint, or the one that ``restore_from`` names, into *state*. Collective.

        *fetched* is the checkpoint to load, if it was fetched from a store and is not one of the run directory.
        Returns None in a new run. Rank 0 calls *before_loading* with the chosen checkpoint before anything is loaded.
        Raises :class:`CheckpointUnusable` on all ranks where no checkpoint can be used or the chosen one does not
        match.
        """
        restore_from = self._options.restore_from
        found = self._choose(restore_from, fetched)
        # _choose() is collective, so all ranks must compute the same differences.
        while found is not None and (differences := self._incompatible(*found, state)):
            self._move_to_sibling(found[0], differences)
            fetched = None
            found = self._choose(restore_from)
        if found is None:
            return None
        return self._load_chosen(*found, state, before_loading, fetched)

    def _choose(
        self,
        restore_from: str | None,
        fetched: Streamed | None = None,
        newest_step: int | None = None,
    ) -> tuple[Path, Manifest] | None:
        """Choose and verify the newest usable checkpoint, or the one that *restore_from* names. Collective.

        *fetched* is a checkpoint that was fetched from a store to be loaded, and the only one to choose from then.
        With *newest_step*, checkpoints of later steps are left out. Returns None when the run has no checkpoint. Rank 0
        logs each skipped checkpoint with the reason. Raises :class:`CheckpointUnusable` on all ranks if no checkpoint
        can be used.
        """
        run, request = self._run, None
        with self._settings.raise_on_all_ranks("looking for a checkpoint", CheckpointUnusable):
            if self._settings.is_rank0:
                request = run.candidates(restore_from, None if fetched is None else fetched.path)
                if newest_step is not None:
                    request = resume.up_to(request, newest_step)
        # _examine() is collective, so all ranks must try the same checkpoints in the same order.
        request = agree.broadcast_object(self._settings.group, request)
        assert request is not None
        chosen = self._first_usable(request, fetched)
        if chosen is not None and request.note and self._settings.is_rank0:
            log.info("%s", request.note)
        return chosen

    def _first_usable(
        self, request: resume.Request, fetched: Streamed | None
    ) -> tuple[Path, Manifest] | None:
        run = self._run
        skipped = []
        for path in request.candidates:
            manifest, problems = self._examine(path, self.on_nodes.get(path, fetched))
            # *problems* are from all ranks: a rank that could read everything must skip the
            # checkpoint, too.
            if manifest is not None and not problems:
                return path, manifest
            reason = "; ".join(f"{p.what} ({p.where}: {p.value})" for p in problems)
            name = layout.parse_checkpoint_name(path.name)
            step = str(name.step) if name else "?"
            answers = ("no", "?") if manifest is None else ("yes", "yes")
            skipped.append((str(path), step, *answers, reason))
            if self._settings.is_rank0:
                shown = run.display_path(path)
                log.warning("Skipping checkpoint %s: %s", shown, reason)
                if manifest is not None and path.parent == run.root:
                    note_verifications(run.root, {path.name: False})
        if not skipped:
            return None
        what = "no checkpoint can be used"
        if request.by_name:
            what = "the checkpoint to restore from cannot be used"
        raise unusable(
            what,
            run.path,
            _table([("path", "step", "complete", "compatible", "reason"), *skipped]),
            "restore the files from a copy, name another checkpoint in checkpoint.restore_from, take the weights "
            "of another program with `ckpt import` (or init_from.path), or start a new run in another "
            "checkpoint.checkpoint_dir",
        )

    def _examine(
        self, path: Path, fetched: Streamed | None
    ) -> tuple[Manifest | None, list[Problem]]:
        """Verify a checkpoint; each rank reads a part of its files. Collective.

        Returns the manifest (None when it cannot be read) and the problems found by all ranks.
        """
        manifest: Manifest | None = None
        doing = f"verifying {path.name}"
        failure = partial(as_failure, doing=doing, where=path, kind=CheckpointUnusable)

        def problems_here() -> list[Problem]:
            nonlocal manifest
            try:
                manifest = Manifest.read(path)
                local = manifest if fetched is None else fetched.stored_locally(manifest)
                ranks, level = self._settings.ranks, self._options.verify
                return verify(path, local, level, rank=ranks.rank, num_ranks=ranks.world_size)
            except CheckpointUnusable as error:
                return list(error.problems)
            except OSError as error:
                return list(failure(error).problems)

        by_rank = agree.gather_or_raise(self._settings.group, problems_here, failure)
        # The dict removes duplicates: all ranks find the same in the manifest.
        found = {}
        for problems in by_rank:
            found.update(dict.fromkeys(problems))
        return manifest, list(found)

    def roll_back(self, state: Values, step: int, fetched: Fetched | None = None) -> Resumed | None:
        """Load the newest usable checkpoint of *step* or an earlier one into *state*. Collective.

        *fetched* is as in :meth:`load`. Returns None when there is none. Raises :class:`CheckpointUnusable` on all
        ranks if none of them can be used.
        """
        # Until the next save renames them, checkpoints of an earlier generation of the run have later steps.
        if self._run.went_back_to is not None:
            step = min(step, self._run.went_back_to)
        found = self._choose(None, fetched, newest_step=step)
        if found is None:
            return None
        return self._load_chosen(*found, state, fetched=fetched)

    def _load_chosen(
        self,
        path: Path,
        manifest: Manifest,
        state: Values,
        before_loading: Callable[[Path, Manifest], None] | None = None,
        fetched: Streamed | None = None,
    ) -> Resumed:
        in_memory = path.parent == self._run.memory
        fetched = self.on_nodes.get(path, fetched)
        if self._settings.is_rank0:
            shown = self._run.display_path(path) if fetched is None else fetched.name
            log.info("Loading checkpoint from %s", shown)
        with self._settings.raise_on_all_ranks(f"loading {path.name}", CheckpointUnusable):
            self._check_adapters(path, manifest)
            if before_loading is not None and self._settings.is_rank0:
                before_loading(path, manifest)
            started_anew = self._load(path, manifest, state, fetched)
        # Without restore_from, too: checkpoints that were skipped as damaged may have later names.
        self._run.went_back_to = manifest.step
        self._settings.resumed_from = path.name
        return Resumed(path, manifest.step, manifest.epoch, manifest, in_memory, started_anew)

    def _load(
        self, path: Path, manifest: Manifest, state: Values, fetched: Streamed | None
    ) -> frozenset[str]:
        """Load the checkpoint into this rank's *state*. Raises :class:`CheckpointUnusable` where it does not match.

        Returns the attributes that start without the saved state.
        """
        items = classify(state)
        remote = None if fetched is None else fetched.ranges(manifest)
        loader = self._loader(path, manifest, remote)
        is_expected = self._settings.options.save_optimizer or manifest.is_imported_run
        if manifest.left_out and not is_expected and self._settings.is_rank0:
            message = "checkpoint.save_optimizer is false: %s was saved without %s, which start with new state"
            log.warning(message, path.name, ", ".join(sorted(manifest.left_out)))
        # Where tensors do not fit, load() raises with their names, which says more than the model's config.
        if not loader.incompatibilities(items):
            self._check_same_model(path)
        with contextlib.closing(remote) if remote is not None else contextlib.nullcontext():
            loader.load(items)
        return loader.started_anew

    def _loader(
        self, path: Path, manifest: Manifest, remote: VerifiedRanges | None = None
    ) -> Loader:
        """A loader that allows the state to be missing which the checkpoint was saved without.

        Applies with ``save_optimizer: false``: otherwise the same command could not resume. Also applies to imported
        checkpoints, since other programs have no such state; their LR schedule may be left out, too, because the
        recipe defines whether there is one.
        """
        allowed = set(self._options.allow_missing_state)
        if not self._settings.options.save_optimizer or manifest.is_imported_run:
            allowed |= manifest.left_out
        if manifest.is_imported_run:
            for name, record in manifest.state.items():
                if record.kind == "lr_scheduler":
                    allowed.add(name)
        from automodel_ckpt.checkpoint.state.loading import Loader

        return Loader(path, manifest, self._settings.ranks, frozenset(allowed), remote)

    # ---------------------------------------------------------------- another model

    def _incompatible(self, path: Path, manifest: Manifest, state: Values) -> list[str]:
        """The differences for which the run continues in a sibling directory; empty where it does not. Collective."""
        options = self._options
        if options.on_incompatible != "sibling" or options.restore_from is not None:
            return []
        with self._settings.raise_on_all_ranks(f"comparing with {path.name}", CheckpointUnusable):
            lines = self._loader(path, manifest).incompatibilities(classify(state))
            if not lines and not options.allow_changed_model:
                lines = list(self._model_changes(path).function)
            return lines

    def _move_to_sibling(self, path: Path, differences: list[str]) -> None:
        """Continue in the next sibling directory (``checkpoints.sibling-1``, -2, ...); the current one is unchanged."""
        previous = self._run
        self._settings.run = previous.sibling()
        if self._settings.is_rank0:
            message = (
                "THE CHECKPOINTS IN %s BELONG TO A DIFFERENT MODEL and are not changed: continuing in %s. "
                "Differences from %s:%s"
            )
            lines = first_lines(differences)
            log.warning(message, previous.path, self._run.path, path.name, lines)
        doing = "opening a sibling of checkpoint.checkpoint_dir"
        with self._settings.raise_on_all_ranks(doing, RecipeError):
            previous.release()
            if self._settings.is_rank0:
                self._run.hold()

    def _check_adapters(self, path: Path, manifest: Manifest) -> None:
        """Raise :class:`CheckpointUnusable` where only one of this run and the checkpoint's run trains adapters.

        Also where its adapters belong to another base model.
        """
        for name, assets in self._settings.assets.items():
            if name not in manifest.state:
                continue
            has_adapters = _has_file(manifest, name, layout.AUTOMODEL_PEFT_CONFIG)
            # A Checkpointer without assets writes neither (0.1.0 also for adapters): the tensors tell what they are.
            is_described = has_adapters or _has_file(manifest, name, CONFIG)
            if is_described and has_adapters != isinstance(assets, AdapterAssets):
                raise other_kind_of_run(path, has_adapters=has_adapters)
            if has_adapters and isinstance(assets, AdapterAssets):
                assets.check_base(path, layout.state_directory(name))

    def _model_changes(self, path: Path) -> ConfigChanges:
        """How the models differ from those saved in *path*; the base of adapters is compared by its digests instead."""
        configs = {
            name: assets.files[CONFIG]
            for name, assets in self._settings.assets.items()
            if not isinstance(assets, AdapterAssets) and CONFIG in assets.files
        }
        return model_changes(path, configs)

    def _check_same_model(self, path: Path) -> None:
        """Raise :class:`CheckpointUnusable` where the model would compute another function with the saved weights."""
        changes = self._model_changes(path)
        if self._settings.is_rank0 and changes.training:
            message = "the model's config changed since %s was saved:%s"
            log.warning(message, path.name, first_lines(list(changes.training)))
        if not self._options.allow_changed_model:
            require_same_function(path, changes)
        elif self._settings.is_rank0 and changes.function:
            message = (
                "checkpoint.allow_changed_model: the model computes "
                "a different function than the one saved in %s:%s"
            )
            log.warning(message, path.name, first_lines(list(changes.function)))


def _has_file(manifest: Manifest, name: str, file: str) -> bool:
    """Return whether the module *name* of a checkpoint has this side file."""
    directory = layout.state_directory(name)
    places = (directory, f"{directory}/{layout.HF_METADATA}")
    return any(f"{place}/{file}" in manifest.files for place in places)


def _table(rows: list[tuple[str, ...]]) -> str:
    """The *rows* as lines of aligned columns, each after a line break."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # The last column has long texts.
    widths[-1] = 0
    return "".join("\n" + "  ".join(map(str.ljust, row, widths)) for row in rows)
