import multiprocessing
import os
import random
import signal
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.errors import AutomodelError, RecipeError
from tests.unit.data.toys import (
    Numbers,
    StatefulStream,
    Stream,
    StreamThatRemembersItsEnd,
    stack,
    train,
)

FURTHER = pytest.mark.further
SOURCES = {
    "map-style": Numbers,
    "stream": Stream,
    "stateful stream": StatefulStream,
    "stream that remembers its end": StreamThatRemembersItsEnd,
}


def make(dataset: Any, **options: Any) -> GlobalBatchLoader:
    sizes = {"global_batch_size": 4, "local_batch_size": 2, "seed": 7}
    return GlobalBatchLoader(dataset, **{"collate_fn": stack, **sizes, **options})


def contents(batches: list[GlobalBatch]) -> list[Any]:
    """Everything a rank sees of some global batches, comparable with ==."""
    tensors = [
        [{k: v.tolist() for k, v in micro.items()} for micro in b.micro_batches] for b in batches
    ]
    return [
        (b.epoch, b.index, b.start, b.sample_ids, b.last_of_epoch, t)
        for b, t in zip(batches, tensors, strict=True)
    ]


def trained_on(batches: list[GlobalBatch]) -> list[int]:
    """The numbers of the samples that carried labels."""
    micros = [micro for batch in batches for micro in batch.micro_batches]
    return [
        number
        for micro in micros
        for number in micro["labels"].flatten().tolist()
        if number != -100
    ]


SHAPES = st.fixed_dictionaries(
    {
        "length": st.integers(1, 40),
        "dp_size": st.integers(1, 4),
        "local": st.integers(1, 3),
        "accumulation": st.integers(1, 3),
        "stop": st.integers(0, 25),
        "source": st.sampled_from(sorted(SOURCES)),
    }
)


@settings(deadline=None, max_examples=20)
@given(SHAPES, st.booleans())
def test_resumed_at_any_step_it_gives_what_an_uninterrupted_run_gives(
    shape: dict[str, Any], drop_last: bool
) -> None:
    size = shape["local"] * shape["accumulation"] * shape["dp_size"]
    assume(not drop_last or size <= shape["length"])

    def fresh(rank: int) -> GlobalBatchLoader:
        return make(
            SOURCES[shape["source"]](shape["length"]),
            global_batch_size=size,
            local_batch_size=shape["local"],
            dp_size=shape["dp_size"],
            dp_rank=rank,
            drop_last=drop_last,
        )

    for rank in range(shape["dp_size"]):
        whole = train(fresh(rank), shape["stop"] + 5)
        first, second = fresh(rank), fresh(rank)
        before = train(first, shape["stop"])
        second.load_state_dict(first.state_dict())
        assert contents(before + train(second, 5)) == contents(whole)


@settings(deadline=None, max_examples=20)
@given(SHAPES, st.integers(1, 4))
def test_another_number_of_ranks_in_mid_epoch_repeats_and_loses_nothing(
    shape: dict[str, Any], other: int
) -> None:
    size = 12 * shape["accumulation"]
    dataset = SOURCES[shape["source"]]

    def loaders(dp_size: int) -> list[GlobalBatchLoader]:
        options = {"global_batch_size": size, "local_batch_size": 1, "dp_size": dp_size}
        return [make(dataset(shape["length"]), dp_rank=rank, **options) for rank in range(dp_size)]

    reference = train(
        make(dataset(shape["length"]), global_batch_size=size, local_batch_size=1),
        shape["stop"] + 5,
    )
    first, second = loaders(shape["dp_size"]), loaders(other)
    seen = [train(loader, shape["stop"]) for loader in first]
    assert all(loader.state_dict() == first[0].state_dict() for loader in first)
    for loader in second:
        loader.load_state_dict(first[-1].state_dict())
    rest = [train(loader, 5) for loader in second]

    assert [b.sample_ids for b in seen[0] + rest[0]] == [b.sample_ids for b in reference]
    for part, ranks in ((reference[: shape["stop"]], seen), (reference[shape["stop"] :], rest)):
        for step, batch in enumerate(part):
            step_of_all = [number for rank in ranks for number in trained_on([rank[step]])]
            assert sorted(step_of_all) == sorted(trained_on([batch]))
            assert len({len(rank[step].micro_batches) for rank in ranks}) == 1


@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize("stop", [3, *(pytest.param(stop, marks=FURTHER) for stop in (1, 4, 6))])
def test_worker_processes_change_nothing_and_resume_exactly(source: str, stop: int) -> None:
    whole = contents(train(make(SOURCES[source](13)), 7))
    first, second = (
        make(SOURCES[source](13), num_workers=2),
        make(SOURCES[source](13), num_workers=2),
    )
    before = train(first, stop)
    second.load_state_dict(first.state_dict())
    assert contents(before + train(second, 7 - stop)) == whole


