"""Log-probabilities of pairs under a reference model: computed once, and kept in a file that is never trusted blindly.

The file contains a key (what the values depend on), the values, and a digest of both. A file that is torn, damaged, or
of another key is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.base.user_cache import cache_directory
from automodel_ckpt.data.pairs.preference_rows import CHOSEN, REJECTED
from automodel_ckpt.data.preference import REFERENCE_CHOSEN, REFERENCE_REJECTED
from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.errors import AutomodelError, RecipeError

log = logging.getLogger(__name__)

SCORES = (REFERENCE_CHOSEN, REFERENCE_REJECTED)
"""The names of both log-probabilities in samples and micro-batches."""
_FORMAT = 1
_DIGEST_SIZE = 32
Scores = npt.NDArray[np.float32]


class ScoredPairs:
    """The pairs of *dataset*, a map-style data set, with the log-probabilities of both answers under a reference.

    Assign :attr:`scores` [pairs, 2] before samples are read. Raises :class:`RecipeError` for a stream.
    """

    # A promise about this class; that of the data set is examined as well.
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise RecipeError(
                "the reference's log-probabilities of a stream cannot be computed before training",
                where="dpo.precompute",
                value=True,
                hint="set dpo.precompute false, or dataset.streaming false",
            )
        self.dataset = dataset
        self.scores: Scores | None = None

    @property
    def identity(self) -> str | None:
        """A digest that changes with the pairs; None if unknown."""
        return getattr(self.dataset, "identity", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = self.dataset[index]
        if self.scores is None:
            raise AutomodelError(
                "the reference's log-probabilities are not computed yet",
                where="ScoredPairs.scores",
                value=None,
                hint="assign them before samples are read",
            )
        chosen, rejected = self.scores[index].tolist()
        return {**pair, REFERENCE_CHOSEN: chosen, REFERENCE_REJECTED: rejected}

    def digest(self) -> str:
        """A digest of the tokens and labels of all pairs, in their order."""
        total = hashlib.blake2b(digest_size=_DIGEST_SIZE)
        if isinstance(self.dataset, TokenizedDataset):
            num_tokens = int(self.dataset.ends[-1]) if len(self.dataset.ends) else 0
            total.update(_bytes_of(self.dataset.ends))
            total.update(_bytes_of(self.dataset.tokens[:num_tokens]))
            total.update(_bytes_of(self.dataset.labelled[:num_tokens]))
            return total.hexdigest()
        for index in range(len(self.dataset)):
            pair = self.dataset[index]
            for name in (CHOSEN, REJECTED):
                for values in (pair[name]["input_ids"], pair[name]["labels"]):
                    total.update(_bytes_of(np.array([len(values), *values], dtype=np.int64)))
        return total.hexdigest()


def scores_file(key: Mapping[str, Any]) -> Path:
    """The file in the cache of the scores with this *key*, which contains only JSON values."""
    name = hashlib.blake2b(_header(key), digest_size=12).hexdigest()
    return cache_directory() / f"reference_scores-{name}.bin"


def read_scores(path: Path, key: Mapping[str, Any], num_pairs: int) -> Scores | None:
    """Read the scores [num_pairs, 2] of *key*; None if there are none, or if the file is damaged or of another key.

    A reason other than a missing file is logged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("the reference's log-probabilities in %s cannot be read: %s", path, error)
        return None
    header = _header(key)
    begins = len(header)
    ends = begins + 8 * num_pairs
    problem = ""
    if not content.startswith(header):
        problem = "the file is of other data, another reference or another version"
    elif len(content) != ends + _DIGEST_SIZE or _digest(content[:ends]) != content[ends:]:
        problem = "the file is damaged"
    if problem:
        log.warning("the reference's log-probabilities are computed again: %s (%s)", problem, path)
        return None
    values = np.frombuffer(content[begins:ends], dtype="<f4").astype(np.float32)
    return values.reshape(num_pairs, 2)


def write_scores(path: Path, key: Mapping[str, Any], scores: Scores) -> None:
    """Write *scores* [pairs, 2] durably; a file that exists is replaced. Raises OSError naming the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _header(key) + np.ascontiguousarray(scores, dtype="<f4").tobytes()
    replace_file(path, content + _digest(content))


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _header(key: Mapping[str, Any]) -> bytes:
    text = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    return text.encode() + b"\n"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_SIZE).digest()
