"""A tokenizer of Hugging Face as GGUF's ``tokenizer.ggml.*`` keys: pure, no file is touched.

Source: the GGUF specification's section on tokenizers, and llama.cpp's ``src/llama-vocab.cpp``. Two kinds are
converted: byte-level BPE (``gpt2``), if its way of splitting text is built into llama.cpp (``pre_tokenizers.py``), and
BPE with byte fallback (``llama``), as SentencePiece makes it (``sentencepiece.py``). A tokenizer that splits text
in another way, or changes it first, would give other tokens there, so it is rejected.

The files are not trusted: whatever their structure makes the functions here raise is an error about the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.checkpoint.files.type_aliases import Counts, Strings, Values
from automodel_ckpt.convert.formats.gguf import sentencepiece
from automodel_ckpt.convert.formats.gguf.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from automodel_ckpt.convert.formats.gguf.values import KeyValue, NotConvertible, reported

# Token types of GGUF (source: gguf.md, tokenizer.ggml.token_type).
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPECIAL_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


@dataclass(frozen=True)
class GgufTokenizer:
    """The keys of a tokenizer, and in *warnings* where llama.cpp may split text in another way."""

    keys: list[KeyValue]
    warnings: Strings = ()


def convert_tokenizer(
    tokenizer: Values,
    settings: Values,
    vocab_size: int,
    where: str,
    template: str | None = None,
    ends: Iterable[Any] = (),
) -> GgufTokenizer:
    """Return the keys for *tokenizer* (the content of tokenizer.json, at *where*).

    *settings* is tokenizer_config.json's content. The list of tokens is filled up to *vocab_size*. *template* is the
    chat template, and *ends* are the end tokens in generation_config.json.

    Raises :class:`CheckpointUnusable` for a file that is no tokenizer's, and for a tokenizer that llama.cpp would not
    follow.
    """
    template = template or settings.get("chat_template")
    with reported(where):
        try:
            # Parsed JSON can have lone surrogates, which no file can hold.
            json.dumps([tokenizer, settings, template], ensure_ascii=False).encode()
            return _converted(tokenizer, settings, vocab_size, template, ends)
        except UnicodeEncodeError as error:
            text = ascii(error.object[error.start : error.end])
            raise NotConvertible(
                "a text in the tokenizer's files is not valid Unicode", text
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # of another structure
            raise NotConvertible(
                "this is not a tokenizer of Hugging Face's", repr(error)[:200]
            ) from error


def _converted(
    tokenizer: Values,
    settings: Values,
    vocab_size: int,
    template: Any,
    ends: Iterable[Any],
) -> GgufTokenizer:
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        raise NotConvertible("only BPE tokenizers are written as GGUF", repr(model.get("type")))
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise NotConvertible(
                "this tokenizer has what llama.cpp's lacks", f"model.{key}: {model[key]!r:.100}"
            )
    tokens, types = _tokens(tokenizer, model, vocab_size)
    ids = {token: index for index, token in enumerate(tokens)}
    special = _special_ids(settings, ids)
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    merges = _merges(model)
    if model.get("byte_fallback"):
        normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
        keys, warnings = sentencepiece.convert(model, normalizers, steps, merges, tokens, types)
    else:
        keys, warnings = _byte_level(tokenizer, model, steps, merges)
    if len(set(tokens)) != len(tokens):
        raise NotConvertible("two tokens have the same text", "model.vocab")
    begins, adds_end = _added(tokenizer.get("post_processor"), ids, special)
    keys += [
        ("tokenizer.ggml.tokens", "array", tokens),
        ("tokenizer.ggml.token_type", "array", types),
        *((f"tokenizer.ggml.{name}_token_id", "uint32", index) for name, index in special.items()),
        ("tokenizer.ggml.add_bos_token", "bool", begins),
        ("tokenizer.ggml.add_eos_token", "bool", adds_end),
    ]
    turn_end = _end_of_turn(ends, tokens, special, template)
    if turn_end is not None:
        keys.append(("tokenizer.ggml.eot_token_id", "uint32", turn_end))
    if isinstance(template, str):
        keys.append(("tokenizer.chat_template", "string", template))
    if "eos" not in special:
        no_end = "tokenizer_config.json names no end-of-sequence token: llama.cpp uses its default"
        warnings = (*warnings, no_end)
    return GgufTokenizer(keys, warnings)


def _end_of_turn(
    ends: Iterable[Any], tokens: list[str], special: Counts, template: Any
) -> int | None:
    """Return the token among *ends* that ends a turn: the one that the chat template has.

    Returns None when there is not exactly one. llama.cpp stops at one end of a text and one end of a turn, and at the
    ends that it knows by their text.
    """
    found = []
    for index in ends:
        if type(index) is not int or not 0 <= index < len(tokens) or index == special.get("eos"):
            continue
        if not isinstance(template, str) or tokens[index] in template:
            found.append(index)
    return found[0] if len(found) == 1 else None


def _byte_level(
    tokenizer: Values,
    model: Values,
    steps: list[Values],
    merges: list[str],
) -> tuple[list[KeyValue], Strings]:
    """Return the keys of a byte-level BPE in addition to its tokens, and warnings."""
    warnings: Strings = ()
    kinds = [step.get("type") for step in _steps(tokenizer.get("normalizer"), "normalizers")]
    if kinds == ["NFC"]:
        decomposed = (
            "the tokenizer normalizes text (NFC), and llama.cpp does not: text of decomposed characters gets other "
            "tokens there"
        )
        warnings = (decomposed,)
    elif tokenizer.get("normalizer") is not None:
        raise NotConvertible(
            "this tokenizer changes the text before splitting it",
            f"normalizer: {kinds!r:.100}",
        )
    ignore_merges = bool(model.get("ignore_merges"))
    pre = find_pre_tokenizer(steps, ignore_merges=ignore_merges)
    if pre is None:
        kinds = [step.get("type") for step in steps]
        known = ", ".join(known.name for known in PRE_TOKENIZERS)
        raise NotConvertible(
            "llama.cpp knows no pre-tokenizer like this one",
            f"pre_tokenizer: {kinds!r:.200}, ignore_merges: {ignore_merges} (known: {known})",
        )
    keys = [
        ("tokenizer.ggml.model", "string", "gpt2"),
        ("tokenizer.ggml.pre", "string", pre.name),
        ("tokenizer.ggml.merges", "array", merges),
    ]
    return keys, warnings


def _steps(value: Any, key: str) -> list[Values]:
    """Return the steps of a normalizer or pre_tokenizer: the steps of a Sequence under *key*, or the only one."""
    if value is None:
        return []
    steps = [value]
    if value.get("type") == "Sequence":
        steps = value.get(key) or []
    # A step of another kind raises TypeError here.
    return [{**step} for step in steps]


def _tokens(tokenizer: Values, model: Values, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return each token's text and type, in the order of ids. Ids of the model that have no token are unused."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    entries = []
    entries += [(text, index, _NORMAL) for text, index in model["vocab"].items()]
    # Added tokens come last: for an id that is in both lists, theirs is the type.
    for entry in tokenizer.get("added_tokens") or []:
        kind = _CONTROL if entry.get("special") else _USER_DEFINED
        entries.append((entry.get("content"), entry.get("id"), kind))
    for text, index, kind in entries:
        if not isinstance(text, str) or type(index) is not int or not 0 <= index < vocab_size:
            raise NotConvertible(
                "a token has no place in the model's vocabulary",
                f"{text!r:.80}: {index!r:.40}",
            )
        tokens[index], types[index] = text, kind
    return tokens, types


def _merges(model: Values) -> list[str]:
    """Return the merges as two tokens with a space between; tokenizers 0.20 and later write pairs."""
    found = []
    for merge in model.get("merges") or []:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(token, str) and " " not in token for token in pair):
            raise NotConvertible("this is not a merge of two tokens", f"{merge!r:.100}")
        found.append(" ".join(pair))
    return found


def _special_ids(settings: Values, ids: Counts) -> dict[str, int]:
    """Return the ids of the tokens that tokenizer_config.json names, by GGUF's word for them."""
    found = {}
    for key, name in _SPECIAL_KEYS.items():
        token = settings.get(key)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and text in ids:
            found[name] = ids[text]
    return found


