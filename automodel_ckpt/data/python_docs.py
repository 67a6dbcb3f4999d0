"""Real text that is part of every Python installation, and a tokenizer trained on it: nothing is downloaded.

:func:`language_modeling` is the language reference as shown by ``help()``; :func:`docstring_pairs` asks for the
docstring of a function or class of the standard library, and :func:`description_pairs` for the function or class that a
docstring describes; :func:`preferences` prefers its first paragraph to the same words in another order;
:func:`documents` writes both kinds of text to files. All of them depend on the version of the interpreter. About a
tenth of the documents (topics of the reference, modules of the library), chosen by a hash of their names, is the
validation split. Prepared data is kept in ``$AUTOMODEL_CKPT_CACHE``, else ``~/.cache/automodel_ckpt``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import logging
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from automodel_ckpt.data.arguments import require_choice
from automodel_ckpt.data.cache import cached
from automodel_ckpt.data.encoder import Encoder, blocks
from automodel_ckpt.data.kto import SplitPairs
from automodel_ckpt.data.preference import PreferenceDataset
from automodel_ckpt.data.row_stream import DEFAULT_BLOCK, RowStream
from automodel_ckpt.data.samples import identity, prepared
from automodel_ckpt.data.text import text
from automodel_ckpt.data.text_pairs import EmbeddingEncoder, TextTruncation
from automodel_ckpt.data.token_arrays import TokenDocuments, TokenWindows
from automodel_ckpt.data.token_files import nanogpt
from automodel_ckpt.data.tokenized import TokenizedDataset
from automodel_ckpt.data.truncation import Truncation
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

# Part of the tokenizer's cache key: increase it when _train makes another tokenizer.
_FORMAT = 1
_PAD, _BOS, _EOS = "<pad>", "<s>", "</s>"
_FEWEST_WORDS = 6
"""Words of a text that read differently in another order."""
_SMALLEST_VOCABULARY = 256 + len((_PAD, _BOS, _EOS))
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
)


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
        log.info("training a tokenizer of %d entries from the Python documentation", vocab_size)
        _train(vocab_size).save_pretrained(directory)

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
    truncation = Truncation("right", seq_length)

    def build() -> TokenizedDataset:
        topics = _load_topics()
        names = _of_split(sorted(topics), split)
        documents = Encoder(tokenizer).documents([topics[name] for name in names])
        return TokenizedDataset.of(blocks(documents, seq_length))

    require_choice("split", split, ("train", "validation"))
    key = (_topics_digest(), truncation.seq_length, split)
    dataset = prepared("python_docs-language_modeling", key, tokenizer, build).first(max_samples)
    dataset.report_lengths(f"language_modeling ({split})")
    return dataset


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
    policy = Truncation(truncation, seq_length)

    def build() -> TokenizedDataset:
        pairs = list(_library_pairs(split))
        prompts = [pair.prompt for pair in pairs]
        docstrings = [pair.docstring for pair in pairs]
        samples = Encoder(tokenizer).pairs(prompts, docstrings)
        return policy.apply_to_all(samples, lambda number: pairs[number].where)

    require_choice("split", split, ("train", "validation"))
    key = (library_digest(), seq_length, split, truncation)
    dataset = prepared("python_docs-docstring_pairs", key, tokenizer, build)
    return dataset.reported(f"docstring_pairs ({split})", seq_length, max_samples)


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
    policy = Truncation(truncation, seq_length)

    def build() -> TokenizedDataset:
        pairs = [pair for pair in _library_pairs(split) if _has_words(pair)]
        prompts = [pair.prompt for pair in pairs]
        encoder = Encoder(tokenizer)
        chosen = encoder.pairs(prompts, [_paragraph(pair) for pair in pairs])
        shuffled = [_shuffled(_paragraph(pair), keep_ends=keep_ends) for pair in pairs]
        rejected = encoder.pairs(prompts, shuffled)
        samples = [sample for both in zip(chosen, rejected, strict=True) for sample in both]
        return policy.apply_to_all(samples, lambda number: pairs[number].where, PreferenceDataset)

    require_choice("split", split, ("train", "validation"))
    key = (library_digest(), seq_length, split, truncation, keep_ends)
    prepared_pairs = prepared(
        "python_docs-preferences", key, tokenizer, build, kind=PreferenceDataset
    )
    reported = prepared_pairs.reported(f"preferences ({split})", seq_length, max_samples)
    dataset = cast("PreferenceDataset", reported)
    dataset.identity = identity(("python_docs-preferences", *key), tokenizer)
    return dataset


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
    return SplitPairs(pairs, seq_length)


def _paragraph(pair: _Pair) -> str:
    """The first paragraph of a docstring, with single spaces between its words."""
    first, _, _ = pair.docstring.partition("\n\n")
    return " ".join(first.split())


def _has_words(pair: _Pair) -> bool:
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
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream | TokenDocuments | TokenWindows:
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
            return [f"{pair.prompt}{pair.docstring}" for pair in _library_pairs(split)]
        topics = _load_topics()
        return [topics[name] for name in _of_split(sorted(topics), split)]

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
    max_samples: int | None = None,
) -> TokenizedDataset:
    """Make a pair of texts of each docstring in the standard library, for the recipe ``embedding``.

    The query is the first paragraph of the docstring, and its document the signature of the function or class. A text
    of more than *seq_length* tokens is truncated. The recipe supplies the prompts from its section ``embedding``.
    """

    def build() -> TokenizedDataset:
        pairs = list(_library_pairs(split))
        texts = []
        for pair in pairs:
            description = pair.docstring.split("\n\n", 1)[0]
            texts.append([query_prompt + description, document_prompt + pair.prompt.rstrip()])
        encoder = EmbeddingEncoder(tokenizer, seq_length)
        samples = encoder.samples(texts, lambda number: pairs[number].where)
        policy = TextTruncation("right", seq_length)
        return policy.apply_to_all(samples, lambda number: pairs[number].where)

    require_choice("split", split, ("train", "validation"))
    key = (library_digest(), seq_length, split, query_prompt, document_prompt)
    dataset = prepared("python_docs-description_pairs", key, tokenizer, build)
    return dataset.reported(f"description_pairs ({split})", seq_length, max_samples)


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
    path = _library_directory() / "pydoc_data" / "topics.py"
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except FileNotFoundError as error:
        raise RecipeError(
            "this Python comes without its documentation",
            where=str(path),
            value="no such file",
            hint="install the whole standard library (Debian: libpython3-stdlib), or use another data set",
        ) from error


def _of_split(names: Iterable[str], split: str) -> list[str]:
    """Return a tenth of the names for validation, or the others for training."""
    chosen = []
    for name in names:
        is_validation = _bucket(name) == 0
        if is_validation == (split == "validation"):
            chosen.append(name)
    return chosen


def _bucket(name: str) -> int:
    # Not hash(), which differs between processes.
    return hashlib.blake2b(name.encode(), digest_size=1).digest()[0] % 10


class _Pair(NamedTuple):
    where: str
    prompt: str
    docstring: str


def _library_pairs(split: str) -> Iterator[_Pair]:
    root = _library_directory()
    modules = {}
    for path in _library_files(root):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        modules[name] = path
    seen: set[tuple[str, str]] = set()
    for module in _of_split(modules, split):
        for pair in _module_pairs(module, modules[module]):
            if (pair.prompt, pair.docstring) not in seen:
                seen.add((pair.prompt, pair.docstring))
                yield pair


def library_docstrings(modules: Sequence[str], split: str) -> list[tuple[str, str]]:
    """List (module, docstring) of the docstrings in *modules* of the standard library and in their submodules.

    A docstring that occurs several times is listed once. About a tenth, chosen by a hash of the text, is the split
    ``validation``, the others are ``train``. Raises :class:`RecipeError` for a module without docstrings.
    """
    root = _library_directory()
    found: dict[str, str] = {}
    for path in _library_files(root):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts)
        module = next((each for each in modules if f"{name}.".startswith(f"{each}.")), None)
        if module is None:
            continue
        for pair in _module_pairs(name, path):
            found.setdefault(pair.docstring, module)
    missing = [module for module in modules if module not in found.values()]
    if missing:
        raise RecipeError(
            "this Python has no docstrings in a module",
            where="classification.labels",
            value=", ".join(missing),
            hint="name modules or packages of the standard library, such as asyncio, email or logging",
        )
    chosen = _of_split(found, split)
    return [(found[docstring], docstring) for docstring in chosen]


def _module_pairs(module: str, path: Path) -> Iterator[_Pair]:
    """The signatures and docstrings of a module, found without importing it: some imports have side effects."""
    try:
        # From bytes, so that a module's own declaration of its encoding is followed.
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for name, node in _definitions(tree, module):
        docstring = ast.get_docstring(node)
        if docstring:
            yield _Pair(f"{path}:{node.lineno}", f"{_signature(name, node)}\n", docstring)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _Definition):
            name = f"{prefix}.{node.name}"
            yield name, node
            yield from _definitions(node, name)
        elif not isinstance(node, ast.expr):
            yield from _definitions(node, prefix)


def _signature(name: str, node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases}):" if bases else f"class {name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    arguments = ast.unparse(node.args)
    signature = f"{keyword} {name}({arguments})"
    if node.returns:
        signature += f" -> {ast.unparse(node.returns)}"
    return f"{signature}:"


def _library_directory() -> Path:
    return Path(os.__file__).parent


def _library_files(root: Path) -> list[Path]:
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if not parts & _NOT_LIBRARY:
            files.append(path)
    return files


def library_digest() -> str:
    """The version of the interpreter and the path of its library.

    A digest of the content would have to read twelve megabytes at each start.
    """
    return f"{sys.version} {_library_directory()}"
