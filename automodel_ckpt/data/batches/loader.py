"""The loader of global batches. Its state is a position in the global order of samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.batches.micro_batches import (
    BatchSizes,
    Collate,
    Request,
    SampleReader,
    isolated_rng,
    permutation,
    read_all,
)
from automodel_ckpt.data.batches.micro_batches import GlobalBatch as GlobalBatch
from automodel_ckpt.data.collate import State
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, RecipeError

log = logging.getLogger(__name__)


class GlobalBatchLoader:
    """Iterates over the rest of the current epoch in global batches, for one data parallel rank.

    *dataset* is map-style (``__len__`` and ``__getitem__``) or iterable. *collate_fn* turns a list of samples into a
    mapping of tensors with a key ``labels``. The global random generators are unchanged. Call :meth:`mark_consumed`
    after each optimizer step: only this advances :attr:`epoch` and :attr:`consumed_samples`, which are the saved state,
    so prefetched samples are never counted. Load a state before iterating. With *with_preceding*, *collate_fn* gets one
    more sample before the samples of a micro-batch: the one before its first sample in the global batch. Within a
    global batch, the first sample follows the last. This does not depend on the number of ranks.

    Raises :class:`RecipeError` for an empty data set and for batch sizes that do not divide.
    """

    checkpoint_scope = "dp_rank"

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        local_batch_size: int,
        collate_fn: Collate,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        with_preceding: bool = False,
    ) -> None:
        _check_division(global_batch_size, local_batch_size, dp_size)
        self.dataset = dataset
        self.sizes = BatchSizes(
            global_batch_size, local_batch_size, dp_rank, dp_size, drop_last, with_preceding
        )
        self.collate_fn = collate_fn
        self.seed = seed
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.num_samples = _length(dataset)
        self.epoch = 0
        self.consumed_samples = 0
        self._source_state: Any = None
        self._start_state: Any = None
        if self.num_samples is None:
            self._prepare_stream()
        elif self.num_samples == 0:
            raise _empty("the data set is empty")
        elif len(self) == 0:
            raise RecipeError(
                "the data set has fewer samples than one global batch, and drop_last drops them all",
                where="dataloader.drop_last",
                value=f"{counted(self.num_samples, 'sample')}, global_batch_size {global_batch_size}",
                hint="set dataloader.drop_last false or a smaller step_scheduler.global_batch_size",
            )

    def __len__(self) -> int:
        """The number of global batches in an epoch. Raises :class:`TypeError` for an iterable data set."""
        if self.num_samples is None:
            raise TypeError("an iterable data set has no length")
        size = self.sizes.global_batch_size
        if self.sizes.drop_last:
            return self.num_samples // size
        return -(-self.num_samples // size)

    def __iter__(self) -> Generator[GlobalBatch]:
        is_stream = self.num_samples is None
        batches = self._stream_batches() if is_stream else self._map_batches()
        # If the caller stops early, worker processes end now and not when garbage is collected.
        with closing(batches):
            first = next(batches, None)
            if first is not None:
                yield first
                yield from batches
                return
        # The saved position is the end of an epoch, for example because the global batch size changed.
        self._skip_to_next_epoch()
        yield from self

    def mark_consumed(self, batch: GlobalBatch) -> None:
        """Count *batch* as trained on. Raises :class:`AutomodelError` unless it is the next one."""
        if (batch.epoch, batch.start) != (self.epoch, self.consumed_samples):
            raise AutomodelError(
                "global batches must be marked as consumed once each and in order",
                where="GlobalBatchLoader.mark_consumed",
                value=f"epoch {batch.epoch} sample {batch.start}, "
                f"but the next is epoch {self.epoch} sample {self.consumed_samples}",
                hint="call mark_consumed(batch) right after the optimizer step of each batch",
            )
        self._source_state = batch.source_state
        if batch.last_of_epoch:
            self.epoch += 1
            self.consumed_samples = 0
        else:
            # The whole global batch, not this rank's part: the position is the same on every rank.
            self.consumed_samples += len(batch.sample_ids)

    def state_dict(self) -> State:
        """The position after the last finished optimizer step, which is independent of the number of ranks."""
        state: State = {
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
            "global_batch_size": self.sizes.global_batch_size,
        }
        if (identity := _identity(self.dataset)) is not None:
            state["data"] = identity
        if self._source_state is not None:
            state["source"] = self._source_state
        return state

    def gather_state(self, gather: Callable[[Any], list[Any]]) -> None:
        """Complete the state for the next :meth:`state_dict`, before a save. A collective: call it on all ranks.

        A packed stream is the only data set of which each rank has a part of the state. *gather* returns the objects of
        all ranks.
        """
        if self._source_state is not None and self._is_packed:
            self._source_state = self.dataset.merged(gather(self._source_state))

    def load_state_dict(self, state: State) -> None:
        """Continue from a saved position, on any number of ranks.

        The saved order (seed, shuffle) takes precedence over the recipe's. Logs a warning if they differ, if the global
        batch size changed, and if the data changed but kept its length. Raises :class:`RecipeError` if the data set has
        another length, and :class:`CheckpointUnusable` if *state* is not the state of a loader.
        """
        position = [state.get(name) for name in ("epoch", "consumed_samples")]
        # A checkpoint is data from outside: a float, a bool or a huge number must not become an index.
        is_valid = [type(count) is int and 0 <= count < 2**53 for count in position]
        if not all(is_valid) or not self.state_dict().keys() - {"data", "source"} <= state.keys():
            raise CheckpointUnusable(
                "this is not the state of a data loader",
                where="dataloader",
                value=str(state)[:200],
                hint="resume from another checkpoint (checkpoint.restore_from)",
            )
        saved = state["num_samples"]
        if saved != self.num_samples:
            raise RecipeError(
                "the data set differs from the one in the checkpoint",
                where="dataset",
                value=f"the checkpoint was saved with {_size(saved)}, the recipe has {_size(self.num_samples)}",
                hint="resume with the same data set; to train on other data, start a new run from the exported model "
                "in another checkpoint_dir",
            )
        self._report_differences(state)
        # Assigned after all checks, so that a rejected state changes nothing.
        self.epoch = state["epoch"]
        self.consumed_samples = state["consumed_samples"]
        self.seed = state["seed"]
        self.shuffle = state["shuffle"]
        if self.num_samples is None:
            self._load_source_state(state.get("source"))

    def start_after(self, num_steps: int, consumed_samples: int | None) -> None:
        """Continue after *num_steps* steps of another program on the same data, which used *consumed_samples*.

        Samples that another program counts, or None, are replaced by steps if they are that number of full global
        batches: the last batch of an epoch may have been smaller. Logs the position and, if the global batch size
        differs, a warning.
        """
        size = self.sizes.global_batch_size
        are_full_batches = consumed_samples in (None, num_steps * size)
        consumed = num_steps * size if consumed_samples is None else consumed_samples
        if not are_full_batches:
            self._warn(
                f"the imported run used {counted(consumed, 'sample')} in {counted(num_steps, 'step')}; with "
                f"global_batch_size {size} they would be {num_steps * size}: global batches and step counts differ "
                "from here on"
            )
        if self.num_samples is None:
            # The length of an epoch is unknown: where the stream ends earlier, the next epoch begins.
            self.epoch, self.consumed_samples = 0, consumed
            self._load_source_state(None)
        elif are_full_batches:
            self.epoch, batches_of_epoch = divmod(num_steps, len(self))
            self.consumed_samples = batches_of_epoch * size
        else:
            self.epoch, self.consumed_samples = divmod(consumed, self._samples_per_epoch)
        if self.sizes.dp_rank == 0:
            log.info(
                "continuing after sample %d of epoch %d, in the order of the recipe's data set",
                self.consumed_samples,
                self.epoch,
            )

    @property
    def samples_before(self) -> int:
        """The samples before the position, in all epochs. The number in an epoch of a stream is not known."""
        if self.num_samples is None:
            return self.consumed_samples
        return self.epoch * self._samples_per_epoch + self.consumed_samples

    @property
    def _samples_per_epoch(self) -> int:
        assert self.num_samples is not None
        return (
            len(self) * self.sizes.global_batch_size if self.sizes.drop_last else self.num_samples
        )

    def _map_batches(self) -> Generator[GlobalBatch]:
        num_samples, epoch = len(self.dataset), self.epoch
        size = self.sizes.global_batch_size
        order = permutation(num_samples, self.seed, epoch, self.shuffle).numpy()
        # A mixture uses other samples in each epoch.
        epoch_indices = getattr(self.dataset, "epoch_indices", None)
        if epoch_indices is not None:
            order = epoch_indices(epoch, self.seed, shuffle=self.shuffle)[order]
        end = num_samples - size + 1 if self.sizes.drop_last else num_samples
        starts = range(self.consumed_samples, end, size)
        batches_of_ids = (order[start : start + size] for start in starts)
        # Workers prefetch, so requests are drawn early: they must not depend on what is consumed.
        requests = chain.from_iterable(self._requests(epoch, ids) for ids in batches_of_ids)
        reader = SampleReader(self.dataset, self.collate_fn)
        advances_rng = reader.may_draw or self.num_workers > 0
        with closing(read_all(reader, requests, self.num_workers)) as batches:
            for start in starts:
                ids = order[start : start + size].tolist()
                num_micro_batches = len(self.sizes.rank_part(ids))
                # Left before the yield: the training step draws from the generators that
                # checkpoints store.
                with isolated_rng() if advances_rng else nullcontext():
                    micro_batches = list(islice(batches, num_micro_batches))
                is_last = start == starts[-1]
                yield GlobalBatch(
                    epoch, start // size, start, ids, micro_batches, last_of_epoch=is_last
                )

    def _requests(self, epoch: int, ids: np.ndarray[Any, Any]) -> Iterator[Request]:
        """Yield the requests for this rank's micro-batches of the global batch with these sample ids."""
        global_ids = ids.tolist()
        # By offset, since a mixture can have a sample twice in a global batch.
        for offsets in self.sizes.rank_part(range(len(global_ids))):
            part = [global_ids[offset] for offset in offsets]
            before = None
            if self.sizes.with_preceding:
                before = global_ids[(offsets[0] if offsets else 0) - 1]
            yield Request(self.seed, epoch, part, filler=global_ids[0], preceding=before)

    def _stream_batches(self) -> Generator[GlobalBatch]:
        from automodel_ckpt.data.batches.stream_batches import StreamPosition, read_stream

        position = StreamPosition(
            self.seed,
            self.epoch,
            self.consumed_samples,
            self._source_state,
            self._start_state,
            self.shuffle,
        )
        how = (position, self.sizes, self.collate_fn, self.num_workers)
        read = self.dataset.read_batches if self._is_packed else partial(read_stream, self.dataset)
        with closing(read(*how)) as batches:
            while True:
                with isolated_rng():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

    def _skip_to_next_epoch(self) -> None:
        unit = "full global batch (drop_last is set)" if self.sizes.drop_last else "sample"
        # Otherwise __iter__ would continue forever with a source that yields nothing.
        if self.consumed_samples == 0:
            raise _empty(f"epoch {self.epoch} of the iterable data set yields no {unit}")
        self._warn(
            f"epoch {self.epoch} has no further {unit} after {counted(self.consumed_samples, 'sample')}: "
            f"continuing with epoch {self.epoch + 1}"
        )
        self.epoch += 1
        self.consumed_samples = 0

    @property
    def _is_ordered(self) -> bool:
        """Whether a stream has a method ``set_order(seed, epoch, shuffle=...)`` that defines its order."""
        return callable(getattr(self.dataset, "set_order", None))

    @property
    def _is_packed(self) -> bool:
        """Whether the data set is a packed stream, which makes the rows of this rank itself."""
        return hasattr(self.dataset, "read_batches")

    def _prepare_stream(self) -> None:
        from automodel_ckpt.data.batches.stream_batches import restores_exactly

        # Set by datasets.distributed.split_dataset_by_node.
        if getattr(self.dataset, "_distributed", None) is not None:
            raise RecipeError(
                "the stream is already split by rank",
                where="dataset",
                value="datasets.distributed.split_dataset_by_node",
                hint="remove the split: the loader gives each rank its part of every global batch, so that global "
                "batches do not depend on the number of ranks",
            )
        if self.shuffle and not self._is_ordered:
            self._warn(
                "an iterable data set is read in its own order; dataloader.shuffle does not apply"
            )
        if self.num_workers > 1 and not self._is_packed:
            self._warn(
                f"an iterable data set is read by one worker process, not {self.num_workers}"
            )
        if restores_exactly(self.dataset):
            self._source_state = self._start_state = self.dataset.state_dict()

    def _report_differences(self, state: State) -> None:
        """Warn of data that changed but kept its length, of another order, and of other global batches."""
        position = f"after sample {state['consumed_samples']} of epoch {state['epoch']}"
        current, saved = _identity(self.dataset), state.get("data")
        if current is not None and saved is not None and current != saved:
            self._warn(
                "the data has changed since this checkpoint was saved, although its length is the same: its files, "
                "seq_length, truncation, tokenizer or chat template differ. Training continues with the current data "
                f"{position}"
            )
        for name in ("seed", "shuffle"):
            # A stream without set_order has its own order.
            applies = name == "seed" or self.num_samples is not None or self._is_ordered
            if applies and state[name] != getattr(self, name):
                self._warn(
                    f"keeping the saved data order ({name} {state[name]}) instead of the recipe's {name} "
                    f"{getattr(self, name)}: another order would repeat and skip samples"
                )
        size = self.sizes.global_batch_size
        saved_size = state["global_batch_size"]
        if saved_size != size:
            self._warn(
                f"global_batch_size changed from {saved_size} to {size}: training continues {position}, "
                "with different global batches and step counts"
            )

    def _load_source_state(self, source_state: Any) -> None:
        from automodel_ckpt.data.batches.stream_batches import restores_exactly

        if source_state is not None and restores_exactly(self.dataset):
            self._source_state = source_state
            return
        self._source_state = self._start_state if self._is_packed else None
        if self.consumed_samples:
            self._warn(
                f"the stream has no state to resume from: reading and discarding {self.consumed_samples} samples"
            )

    def _warn(self, message: str) -> None:
        """Log a warning on data parallel rank 0 only."""
        if self.sizes.dp_rank == 0:
            log.warning(message)


