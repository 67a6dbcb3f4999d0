"""Computing a teacher's top-k logits once for a data set, before training, with all ranks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel_ckpt.base.store_url import cache_directory
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.parts.failures import raise_on_all_ranks
from automodel_ckpt.config.keys.kinds import DistillConfig
from automodel_ckpt.data.batches.micro_batches import collate, isolated_rng, read_sample
from automodel_ckpt.data.samples.teacher_targets import (
    PartWriter,
    Publication,
    SampleTargets,
    TargetCache,
    TargetedDataset,
    batches_of,
    checksum,
    data_digest,
    num_labels,
    require_labels,
    share_of,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.loss.distillation_targets import top_of
from automodel_ckpt.models.loss.fused_distillation import rows_of_chunk
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.ranks.agree import (
    broadcast_object,
    gather_objects,
    on_all_ranks,
    while_working,
)
from automodel_ckpt.training.kinds.teacher import Teacher, with_numbered_labels

log = logging.getLogger("automodel_ckpt")

_HINT = "set distill.cache_dir to a directory with enough free space that all nodes can write"


Top = tuple[Tensor, Tensor, Tensor]
"""What :func:`top_of` returns, on the CPU."""


class TeacherCaches:
    """Finds, verifies and computes the caches of one teacher for the data sets of a run."""

    def __init__(
        self,
        layout: RankLayout,
        section: DistillConfig,
        *,
        teacher: str,
        num_columns: int | None,
        batch_size: int,
        collate_fn: Any,
    ) -> None:
        """*teacher* is a line that changes with the teacher, *collate_fn* makes micro-batches of *batch_size* samples
        without targets."""
        self._layout = layout
        self._teacher = teacher
        self._top_k = section.top_k or 0
        self._settings = (self._top_k, section.temperature, num_columns)
        self._directory = Path(section.cache_dir).expanduser() if section.cache_dir else None
        self._batch_size = batch_size
        self._collate = collate_fn

    def find(self, dataset: TargetedDataset) -> TargetCache | None:
        """Open the cache of *dataset*. Returns None when there is no cache or a file is damaged. A collective."""
        check_countable(dataset.dataset)
        directory, key = self._place(dataset)
        cache = TargetCache.open(directory, key)
        group = self._layout.gloo_group
        if not on_all_ranks(group, cache is not None):
            return None
        assert cache is not None
        found = cache
        ranks = (self._layout.rank, self._layout.world_size)
        damaged = while_working(group, lambda: found.damaged_file(*ranks))
        if damaged is not None:
            log.warning("the cache of the teacher's logits is damaged: %s", directory / damaged)
        if not on_all_ranks(group, damaged is None):
            return None
        log.info("the teacher's logits of %s are cached: %s", _size(dataset), directory)
        return cache

    def compute(self, dataset: TargetedDataset, teacher: Teacher) -> TargetCache:
        """Compute the logits of all samples of *dataset* by *teacher*, and publish them. A collective.

        Raises :class:`RecipeError` if the cache cannot be written, or not be read by all ranks.
        """
        directory, key = self._place(dataset)
        group = self._layout.gloo_group
        log.info(
            "computing the %d most probable tokens of the teacher for %s: %s",
            self._top_k,
            _size(dataset),
            directory,
        )
        publication = None
        with self._raising_on_all_ranks():
            if self._layout.is_rank0:
                publication = Publication(directory)
        staging = broadcast_object(group, publication.directory if publication else Path())
        try:
            entries = gather_objects(group, self._compute_part(dataset, teacher, staging))
            with self._raising_on_all_ranks():
                if publication is not None:
                    written = [each for each in entries if each is not None]
                    publication.publish(key, sorted(written, key=lambda each: int(each["number"])))
        except BaseException:
            if publication is not None:
                publication.discard()
            raise
        cache = TargetCache.open(directory, key)
        if not on_all_ranks(group, cache is not None):
            raise RecipeError(
                "a rank does not find the cache of the teacher's logits that was just written",
                where="distill.cache_dir",
                value=str(directory),
                hint=_HINT,
            )
        assert cache is not None
        return cache

    def _compute_part(
        self, dataset: TargetedDataset, teacher: Teacher, directory: Path
    ) -> dict[str, Any] | None:
        """Write the targets of this rank's samples in order. Returns the entry of the manifest, if this rank has one.

        A collective: all ranks make as many forward passes. An error of a rank between two of them, when it reads
        samples or writes their targets, is raised on all ranks.
        """
        layout, size, num_samples = self._layout, self._batch_size, len(dataset)
        mine = share_of(num_samples, layout.dp_rank, layout.dp_size)
        largest = max(len(share_of(num_samples, n, layout.dp_size)) for n in range(layout.dp_size))
        writer: PartWriter | None = None
        computed: list[SampleTargets] = []
        with self._raising_on_all_ranks():
            # Ranks of a tensor parallel group compute the same; one of them writes.
            if layout.reports:
                writer = PartWriter(directory, layout.dp_rank)
        batches = batches_of(mine, size, -(-largest // size), num_samples)
        for number, indices in enumerate(batches):
            with self._raising_on_all_ranks():
                # Those of the batch before: the ranks agree once per forward pass.
                _write(writer, computed)
                with isolated_rng():
                    samples = [read_sample(dataset.dataset, index) for index in indices]
                    micro_batch = collate(self._collate, samples, indices, empty=False)
                counts = [num_labels(sample) for sample in samples]
                require_labels(micro_batch, sum(counts))
                checksums = [checksum(sample) for sample in samples]
            parts = [torch.split(each, counts) for each in self._top_of(micro_batch, teacher)]
            computed = []
            # Other batches only keep this rank in step.
            if number * size < len(mine):
                for tokens, log_probs, rest, found in zip(*parts, checksums, strict=True):
                    top = (tokens.numpy(), log_probs.numpy(), rest.numpy())
                    computed.append(SampleTargets(*top, found))
        entry = None
        with self._raising_on_all_ranks():
            _write(writer, computed)
            if writer is not None:
                entry = {"number": layout.dp_rank, **writer.close()}
        return entry

    def _top_of(self, micro_batch: dict[str, Tensor], teacher: Teacher) -> Top:
        """The most probable tokens at the labels of *micro_batch*, on the CPU: see :func:`top_of`."""
        top_k, temperature, _ = self._settings
        numbered, labels = with_numbered_labels(micro_batch)
        found: list[Top] = []
        with torch.no_grad(), teacher.predicting(numbered, None) as targets:
            start = 0
            # The number of columns, and with it the size of a chunk, is known after the first one.
            size = 1
            while start < len(labels):
                end = min(start + size, len(labels))
                logits = targets.complete_logits(start, end)
                tokens, log_probs, rest = top_of(logits, top_k, temperature)
                found.append((tokens.cpu(), log_probs.cpu(), rest.cpu()))
                start = end
                size = rows_of_chunk(logits.device.type, logits.shape[1])
        if not found:
            empty = torch.empty(0, top_k)
            return empty.int(), empty, torch.empty(0)
        tokens, log_probs, rest = (torch.cat(parts) for parts in zip(*found, strict=True))
        return tokens, log_probs, rest

    def _place(self, dataset: TargetedDataset) -> tuple[Path, str]:
        """The directory and the key of the cache of *dataset*, the same on all ranks. A collective."""
        digest = None
        with self._raising_on_all_ranks():
            directory = self._directory or cache_directory()
            if self._layout.is_rank0:
                with isolated_rng():
                    digest = data_digest(dataset.dataset)
        digest = broadcast_object(self._layout.gloo_group, digest)
        key = repr((digest, len(dataset), self._teacher, *self._settings))
        name = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
        return directory / f"teacher-{name}", key

    def _raising_on_all_ranks(self) -> AbstractContextManager[None]:
        """Return a context manager that raises on all ranks what its block raises on one rank."""
        group = self._layout.gloo_group
        return raise_on_all_ranks(
            group, "caching the teacher's logits", "distill.top_k", RecipeError, _HINT
        )


def _write(writer: PartWriter | None, computed: Sequence[SampleTargets]) -> None:
    if writer is not None:
        for each in computed:
            writer.add(each)


def check_countable(dataset: Any) -> None:
    """Raise :class:`RecipeError` for an iterable data set: its samples have no numbers."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return
    raise RecipeError(
        "the teacher's logits of an iterable data set cannot be cached: its samples have no numbers",
        where="distill.top_k",
        value=type(dataset).__name__,
        hint="remove distill.top_k, or use a data set with a length (dataset.streaming: false)",
    )


def _size(dataset: TargetedDataset) -> str:
    return counted(len(dataset), "sample")