def _added(post: Any, ids: Counts, special: Counts) -> tuple[bool, bool]:
    """Return whether encoding puts the token for the beginning before the text, and that for the end after it.

    *post* is the post_processor of tokenizer.json. Raises :class:`NotConvertible` if it adds any other token.
    """
    parts = []
    num_templates = 0
    has_others = False
    for step in _steps(post, "processors"):
        if step.get("type") == "TemplateProcessing":
            num_templates += 1
            for part in step.get("single") or []:
                # The id of a special token; None for the text itself.
                token = part["SpecialToken"].get("id") if "SpecialToken" in {**part} else None
                # -2 is neither an id nor the -1 of a beginning or end token that does not exist.
                parts.append(None if token is None else ids.get(str(token), -2))
        elif step and step.get("type") != "ByteLevel":
            has_others = True
    # None is the text itself. -1 is no token's id: without such a token, no template can add it.
    bos, eos = special.get("bos", -1), special.get("eos", -1)
    before = parts[:1] == [bos]
    after = parts[-1:] == [eos] and len(parts) > 1
    if parts and parts != [*[bos] * before, None, *[eos] * after]:
        has_others = True
    if has_others or num_templates > 1:
        raise NotConvertible(
            "this tokenizer adds other tokens than one for the beginning and the end",
            "post_processor",
        )
    return before, after
