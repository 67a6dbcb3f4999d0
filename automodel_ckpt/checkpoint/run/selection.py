"""Choose the checkpoint to load: each rank verifies a share of the files, and all ranks agree on the result."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.distributed import ProcessGroup

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.collective_errors import raise_on_all_ranks
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.run import resume, verification_results
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.verify import Level, verify
from automodel_ckpt.distributed import agree
from automodel_ckpt.errors import CheckpointUnusable, Problem

log = logging.getLogger("automodel_ckpt")


class Chooser:
    """Chooses among a run's checkpoints, with *level* of comparison, on all *ranks* of *group*."""

    def __init__(self, level: Level, ranks: layout.RankLayout, group: ProcessGroup | None) -> None:
        self._level: Level = level
        self._ranks, self._group = ranks, group

    def choose(self, run: RunDirectory, restore_from: str | None) -> tuple[Path, Manifest] | None:
        """The newest usable checkpoint of *run*, or the one that *restore_from* names, verified. Collective.

        Returns None where the run has no checkpoint. Rank 0 logs each skipped checkpoint with the reason. Raises
        :class:`CheckpointUnusable` on all ranks where none can be used.
        """
        leads, request = self._ranks.rank == 0, None
        with raise_on_all_ranks(
            self._group, "looking for a checkpoint", run.path, CheckpointUnusable
        ):
            request = run.candidates(restore_from) if leads else None
        request = agree.broadcast_object(self._group, request)
        assert request is not None
        chosen = self._first_usable(run, request)
        if chosen is not None and request.note and leads:
            log.info("%s", request.note)
        return chosen

    def _first_usable(
        self, run: RunDirectory, request: resume.Request
    ) -> tuple[Path, Manifest] | None:
        skipped: list[resume.Rejected] = []
        for path in request.candidates:
            manifest, problems = self._examine(path)
            if manifest is not None and not problems:
                return path, manifest
            name = layout.parse_checkpoint_name(path.name)
            skipped.append(
                resume.Rejected(
                    path, name.step if name else None, manifest is not None, True, tuple(problems)
                )
            )
            if self._ranks.rank == 0:
                log.warning(
                    "Skipping checkpoint %s: %s", run.display_path(path), skipped[-1].reason()
                )
                if manifest is not None and path.parent == run.root:
                    verification_results.remember(run.root, {path.name: False})
        if not skipped:
            return None
        raise CheckpointUnusable(
            "the checkpoint to restore from cannot be used"
            if request.by_name
            else "no checkpoint can be used",
            where=str(run.path),
            value="\n" + resume.rejection_table(skipped),
            hint="restore the files from a copy, name another checkpoint in checkpoint.restore_from, "
            "or start a new run in another checkpoint.checkpoint_dir",
        )

    def _examine(self, path: Path) -> tuple[Manifest | None, list[Problem]]:
        """(manifest or None, problems found by all ranks). Each rank verifies its share of the files. Collective."""
        manifest, problems = None, []
        try:
            manifest = Manifest.read(path)
            problems = verify(
                path, manifest, self._level, rank=self._ranks.rank, num_ranks=self._ranks.world_size
            )
        except CheckpointUnusable as error:
            problems = list(error.problems)
        found = [
            problem for theirs in agree.gather_objects(self._group, problems) for problem in theirs
        ]
        return manifest, list(dict.fromkeys(found))
