"""Real text that is part of every Python installation, and a tokenizer trained on it: nothing is downloaded.

:func:`language_modeling` is the language reference as shown by ``help()``; :func:`docstring_pairs` asks for the
docstring of a function or class of the standard library, and :func:`description_pairs` for the function or class that a
docstring describes; :func:`summaries` writes the first paragraph of a docstring for a signature; :func:`preferences`
prefers its first paragraph to the same words in another order;
:func:`documents` writes both kinds of text to files. All of them depend on the version of the interpreter. About a
tenth of the documents (topics of the reference, modules of the library), chosen by a hash of their names, is the
validation split. Prepared data is kept in ``$AUTOMODEL_CKPT_CACHE``, else ``~/.cache/automodel_ckpt``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from automodel_ckpt.checkpoint.sources.model_files import save_preprocessor
from automodel_ckpt.data.collate import require_choice
from automodel_ckpt.data.rows.preparation import Encode
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.encoder import Encoder
from automodel_ckpt.data.samples.samples import RowStream, cached, identity, samples_of_rows
from automodel_ckpt.data.samples.token_arrays import TokenSpans
from automodel_ckpt.data.samples.tokenized import (
    EarlierTruncation,
    TokenizedDataset,
    TokenizedSample,
    Truncation,
)
from automodel_ckpt.data.text import text
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_library import (
    DocstringPair,
    library_digest,
    library_directory,
    library_pairs,
    of_split,
)

if TYPE_CHECKING:
    from automodel_ckpt.data.kto import SplitPairs
    from automodel_ckpt.data.preference import PreferenceDataset


log = logging.getLogger(__name__)

# Part of the tokenizer's cache key: increase it when _train makes another tokenizer.
_FORMAT = 1
_PAD, _BOS, _EOS = "<pad>", "<s>", "</s>"
_FEWEST_WORDS = 6
"""Words of a text that read differently in another order."""
_SMALLEST_VOCABULARY = 256 + len((_PAD, _BOS, _EOS))


def train_tokenizer(vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the text of :func:`language_modeling`, with bos, eos and pad tokens.

    It is cached for each version of the interpreter and of the library. Raises :class:`RecipeError` if *vocab_size* is
    below 259 (256 bytes and three special tokens).
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise RecipeError(
            "the vocabulary is too small for a byte-level tokenizer",
            where="tokenizer.vocab_size",
            value=vocab_size,
            hint=f"give at least {_SMALLEST_VOCABULARY}: 256 bytes and 3 special tokens",
        )

    def build(directory: Path) -> None:
        log.debug("training a tokenizer of %d entries from the Python documentation", vocab_size)
        save_preprocessor(_train(vocab_size), directory)

    key = (_FORMAT, _topics_digest(), vocab_size, tokenizers.__version__)
    directory = cached("python_docs-tokenizer", key, build)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory)
    return tokenizer


def language_modeling(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int = 128,
    split: str = "train",
    max_samples: int | None = None,
) -> TokenizedDataset:
    """Divide the Python language reference (``pydoc_data.topics``) into blocks of *seq_length* tokens, all with labels.

    The documents are concatenated, each followed by the end-of-sequence token. The last block may be shorter. Some
    paragraphs occur in several topics, so the validation split contains some text of the training split.
    """
    require_choice("split", split, ("train", "validation"))
    encoder = Encoder(tokenizer)

    def blocks() -> list[_Item]:
        topics = _load_topics()
        stream: list[int] = []
        for document in encoder.documents(
            [topics[name] for name in of_split(sorted(topics), split)]
        ):
            stream += document.tokens
        # A single token at the end has nothing to predict.
        starts = range(0, len(stream) - 1, seq_length)
        return [(stream[start : start + seq_length], f"token {start}") for start in starts]

    def encode(rows: Rows) -> list[TokenizedSample]:
        return [TokenizedSample(ids, [True] * len(ids)) for ids in rows.values(_ITEM)]

    return samples_of_rows(
        _MadeRows(f"language_modeling ({split})", blocks),
        _topics_digest(),
        tokenizer,
        encode,
        Truncation("right", seq_length),
        key=("python_docs-language_modeling", split),
        max_samples=max_samples,
    )


_Item = tuple[Any, str]
_ITEM = "item"


class _MadeRows(Rows):
    """A table of one field whose values, with their locations, *make* returns when a row is needed."""

    def __init__(self, path: str, make: Callable[[], list[_Item]]) -> None:
        self.path = path
        self._make = make

    @cached_property
    def _items(self) -> list[_Item]:
        return self._make()

    @property
    def num_rows(self) -> int:
        return len(self._items)

    @property
    def fields(self) -> Sequence[str]:
        return [_ITEM]

    def read_range(self, fields: Sequence[str], start: int, stop: int) -> list[list[Any]]:
        return [[value for value, _ in self._items[start:stop]]]

    def place(self, row: int) -> str:
        return self._items[row][1]


def docstring_pairs(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int = 256,
    split: str = "train",
    truncation: Literal["error", "right"] = "right",
    max_samples: int | None = None,
) -> TokenizedDataset:
    """Make a sample of each docstring in the standard library: the signature without labels, the docstring with labels.

    *truncation* ``right`` truncates samples of more than *seq_length* tokens, and skips those whose prompt alone has
    that many; the numbers are logged. ``error`` raises :class:`RecipeError` for such samples.
    """
    require_choice("split", split, ("train", "validation"))

    def pairs() -> list[_Item]:
        return [((pair.prompt, pair.docstring), pair.where) for pair in library_pairs(split)]

    return samples_of_rows(
        _MadeRows(f"docstring_pairs ({split})", pairs),
        library_digest(),
        tokenizer,
        _pair_encoder(tokenizer),
        Truncation(truncation, seq_length),
        key=("python_docs-docstring_pairs", split),
        max_samples=max_samples,
    )


def _pair_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    encoder = Encoder(tokenizer)

    def encode(rows: Rows) -> list[TokenizedSample]:
        prompts, completions = zip(*rows.values(_ITEM), strict=True)
        return encoder.pairs(prompts, completions)

    return encode


def preferences(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int = 96,
    split: str = "train",
    truncation: Literal["error", "right", "skip"] = "skip",
    max_samples: int | None = None,
    keep_ends: bool = False,
) -> PreferenceDataset:
    """Make a pair of each function or class with a docstring: its first paragraph is preferred to the shuffled words.

    The prompt is the signature. The rejected answer has the words of the preferred one in another order, which depends
    on the text alone; with *keep_ends*, its first and its last word keep their places, so that the pairs are harder to
    distinguish. Paragraphs of fewer than 6 different words are not used.
    """
    require_choice("split", split, ("train", "validation"))
    from automodel_ckpt.data.preference import PreferenceDataset

    encoder = Encoder(tokenizer)

    def pairs() -> list[_Item]:
        items = []
        for pair in library_pairs(split):
            if _has_words(pair):
                paragraph = _paragraph(pair)
                shuffled = _shuffled(paragraph, keep_ends=keep_ends)
                items.append(((pair.prompt, paragraph, shuffled), pair.where))
        return items

    def encode(rows: Rows) -> list[TokenizedSample]:
        prompts, paragraphs, shuffled = zip(*rows.values(_ITEM), strict=True)
        chosen, rejected = encoder.pairs(prompts, paragraphs), encoder.pairs(prompts, shuffled)
        # A pair is two consecutive samples.
        return list(chain.from_iterable(zip(chosen, rejected, strict=True)))

    found = samples_of_rows(
        _MadeRows(f"preferences ({split})", pairs),
        library_digest(),
        tokenizer,
        encode,
        Truncation(truncation, seq_length),
        key=("python_docs-preferences", split, keep_ends),
        max_samples=max_samples,
        kind=PreferenceDataset,
    )
    return cast("PreferenceDataset", found)


def judged_docstrings(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int = 96,
    split: str = "train",
    truncation: Literal["error", "right", "skip"] = "skip",
    max_samples: int | None = None,
) -> SplitPairs:
    """Make two samples of each pair of :func:`preferences`: the paragraph is desirable, the shuffled words are not.

    *max_samples* counts pairs. The arguments are those of :func:`preferences`.
    """
    pairs = preferences(tokenizer, seq_length, split, truncation, max_samples)
    from automodel_ckpt.data.kto import SplitPairs

    return SplitPairs(pairs, seq_length)


def _paragraph(pair: DocstringPair) -> str:
    """The first paragraph of a docstring, with single spaces between its words."""
    first, _, _ = pair.docstring.partition("\n\n")
    return " ".join(first.split())


def _has_words(pair: DocstringPair) -> bool:
    return len(set(_paragraph(pair).split())) >= _FEWEST_WORDS


def _shuffled(text: str, *, keep_ends: bool) -> str:
    """The words of a text in another order; with *keep_ends*, its first and its last word keep their places."""
    words = text.split()
    first, last = (1, -1) if keep_ends else (0, len(words))
    # Seeded by the text, so that a pair is the same in every process and for every selection of pairs.
    generator = random.Random(text)
    moved = words[first:last]
    while moved == words[first:last]:
        generator.shuffle(moved)
    return " ".join([*words[:first], *moved, *words[last:]])


def documents(
    tokenizer: PreTrainedTokenizerBase,
    collection: Literal["reference", "docstrings"] = "reference",
    form: Literal["samples", "stream", "token_file"] = "samples",
    seq_length: int | None = None,
    split: str = "train",
    truncation: Literal["error", "right"] = "error",
    shuffle_block: int = 1000,
) -> TokenizedDataset | RowStream | TokenSpans:
    """Write documents to a file in the cache, once, and read it as your own data are read: an example of pretraining.

    *collection* is the language reference, or the docstrings of the standard library. With the *form* ``samples`` or
    ``stream``, the file has JSON lines, which :func:`~automodel_ckpt.data.text.text` reads, for ``stream`` during
    training. With ``token_file``, it has tokens as nanoGPT writes them, each document followed by the end-of-sequence
    token, which :func:`~automodel_ckpt.data.token_files.nanogpt` reads as documents.
    """
    require_choice("collection", collection, ("reference", "docstrings"))
    require_choice("split", split, ("train", "validation"))
    digest = _topics_digest() if collection == "reference" else library_digest()

    def texts() -> list[str]:
        if collection == "docstrings":
            return [f"{pair.prompt}{pair.docstring}" for pair in library_pairs(split)]
        topics = _load_topics()
        return [topics[name] for name in of_split(sorted(topics), split)]

    def write_lines(directory: Path) -> None:
        lines = [json.dumps({"text": text}) + "\n" for text in texts()]
        (directory / "documents.jsonl").write_text("".join(lines))

    def write_tokens(directory: Path) -> None:
        tokens: list[int] = []
        for sample in Encoder(tokenizer).documents(texts()):
            tokens += sample.tokens
        np.array(tokens, np.uint32).tofile(directory / "documents.bin")

    if form == "token_file":
        key = (digest, split, identity(("token_file",), tokenizer))
        directory = cached("python_docs-tokens", key, write_tokens)
        from automodel_ckpt.data.token_files import nanogpt

        return nanogpt(
            str(directory / "documents.bin"),
            seq_length,
            header=False,
            dtype="uint32",
            documents=True,
            eos_token=tokenizer.eos_token_id,
            truncation=truncation,
            tokenizer=tokenizer,
        )
    require_choice("form", form, ("samples", "stream", "token_file"))
    directory = cached("python_docs-lines", (digest, split), write_lines)
    return text(
        tokenizer,
        str(directory / "documents.jsonl"),
        seq_length,
        truncation=truncation,
        streaming=form == "stream",
        shuffle_block=shuffle_block,
    )


def description_pairs(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int = 64,
    split: str = "train",
    query_prompt: str = "",
    document_prompt: str = "",
    pair_template: str | None = None,
    max_samples: int | None = None,
    num_negatives: int = 0,
) -> TokenizedDataset:
    """Make a pair of texts of each docstring in the standard library, for the recipes ``embedding`` and ``reranker``.

    The query is the first paragraph of the docstring, and its document the signature of the function or class. The
    signatures of the *num_negatives* functions and classes that follow it in the library are its negative documents. A
    text of more than *seq_length* tokens is truncated. The recipe ``embedding`` supplies the prompts, and ``reranker``
    the template, from the sections of these names.
    """

    from automodel_ckpt.data.text_pairs import TextsEncoder

    require_choice("split", split, ("train", "validation"))
    if num_negatives < 0:
        raise RecipeError(
            "num_negatives must be at least 0",
            where="dataset.num_negatives",
            value=num_negatives,
            hint="0 makes pairs without negative documents",
        )
    encoder = TextsEncoder(tokenizer, seq_length, "right", pair_template)

    def texts() -> list[_Item]:
        pairs = library_pairs(split)
        signatures = [pair.prompt.rstrip() for pair in pairs]
        items = []
        for number, pair in enumerate(pairs):
            description = pair.docstring.split("\n\n", 1)[0]
            found = _with_following(signatures, number, num_negatives)
            documents = [document_prompt + signature for signature in found]
            items.append(([query_prompt + description, *documents], pair.where))
        return items

    return samples_of_rows(
        _MadeRows(f"description_pairs ({split})", texts),
        library_digest(),
        tokenizer,
        lambda rows: encoder.samples(rows.values(_ITEM), rows),
        EarlierTruncation("right", seq_length),
        key=(
            "python_docs-description_pairs",
            *(split, query_prompt, document_prompt, pair_template, num_negatives),
        ),
        max_samples=max_samples,
    )


def _with_following(signatures: Sequence[str], number: int, num_others: int) -> list[str]:
    """The signature of this *number*, and up to *num_others* that differ, which follow it; after the last, the first.

    Functions of a module follow each other, so that they are similar.
    """
    found = [signatures[number]]
    for offset in range(1, len(signatures)):
        if len(found) > num_others:
            break
        other = signatures[(number + offset) % len(signatures)]
        if other not in found:
            found.append(other)
    return found


def summaries(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int = 64,
    target_length: int = 32,
    split: str = "train",
    source_prompt: str = "",
    start_token_id: int | None = None,
    max_samples: int | None = None,
) -> TokenizedDataset | RowStream:
    """Write sources and targets to a file in the cache, once, and read it as your own data are read.

    The source is the signature of a function or class of the standard library, and the target the first paragraph of
    its docstring. Sources of more than *seq_length* and targets of more than *target_length* tokens are truncated.
    *source_prompt* is written before each source. The recipe supplies *start_token_id*.
    """
    require_choice("split", split, ("train", "validation"))

    def write_lines(directory: Path) -> None:
        lines = []
        for pair in library_pairs(split):
            texts = {"source": pair.prompt.rstrip(), "target": _paragraph(pair)}
            lines.append(json.dumps(texts) + "\n")
        (directory / "summaries.jsonl").write_text("".join(lines))

    directory = cached("python_docs-summaries", (library_digest(), split), write_lines)
    from automodel_ckpt.data.seq2seq import source_target

    return source_target(
        tokenizer,
        str(directory / "summaries.jsonl"),
        seq_length,
        target_length,
        source_prompt=source_prompt,
        truncation="right",
        start_token_id=start_token_id,
        max_samples=max_samples,
    )


def _train(vocab_size: int) -> PreTrainedTokenizerFast:
    topics = _load_topics()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _BOS, _EOS],
        # Sorted, because tokenizers returns the alphabet in another order in each process.
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    special = {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def _load_topics() -> dict[str, str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return topics


def _topics_digest() -> str:
    """The digest of the file with the topics, computed without importing half a megabyte of text."""
    path = library_directory() / "pydoc_data" / "topics.py"
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except FileNotFoundError as error:
        raise RecipeError(
            "this Python comes without its documentation",
            where=str(path),
            value="no such file",
            hint="install the whole standard library (Debian: libpython3-stdlib), or use another data set",
        ) from error