def _identity(dataset: Any) -> str | None:
    known = getattr(dataset, "identity", None)
    return known if isinstance(known, str) else None


def _length(dataset: Any) -> int | None:
    """The number of samples of a map-style data set; None for an iterable one.

    Raises :class:`RecipeError` if *dataset* is neither.
    """
    is_mapping = isinstance(dataset, Mapping)
    # Checked first: it inherits __getitem__ from torch's Dataset, and may have __len__.
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if not is_mapping:
            return len(dataset)
    elif hasattr(dataset, "__iter__"):
        return None
    raise RecipeError(
        "the data set is neither map-style nor iterable",
        where="dataset",
        value=", ".join(map(str, dataset)) if is_mapping else type(dataset).__name__,
        hint="give it __len__ and __getitem__, or __iter__; of a mapping of data sets, return one, such as the split "
        "train",
    )


def _size(num_samples: int | None) -> str:
    if num_samples is None:
        return "an iterable data set"
    return f"a data set of {counted(num_samples, 'sample')}"


def _empty(what: str) -> RecipeError:
    return RecipeError(
        what,
        where="dataset",
        value="0 samples",
        hint="check its path, split and filters; an iterable data set must restart at each __iter__",
    )


def _check_division(global_batch_size: int, local_batch_size: int, dp_size: int) -> None:
    """Raise :class:`RecipeError` unless each rank has equally many full micro-batches of a global batch."""
    per_pass = local_batch_size * dp_size
    if global_batch_size % per_pass:
        raise RecipeError(
            "the global batch does not divide into equal micro-batches",
            where="step_scheduler.global_batch_size, step_scheduler.local_batch_size",
            value=f"global_batch_size {global_batch_size}, local_batch_size {local_batch_size}, {dp_size} "
            "data parallel ranks",
            hint=f"make global_batch_size a multiple of local_batch_size x ranks = {per_pass}",
        )
