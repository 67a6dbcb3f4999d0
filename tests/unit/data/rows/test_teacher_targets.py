"""The cache of a teacher's logits: what is written is read, and nothing else is taken for it."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.samples.teacher_targets import (
    LOG_PROBS,
    MANIFEST,
    REST,
    TOKENS,
    PartWriter,
    Publication,
    SampleTargets,
    TargetCache,
    TargetCollator,
    TargetedDataset,
    checksum,
    num_labels,
)
from automodel_ckpt.errors import RecipeError

SAMPLES = [
    {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
    {"input_ids": [8, 9], "labels": [-100, -100]},
    {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
]


def targets_of(index: int, k: int = 3) -> SampleTargets:
    count = num_labels(SAMPLES[index])
    tokens = np.arange(count * k, dtype=np.int32).reshape(count, k) + 100 * index
    log_probs = -np.ones((count, k), dtype=np.float32) * index
    return SampleTargets(
        tokens, log_probs, np.full(count, -9.0, np.float32), checksum(SAMPLES[index])
    )


def write(final: Path, key: str = "key") -> None:
    publication = Publication(final)
    parts = []
    for number, indices in enumerate((range(2), range(2, 3))):
        writer = PartWriter(publication.directory, number)
        for index in indices:
            writer.add(targets_of(index))
        parts.append(writer.close())
    publication.publish(key, parts)


def test_a_torn_or_foreign_cache_is_found(tmp_path: Path) -> None:
    final = tmp_path / "cache"
    assert TargetCache.open(final, "key") is None
    write(final)
    assert TargetCache.open(final, "of another teacher") is None
    (final / "00000/tokens").write_bytes(b"123")
    damaged = TargetCache.open(final, "key")
    assert damaged is not None and damaged.damaged_file() == "00000/tokens"
    write(final)  # it replaces the damaged one
    content = bytearray((final / "00001/log_probs").read_bytes())
    content[-3] ^= 1
    (final / "00001/log_probs").write_bytes(content)
    cache = TargetCache.open(final, "key")
    assert cache is not None
    assert cache.damaged_file() == "00001/log_probs"
    # Of two ranks, each reads one part.
    assert (cache.damaged_file(0, 2), cache.damaged_file(1, 2)) == (None, "00001/log_probs")
    for text in ("{", "[]", '{"format": 1}', json.dumps({"format": 9, "key": "key", "parts": []})):
        (final / MANIFEST).write_text(text)
        assert TargetCache.open(final, "key") is None


class Listed(list[Any]):
    """A list with the attributes of a data set."""

    identity: str | None = None


def test_samples_have_their_targets_and_a_changed_sample_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "cache")
    dataset = TargetedDataset(Listed(SAMPLES))
    collate = TargetCollator(PadCollator(0))
    assert dataset[0] == SAMPLES[0]
    assert TOKENS not in collate([dataset[0]])
    dataset.cache = TargetCache.open(tmp_path / "cache", "key")
    assert (len(dataset), dataset.identity) == (3, None)
    batch = collate([pickle.loads(pickle.dumps(dataset))[index] for index in (2, 1, 0)])
    assert batch["labels"].shape == (3, 4)
    assert batch[TOKENS].tolist() == [
        *targets_of(2).tokens.tolist(),
        *targets_of(0).tokens.tolist(),
    ]
    assert batch[LOG_PROBS].tolist() == [[-2.0] * 3] * 2 + [[0.0] * 3] * 2
    assert batch[REST].tolist() == [-9.0] * 4
    dataset.dataset[2] = SAMPLES[0]
    with pytest.raises(RecipeError, match="not the one whose logits"):
        dataset[2]
