"""Choose the checkpoint to load: each rank verifies a share of the files, and all ranks agree on the result."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.collective_errors import gather_or_raise, raise_on_all_ranks
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.verify import Level, verify
from automodel_ckpt.checkpoint.run import resume, verification_results
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.errors import CheckpointUnusable, Problem
from automodel_ckpt.parallel.ranks import agree

log = logging.getLogger("automodel_ckpt")


class FetchedCheckpoint(Protocol):
    """A checkpoint from a store, with all or some of its files in a local directory."""

    @property
    def path(self) -> Path:
        """The local directory."""

    def stored_locally(self, manifest: Manifest) -> Manifest:
        """Restrict *manifest* to the files in the local directory."""


class Chooser:
    """Chooses a checkpoint of a run on all ranks of *group*. *level* is how its files are verified."""

    def __init__(self, level: Level, ranks: layout.RankLayout, group: ProcessGroup | None) -> None:
        self._level: Level = level
        self._ranks = ranks
        self._group = group

    def choose(
        self,
        run: RunDirectory,
        restore_from: str | None,
        fetched: FetchedCheckpoint | None = None,
        *,
        newest_step: int | None = None,
        on_nodes: Mapping[Path, FetchedCheckpoint] | None = None,
    ) -> tuple[Path, Manifest] | None:
        """Choose and verify the newest usable checkpoint of *run*, or the one that *restore_from* names. Collective.

        *fetched* is a checkpoint that was fetched from a store to be loaded, and the only one to choose from then.
        With *newest_step*, checkpoints of later steps are left out. *on_nodes* are the checkpoints that are distributed
        over several nodes, by path. Returns None if the run has no checkpoint. Rank 0
        logs each skipped checkpoint with the reason. Raises :class:`CheckpointUnusable` on all ranks if no checkpoint
        can be used.
        """
        is_rank_0 = self._ranks.rank == 0
        request = None
        with raise_on_all_ranks(
            self._group, "looking for a checkpoint", run.path, CheckpointUnusable
        ):
            if is_rank_0:
                request = run.candidates(restore_from, None if fetched is None else fetched.path)
                if newest_step is not None:
                    request = resume.up_to(request, newest_step)
        # _examine() is collective, so all ranks must try the same checkpoints in the same order.
        request = agree.broadcast_object(self._group, request)
        assert request is not None
        chosen = self._first_usable(run, request, fetched, on_nodes or {})
        if chosen is not None and request.note and is_rank_0:
            log.info("%s", request.note)
        return chosen

    def _first_usable(
        self,
        run: RunDirectory,
        request: resume.Request,
        fetched: FetchedCheckpoint | None,
        on_nodes: Mapping[Path, FetchedCheckpoint],
    ) -> tuple[Path, Manifest] | None:
        skipped: list[resume.Rejected] = []
        for path in request.candidates:
            manifest, problems = self._examine(path, on_nodes.get(path, fetched))
            # *problems* are those of all ranks: a rank that could read everything must skip the
            # checkpoint, too.
            if manifest is not None and not problems:
                return path, manifest
            name = layout.parse_checkpoint_name(path.name)
            rejected = resume.Rejected(
                path,
                step=name.step if name else None,
                complete=manifest is not None,
                compatible=True,
                problems=tuple(problems),
            )
            skipped.append(rejected)
            if self._ranks.rank == 0:
                shown = run.display_path(path)
                log.warning("Skipping checkpoint %s: %s", shown, rejected.reason())
                if manifest is not None and path.parent == run.root:
                    verification_results.remember(run.root, {path.name: False})
        if not skipped:
            return None
        what = "no checkpoint can be used"
        if request.by_name:
            what = "the checkpoint to restore from cannot be used"
        hint = "restore the files from a copy, name another checkpoint in checkpoint.restore_from, "
        if not any(os.path.lexists(each.path / layout.MANIFEST) for each in skipped):
            hint = (
                "without MANIFEST.json, these are files of another program, or an incomplete copy: `ckpt show` names "
                "the format, and `ckpt import` (or init_from.path) takes the weights; "
            )
        raise CheckpointUnusable(
            what,
            where=str(run.path),
            value="\n" + resume.rejection_table(skipped),
            hint=f"{hint}or start a new run in another checkpoint.checkpoint_dir",
        )

    def _examine(
        self, path: Path, fetched: FetchedCheckpoint | None
    ) -> tuple[Manifest | None, list[Problem]]:
        """Verify a checkpoint; each rank reads a part of its files. Collective.

        Returns the manifest (None if it cannot be read) and the problems found by all ranks.
        """
        manifest: Manifest | None = None

        def problems_here() -> list[Problem]:
            nonlocal manifest
            try:
                manifest = Manifest.read(path)
                local = manifest if fetched is None else fetched.stored_locally(manifest)
                ranks = self._ranks
                return verify(path, local, self._level, rank=ranks.rank, num_ranks=ranks.world_size)
            except CheckpointUnusable as error:
                return list(error.problems)
            except OSError as error:
                failure = as_failure(error, f"verifying {path.name}", path, CheckpointUnusable)
                return list(failure.problems)

        doing = f"verifying {path.name}"
        by_rank = gather_or_raise(self._group, problems_here, doing, path, CheckpointUnusable)
        # The dict removes duplicates: all ranks find the same in the manifest.
        found: dict[Problem, None] = {}
        for problems in by_rank:
            found.update(dict.fromkeys(problems))
        return manifest, list(found)
