"""Arguments of NeMo AutoModel's data sets that depend on each other: columns, labels, lengths and limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from automodel_ckpt.config.automodel.batches import name_of_model
from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Section,
    is_true,
    value_of,
)
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.convert import FALSE_WORDS
from automodel_ckpt.config.tree.yaml_tree import Node

_DATA_FILE = re.compile(
    r"\.(jsonl?|ndjson|parquet|arrow|csv|tsv|txt)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE
)
_TRUNCATIONS = ("error", "right", "skip", "history")
"""Our values of the key truncation, which is also AutoModel's: an override may have them."""
_UNTRUNCATED = (*FALSE_WORDS, "do_not_truncate")
"""Values of AutoModel's key truncation, in lower case, with which it ignores seq_length."""
_SOURCE = "question: {{ question }}  context: {{ context }}"
"""AutoModel's default source of encoder-decoder models, for SQuAD."""


def _columns(section: Section) -> None:
    """Translate the columns of a prompt and its completion. AutoModel writes a space after each part of the prompt."""
    mapping = section.inner("column_mapping", to=section.to)
    columns = [mapping.take(name) for name in ("context", "question")]
    given = [column for column in columns if column is not None]
    if given:
        template = "".join(f"{{{{ {column.value} }}}} " for column in given)
        section.put("prompt_field", Node(template, given[0].origin, quoted=True))
    mapping.rename("answer", "completion_field")


def _labels(section: Section) -> None:
    """Translate which tokens have labels: the keys that restrict them to the answer or to the last answer."""
    answers_only = section.peek("answer_only_loss_mask")
    if answers_only is not None and not is_true(answers_only):
        section.take("answer_only_loss_mask")
        section.put("learn", replace(answers_only, value="all"))
    section.drop("answer_only_loss_mask")
    last_only = section.flag("mask_history")
    if last_only is not None:
        section.put("learn", replace(last_only, value="last"))


def _split(section: Section) -> None:
    """Translate the split. Files have one split, ``train``, and AutoModel ignores the name of another one for them.

    Its recipes name the split ``validation`` of a file with validation data. The path has been translated before.
    """
    node = section.peek("split")
    if node is None:
        section.rename("split")
        return
    name, bracket, limits = str(node.value).partition("[")
    # The user's override has our name.
    path = section.peek("path") or section.ours(join(section.to, "path"))
    given = [] if path is None else path.value if isinstance(path.value, list) else [path]
    are_files = bool(given) and all(_DATA_FILE.search(str(each.value)) for each in given)
    if name == "train" or not are_files:
        section.rename("split")
    elif bracket:
        section.take("split")
        section.put("split", replace(node, value=f"train[{limits}"))
        section.note("split", node, f"a file has only the split train: train[{limits}")
    else:
        section.drop("split")


def _limit(section: Section) -> None:
    """Translate the limit of the number of samples."""
    section.rename("limit_dataset_samples", "max_samples")
    section.rename("num_samples_limit", "max_samples")


def _limit_of_split(section: Section) -> None:
    """Translate a limit that AutoModel ignores if the split, which has been translated before, is a slice."""
    split = section.ours(join(section.to, "split"))
    if split is not None and "[" in str(split.value):
        section.drop("limit_dataset_samples")
    _limit(section)


def _own_length(section: Section) -> None:
    """Translate the length of a data set that has none in AutoModel: ``seq_length`` is our key, and limits."""
    _length(section, is_ours=True)


def _length(section: Section, *, is_ours: bool = False) -> None:
    """Translate the maximum length of a text, and what happens with longer ones.

    AutoModel ignores ``seq_length`` unless ``truncation`` is set, or a key that drops messages or samples. Its packs
    leave out samples that are longer than a pack. Otherwise our limit is the model's context. A flag may be meant for
    our key of the same name, so that it limits.
    """
    given = section.take("truncation")
    limit = section.take("seq_length")
    packed = _pack_size(section)
    truncates = given is not None and str(given.value).lower() not in _UNTRUNCATED
    drops = section.is_on("filter_overlong") or section.is_on("truncate_history")
    has_limit = limit is not None and (is_ours or truncates or drops or limit.is_flag)
    if limit is not None and not has_limit:
        where = "the model's context" if packed is None else "the size of a pack"
        text = f"without truncation: true, AutoModel ignores it; samples are limited by {where}"
        section.note("seq_length", limit, text)
    _put_length(section, limit if has_limit else packed)
    _policy(section, given, "skip" if packed is not None and not has_limit else "right")
    section.drop("padding", "pad_to_max_length", "truncate")


def _put_length(section: Section, limit: Node | None) -> None:
    """Set the maximum length; without one, our limit is the model's context."""
    section.put("seq_length", limit or Node("null", AUTOMODEL_DEFAULT))


def _policy(section: Section, given: Node | None, policy: str) -> None:
    """Translate what happens with longer samples: they are truncated, skipped, or lose their first messages."""
    if given is not None and str(given.value).lower() in _TRUNCATIONS:
        # The user's override has our name.
        section.put("truncation", given)
        return
    origin = AUTOMODEL_DEFAULT if given is None else given.origin
    for name, word in (("filter_overlong", "skip"), ("truncate_history", "history")):
        node = section.flag(name)
        if node is not None:
            policy, origin = word, node.origin
    section.put("truncation", Node(policy, origin))