@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=FURTHER)])
def test_the_global_generators_are_left_alone(source: str, num_workers: int) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = (
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state(),
    )
    loader = make(SOURCES[source](13), num_workers=num_workers)
    for batch in loader:
        loader.mark_consumed(batch)
        assert random.getstate() == before[0]
        assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize(
    ("length", "drop_last", "sizes"),
    [(10, False, [4, 4, 2]), (10, True, [4, 4]), (8, True, [4, 4]), (4, True, [4])],
)
def test_the_last_batch_of_an_epoch_says_so_and_drop_last_keeps_every_full_batch(
    source: str, length: int, drop_last: bool, sizes: list[int]
) -> None:
    batches = list(make(SOURCES[source](length), drop_last=drop_last))
    assert [len(batch.sample_ids) for batch in batches] == sizes
    assert [batch.last_of_epoch for batch in batches] == [False] * (len(sizes) - 1) + [True]


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_a_rank_without_a_part_of_the_ragged_end_runs_a_batch_without_weight(source: str) -> None:
    ranks = [
        list(make(SOURCES[source](9), local_batch_size=1, seed=8, dp_size=4, dp_rank=rank))
        for rank in range(4)
    ]
    last = [batches[-1].micro_batches for batches in ranks]
    assert [len(micro_batches) for micro_batches in last] == [1, 1, 1, 1]
    assert [len(trained_on([batches[-1]])) for batches in ranks] == [1, 0, 0, 0]
    assert all((rank[0]["labels"] == -100).all() for rank in last[1:])
    assert ranks[0][-1].sample_ids != [0]
    assert last[3][0]["numbers"].tolist() == last[0][0]["numbers"].tolist()


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(RecipeError, match="the data set is empty"):
        make(Numbers(0))
    with pytest.raises(RecipeError, match="epoch 0 of the iterable data set yields no sample"):
        next(iter(make(Stream(0))))
    with pytest.raises(RecipeError, match="drop_last drops them all"):
        make(Numbers(3), drop_last=True)
    for only in ("__len__", "__getitem__"):
        with pytest.raises(RecipeError, match="neither map-style nor iterable"):
            make(type("Half", (), {only: lambda *_: 3})())


@pytest.mark.parametrize("num_workers", [2, pytest.param(0, marks=FURTHER)])
@pytest.mark.parametrize("source", [Numbers, Stream])
def test_a_sample_that_cannot_be_read_is_named(source: Any, num_workers: int) -> None:
    with pytest.raises(AutomodelError) as caught:
        list(make(source(20, broken=13), num_workers=num_workers))
    problem = caught.value.problems[0]
    assert "13" in problem.what
    assert "toys.py:" in problem.where
    assert str(problem.value) in ("KeyError: 'no such field'", "OSError: connection lost")


def test_a_collator_that_fails_names_the_samples() -> None:
    collators: list[tuple[Any, str]] = [
        (lambda samples: samples[9], r"samples \[0, 1\] of the data set could not be collated"),
        (lambda samples: {}, "with a key 'labels'"),
    ]
    for collate, what in collators:
        with pytest.raises(AutomodelError, match=what):
            list(make(Numbers(4), collate_fn=collate, shuffle=False))


def look_for_the_dead_every(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (seconds,))


def test_a_worker_that_is_killed_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deadly(Numbers):
        def __getitem__(self, index: int) -> Any:
            os.kill(os.getpid(), 9)

    look_for_the_dead_every(monkeypatch, 0.1)
    with pytest.raises(
        AutomodelError,
        match=r"a data loading worker died(.|\n)*1; process \d+ ended with exit code -9",
    ):
        list(make(Deadly(4), num_workers=1))


def test_workers_outlive_a_signal_to_the_whole_job_so_that_the_rank_can_stop_in_order() -> None:
    loader = make(Numbers(200), num_workers=2)
    batches = iter(loader)
    seen = [next(batches)]
    for worker in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    seen += list(batches)
    assert [b.sample_ids for b in seen] == [b.sample_ids for b in make(Numbers(200))]


def test_a_changed_data_set_is_refused_with_both_lengths() -> None:
    state = make(Numbers(20)).state_dict()
    with pytest.raises(
        RecipeError,
        match=r"saved with a data set of 20 samples, the recipe has a data set of 21 samples",
    ):
        make(Numbers(21)).load_state_dict(state)
    with pytest.raises(RecipeError, match="the recipe has an iterable data set"):
        make(Stream(20)).load_state_dict(state)


def test_a_changed_seed_does_not_change_the_saved_order_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = make(Numbers(20), seed=1)
    whole = train(make(Numbers(20), seed=1), 7)
    before = train(first, 2)
    seconds = [make(Numbers(20), seed=2, dp_size=2, dp_rank=rank) for rank in (0, 1)]
    for second in seconds:
        second.load_state_dict(first.state_dict())
    assert [b.sample_ids for b in before + train(seconds[0], 5)] == [b.sample_ids for b in whole]
    assert caplog.text.count("keeping the saved data order (seed 1)") == 1