def _image_length(section: Section) -> None:
    """Translate the maximum length of a conversation with images: longer ones are truncated, or replaced by others.

    The limits of packs and of collate functions replace this one.
    """
    limit = section.take("max_length") or section.take("seq_length")
    truncates = section.take("truncate")
    _put_length(section, limit or _pack_size(section))
    policy = Node("right", AUTOMODEL_DEFAULT)
    if limit is not None and truncates is not None and not is_true(truncates):
        policy = Node("skip", truncates.origin)
    section.put("truncation", section.take("truncation") or policy)
    section.drop("padding")


def _pack_size(section: Section) -> Node | None:
    """Return the node of the tokens per pack of the training data; None without packing."""
    for name in ("packed_sequence_size", "pack_size"):
        node = section.theirs(f"packed_sequence.{name}")
        if section.path == "dataset" and node is not None and value_of(node):
            return node
    return None


def _tokenizer(section: Section) -> None:
    """Translate the tokenizer of the training data, which AutoModel uses instead of the model's.

    Its recipes for vision-language models ignore it.
    """
    inner = section.inner("tokenizer", to="tokenizer")
    name = inner.peek("pretrained_model_name_or_path")
    model = name_of_model(section)
    is_another = name is not None and (model is None or str(model.value) != str(name.value))
    has_own = section.theirs("tokenizer") is not None or section.work.has_images
    if is_another and section.path == "dataset" and not has_own:
        inner.apply(
            "pretrained_model_name_or_path -> from_pretrained\n- _target_ trust_remote_code"
        )
        if inner.node is not None and not inner.node.value:
            section.take("tokenizer")
    section.drop("tokenizer")


def _mock_length(section: Section) -> None:
    """Translate the length of the answers of synthetic images: AutoModel makes as many words and truncates them."""
    node = section.take("max_length")
    if node is not None:
        section.put("num_words", node)
        section.put("seq_length", node)
        section.put("truncation", Node("right", node.origin))


# ---------------------------------------------------------------- sources and targets


def _source(section: Section) -> None:
    """Translate the source, for which AutoModel has a template with SQuAD's fields. Its first answer is used."""
    section.apply("""
        ! source_template: a template of Python | write it as a Jinja template in source_field, such as "{{ question }}"
        ! source_key: a field without a template | set source_field
    """)
    section.put("source_field", Node(_SOURCE, AUTOMODEL_DEFAULT, quoted=True))
    given = section.take("target_key") or Node("answers", AUTOMODEL_DEFAULT)
    name = given.value
    text = (
        f"{{% if {name} is mapping %}}{{{{ {name}.text[0] | trim }}}}"
        f"{{% else %}}{{{{ {name} | trim }}}}{{% endif %}}"
    )
    section.put("target_field", Node(text, given.origin, quoted=True))


def _source_length(section: Section) -> None:
    """Translate the limit of sources and targets, which AutoModel truncates.

    Its decoder starts with the padding token unless the data set has ``decoder_start_token_id``; ours starts with the
    token of the model's configuration, which is the same for T5.
    """
    truncates = section.take("truncation")
    limit = section.take("seq_length")
    is_ignored = truncates is not None and not is_true(truncates) and truncates.value != "right"
    if limit is not None and is_ignored:
        section.note("seq_length", limit, "without truncation: true, AutoModel ignores it")
    _put_length(section, None if is_ignored else limit)
    section.put("truncation", Node("right", AUTOMODEL_DEFAULT))


# ---------------------------------------------------------------- Megatron's indexed files


def _megatron(section: Section) -> None:
    """Translate Megatron's indexed files: their prefixes, the shares of the parts, and the part of this section.

    AutoModel's samples of N tokens have a label for the last one, too, and so N + 1 tokens here, which a model with a
    context of N tokens would not accept. Samples of N tokens have N - 1 labels here, and each token is predicted once.
    """
    section.rename("paths", "path")
    shares = section.take("split")
    if shares is None:
        section.put_default("split", "900, 50, 50")
    else:
        listed = shares.value
        if isinstance(listed, list):
            listed = ", ".join(str(each.value) for each in listed)
        section.put("split", replace(shares, value=listed, quoted=True))
    part = section.text("splits_to_build")
    section.rename("splits_to_build", "part")
    limits = {"validation": "num_val_samples", "test": "num_test_samples"}
    if part in limits:
        section.rename(limits[part], "max_samples")
    section.drop("num_train_samples", *limits.values())


def _nanogpt(section: Section) -> None:
    """Translate the token that samples begin with, which AutoModel uses with align_to_bos only."""
    if section.flag("align_to_bos"):
        section.rename("bos_token")
    section.drop("bos_token")


STEPS: dict[str, Callable[[Section], None]] = {
    "columns": _columns,
    "image_length": _image_length,
    "labels": _labels,
    "length": _length,
    "limit": _limit,
    "limit_of_split": _limit_of_split,
    "megatron": _megatron,
    "mock_length": _mock_length,
    "nanogpt": _nanogpt,
    "own_length": _own_length,
    "source": _source,
    "source_length": _source_length,
    "split": _split,
    "tokenizer": _tokenizer,
}
"""The steps that the tables of data sets name."""