def test_a_changed_global_batch_size_goes_on_after_the_same_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = make(Numbers(20)), make(Numbers(20), global_batch_size=6)
    before = train(first, 2)
    second.load_state_dict(first.state_dict())
    after = train(second, 2)
    assert sorted(trained_on(before + after)) == list(range(20))
    assert "changed from 4 to 6: training continues after sample 8 of epoch 0" in caplog.text


def test_a_stream_without_state_reads_and_drops_what_was_consumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, source = make(Stream(100)), Stream(100)
    train(first, 10)
    second = make(source)
    second.load_state_dict(first.state_dict())
    assert next(iter(second)).sample_ids == [40, 41, 42, 43]
    assert source.read == 48
    assert "reading and discarding 40 samples" in caplog.text


@pytest.mark.parametrize(
    ("shuffled", "num_workers"),
    [
        (True, 2),
        (False, 0),
        pytest.param(True, 0, marks=FURTHER),
        pytest.param(False, 2, marks=FURTHER),
    ],
)
def test_a_stream_of_the_datasets_library_resumes_exactly(shuffled: bool, num_workers: int) -> None:
    datasets = pytest.importorskip("datasets")

    def fresh() -> GlobalBatchLoader:
        rows = datasets.Dataset.from_dict({"number": list(range(30)), "draws": [[0.0]] * 30})
        stream = rows.to_iterable_dataset(num_shards=3)
        return make(
            stream.shuffle(seed=3, buffer_size=7) if shuffled else stream, num_workers=num_workers
        )

    whole = train(fresh(), 12)
    for stop in (3, 8) if num_workers else (3, 7, 8, 9):
        first, second = fresh(), fresh()
        before = train(first, stop)
        second.load_state_dict(first.state_dict())
        assert contents(before + train(second, 12 - stop)) == contents(whole)


def stack_with_noise(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {**stack(samples), "noise": torch.rand(len(samples))}


@pytest.mark.parametrize("source", [Numbers, Stream])
def test_a_collator_that_draws_numbers_gets_the_same_ones_after_a_resume(source: Any) -> None:
    def fresh() -> GlobalBatchLoader:
        sizes = {"global_batch_size": 4, "local_batch_size": 2, "seed": 7}
        return GlobalBatchLoader(source(20), collate_fn=stack_with_noise, **sizes)

    whole = train(fresh(), 5)
    first, second = fresh(), fresh()
    before = train(first, 2)
    second.load_state_dict(first.state_dict())
    torch.rand(3)
    assert contents(before + train(second, 3)) == contents(whole)


class StreamOfEpochs(Stream):
    """A stream that gets the number of the epoch."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def prepare(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["number"] == 7:
            raise ValueError("no such row")
        return row


def test_a_sample_of_a_stream_that_cannot_be_prepared_is_named() -> None:
    with pytest.raises(AutomodelError, match="sample 7 of the stream could not be prepared"):
        train(make(StreamOfEpochs(20), dp_size=2, dp_rank=1, local_batch_size=1), 3)


@pytest.mark.parametrize("source", ["map-style", "stream"])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_a_collator_gets_the_sample_before_each_micro_batch_whatever_the_ranks(
    source: str, dp_size: int
) -> None:
    follows: dict[int, list[tuple[int, int]]] = {}
    for rank in range(dp_size):
        options = {"global_batch_size": 8, "dp_rank": rank, "dp_size": dp_size}
        # 19 samples: the last global batch has three, and ranks without one of them read a filler.
        loader = make(SOURCES[source](19), collate_fn=chain_of, with_preceding=True, **options)
        for batch in loader:
            for micro_batch in batch.micro_batches:
                links = micro_batch["links"].tolist() if has_label(micro_batch) else []
                follows.setdefault(batch.index, []).extend(map(tuple, links))
            ids = batch.sample_ids
            # The first sample of a global batch follows its last.
            expected = list(zip([ids[-1], *ids], ids, strict=False))
            if rank == dp_size - 1:
                assert sorted(follows[batch.index]) == sorted(expected)
    assert list(follows) == [0, 1, 2]


def chain_of(samples: list[Any]) -> dict[str, torch.Tensor]:
    """The number of each sample but the first, as a label, with the number of the sample before it."""
    numbers = stack(samples)["labels"].flatten().tolist()
    links = list(pairwise(numbers))
    return {"links": torch.tensor(links), "labels": torch.tensor(numbers[1:])[:, None]}


def has_label(micro_batch: dict[str, torch.Tensor]) -> bool:
    return bool((micro_batch["labels"] != -100).any())
