"""Rows for the arguments of NeMo AutoModel's data sets: columns, labels, lengths and limits."""

from __future__ import annotations

import re
from dataclasses import replace

from automodel_ckpt.config.automodel.preprocessors import name_of_model
from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Degraded,
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    is_true,
    value_of,
)
from automodel_ckpt.config.schema_keys import join
from automodel_ckpt.config.tree.convert import FALSE_WORDS
from automodel_ckpt.config.tree.yaml_tree import Node

_DATA_FILE = re.compile(
    r"\.(jsonl?|ndjson|parquet|arrow|csv|tsv|txt)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE
)


def column_mapping(section: Section) -> None:
    """Translate the columns of a prompt and its completion. AutoModel writes a space after each part of the prompt."""
    mapping = section.inner("column_mapping", to=section.to)
    as_chat = section.peek("use_hf_chat_template")
    context = mapping.peek("context")
    if is_true(as_chat) and context is not None:
        mapping.take("context")
        section.put("system_field", context, was="column_mapping.context")
    names = []
    for name in ("context", "question"):
        column = mapping.take(name)
        if column is not None:
            names.append((name, column))
    if names:
        space = "" if is_true(as_chat) else " "
        template = "".join(f"{{{{ {column.value} }}}}{space}" for _, column in names)
        section.put("prompt_field", Node(template, names[0][1].origin, quoted=True))
        for name, column in names:
            mapping.translated(name, column, join(section.to, "prompt_field"))
    Key("answer", "completion_field").apply(mapping)
    Key("use_hf_chat_template", "as_chat", words={"true": "auto", "True": "auto"}).apply(section)


def labels(section: Section) -> None:
    """Translate which tokens have labels: the keys that restrict them to the answer or to the last answer."""
    answers_only = section.take("answer_only_loss_mask")
    if answers_only is not None and not is_true(answers_only):
        node = Node("all", answers_only.origin)
        section.put("learn", node, was="answer_only_loss_mask")
    elif answers_only is not None:
        section.no_effect("answer_only_loss_mask", answers_only)
    for name in ("mask_history", "train_on_last_turn_only"):
        last_only = section.take(name)
        if is_true(last_only):
            assert last_only is not None
            section.put("learn", Node("last", last_only.origin), was=name)
        elif last_only is not None:
            section.no_effect(name, last_only)


def split_of_data(section: Section) -> None:
    """Translate the split. Files have one split, ``train``, and AutoModel ignores the name of another one for them.

    Its recipes name the split ``validation`` of a file with validation data. The path has been translated before.
    """
    node = section.take("split")
    if node is None:
        return
    name, bracket, limits = str(node.value).partition("[")
    # The user's override has our name.
    path = section.peek("path") or section.work.result.at(join(section.to, "path"))
    if name == "train" or path is None or not _names_files(path):
        section.put("split", node)
    elif bracket:
        section.put("split", replace(node, value=f"train[{limits}"), was="split")
        section.note("split", node, f"a file has only the split train: train[{limits}")
    else:
        section.no_effect("split", node)


def _names_files(path: Node) -> bool:
    """Whether a path, or each one of a list, has the ending of a data file."""
    paths = path.value if isinstance(path.value, list) else [path]
    return all(_DATA_FILE.search(str(each.value)) for each in paths)


def max_samples(section: Section) -> None:
    """Translate the limit of the number of samples."""
    Key("limit_dataset_samples", "max_samples").apply(section)
    Key("num_samples_limit", "max_samples").apply(section)


def max_samples_of_split(section: Section) -> None:
    """Translate the limit of the number of samples, which some data sets of AutoModel ignore if the split is a slice.

    The split has been translated before.
    """
    split = section.work.result.at(join(section.to, "split"))
    if split is not None and "[" in str(split.value):
        NoEffect("limit_dataset_samples").apply(section)
    max_samples(section)


TRUNCATIONS = ("error", "right", "skip", "history")
"""Our values of the key truncation, which is also AutoModel's: an override may have them."""
_UNTRUNCATED = (*FALSE_WORDS, "do_not_truncate")
"""Values of AutoModel's key truncation, in lower case, with which it ignores seq_length."""


def own_length(section: Section) -> None:
    """Translate the length of a data set that has none in AutoModel: ``seq_length`` is our key, and limits."""
    length(section, is_ours=True)


def length(section: Section, *, is_ours: bool = False) -> None:
    """Translate the maximum length of a text, and what happens with longer ones.

    AutoModel ignores ``seq_length`` unless ``truncation`` is set, or a key that drops messages or samples. Its packs
    leave out samples that are longer than a pack. Otherwise our limit is the model's context. A flag may be meant for
    our key of the same name, so that it limits.
    """
    given = section.take("truncation")
    limit = section.take("seq_length")
    packed = pack_size(section)
    has_limit = limit is not None and (is_ours or _is_limited(section, given, limit))
    if limit is not None and has_limit:
        section.put("seq_length", limit, was="seq_length")
    elif packed is not None:
        section.put("seq_length", packed)
    else:
        section.put_default("seq_length", "null")
    if limit is not None and not has_limit:
        text = "without truncation: true, AutoModel ignores it; samples are limited by the model's context"
        if packed is not None:
            text = "without truncation: true, AutoModel ignores it; samples are limited by the size of a pack"
        section.note("seq_length", limit, text)
    default = "skip" if packed is not None and not has_limit else "right"
    _policy(section, given, default)
    NoEffect("padding", "pad_to_max_length", "truncate").apply(section)


def _is_limited(section: Section, truncation: Node | None, limit: Node) -> bool:
    """Whether the maximum length *limit* has an effect in AutoModel."""
    if truncation is not None and str(truncation.value).lower() not in _UNTRUNCATED:
        return True
    drops = any(is_true(section.peek(name)) for name in ("filter_overlong", "truncate_history"))
    return drops or limit.is_flag


def _policy(section: Section, given: Node | None, policy: str) -> None:
    """Translate what happens with longer samples: they are truncated, skipped, or lose their first messages."""
    origin = AUTOMODEL_DEFAULT
    if given is not None and str(given.value).lower() in TRUNCATIONS:
        # The user's override has our name.
        section.put("truncation", given)
        return
    if given is not None:
        origin = given.origin
        section.translated("truncation", given, join(section.to, "truncation"))
    for name, word in (("filter_overlong", "skip"), ("truncate_history", "history")):
        switch = section.take(name)
        if is_true(switch):
            assert switch is not None
            policy = word
            origin = switch.origin
            section.translated(name, switch, join(section.to, "truncation"))
        elif switch is not None:
            section.no_effect(name, switch)
    section.put("truncation", Node(policy, origin))


def image_length(section: Section) -> None:
    """Translate the maximum length of a conversation with images: longer ones are truncated, or replaced by others.

    Without one, our limit is the model's context. The limits of packs and of collate functions replace this one.
    """
    limit = section.take("max_length") or section.take("seq_length")
    truncates = section.take("truncate")
    packed = pack_size(section)
    if limit is not None:
        section.put("seq_length", limit, was="max_length")
    elif packed is not None:
        section.put("seq_length", packed)
    else:
        section.put_default("seq_length", "null")
    policy = Node("right", AUTOMODEL_DEFAULT)
    if limit is not None and truncates is not None and not is_true(truncates):
        policy = Node("skip", truncates.origin)
    if truncates is not None:
        section.translated("truncate", truncates, join(section.to, "truncation"))
    given = section.take("truncation")
    section.put("truncation", given or policy)
    NoEffect("padding").apply(section)


def pack_size(section: Section) -> Node | None:
    """Return the node of the tokens per pack of the training data; None without packing."""
    if section.path != "dataset":
        return None
    for name in ("packed_sequence_size", "pack_size"):
        node = section.work.source.at(f"packed_sequence.{name}")
        if node is not None and value_of(node):
            return node
    return None


def tokenizer_of_data(section: Section) -> None:
    """Translate the tokenizer of the training data, which AutoModel uses instead of the model's.

    Its recipes for vision-language models ignore it.
    """
    if section.work.has_images:
        NoEffect("tokenizer").apply(section)
        return
    inner = section.inner("tokenizer", to="tokenizer")
    name = inner.peek("pretrained_model_name_or_path")
    model = name_of_model(section)
    is_another = name is not None and (model is None or str(model.value) != str(name.value))
    has_own = section.work.source.at("tokenizer") is not None
    if is_another and section.path == "dataset" and not has_own:
        Key("pretrained_model_name_or_path", "from_pretrained").apply(inner)
        NoEffect("_target_", "trust_remote_code").apply(inner)
        if inner.node is not None and not inner.node.value:
            section.take("tokenizer")
    NoEffect("tokenizer").apply(section)


def conversation_text(section: Section) -> None:
    """Translate where conversations come from: a name on the Hub or local files."""
    for name in ("path_or_dataset_id", "dataset_name", "path"):
        Key(name, "path").apply(section)


def mock_length(section: Section) -> None:
    """Translate the length of the answers of synthetic images: AutoModel makes as many words and truncates them."""
    node = section.take("max_length")
    if node is None:
        return
    section.put("num_words", node, was="max_length")
    section.put("seq_length", node)
    section.put("truncation", Node("right", node.origin))


TOKENIZER = Steps(tokenizer_of_data, ("tokenizer",))
IMAGE_LENGTH = Steps(image_length, ("max_length", "truncate"))
OWN_LENGTH = Steps(own_length, ("seq_length", "truncation"))
LENGTH = Steps(length, ("seq_length", "truncation", "filter_overlong", "truncate_history"))
SPLIT = Steps(split_of_data, ("split",))
LIMIT = Steps(max_samples, ("limit_dataset_samples", "num_samples_limit"))
LIMIT_OF_SPLIT = Steps(max_samples_of_split, ("limit_dataset_samples", "num_samples_limit"))
LABELS = Steps(labels, ("answer_only_loss_mask", "mask_history", "train_on_last_turn_only"))
CONVERSATION = (
    Steps(conversation_text, ("path_or_dataset_id", "dataset_name", "path")),
    SPLIT,
    Key("name"),
    Key("revision"),
    Key("chat_template"),
    Key("mask_reasoning_content", "mask_reasoning"),
    Key("drop_history_reasoning_content", "drop_earlier_reasoning"),
    Key("trim_incomplete_last_turn", "end_with_answer"),
    Key("filter_no_assistant", "skip_unanswered"),
    Degraded(
        "mask_generation_prompt",
        "labels begin after the header of an answer; empty reasoning that the template writes can have labels",
    ),
    NoEffect("shuffle_seed", "start_of_turn_token", "unshifted", "skip_invalid_samples", "fp8"),
    LIMIT,
    LABELS,
    LENGTH,
    TOKENIZER,
)
_TEXT_ONLY = "use the recipe TrainFinetuneRecipeForNextTokenPrediction, or remove the key"
CONVERSATION_WITHOUT_IMAGES = (
    Steps(conversation_text, ("path_or_dataset_id", "dataset_name", "path")),
    SPLIT,
    Key("name"),
    Key("chat_template"),
    Needs("mask_reasoning_content", "reasoning without labels in this recipe", _TEXT_ONLY),
    Needs("drop_history_reasoning_content", "removal of reasoning in this recipe", _TEXT_ONLY),
    Needs("trim_incomplete_last_turn", "removal of last turns in this recipe", _TEXT_ONLY),
    Needs("filter_no_assistant", "a filter of conversations in this recipe", _TEXT_ONLY),
    Needs("truncate_history", "removal of first messages in this recipe", _TEXT_ONLY),
    Needs("revision", "a revision of the data in this recipe", "download it, and name the files"),
    Degraded(
        "mask_generation_prompt",
        "labels begin after the header of an answer; empty reasoning that the template writes can have labels",
    ),
    NoEffect("shuffle_seed", "start_of_turn_token", "unshifted", "skip_invalid_samples", "fp8"),
    LIMIT,
    LABELS,
    LENGTH,
    TOKENIZER,
)
"""Rows for conversations as text on which a vision-language model is trained."""
IMAGES = (
    Key("path_or_dataset", "path"),
    Key("path_or_dataset_id", "path"),
    SPLIT,
    Key("chat_template"),
    NoEffect("pretokenize", "inject_fake_images", "max_turns", "seed", "shuffle_seed"),
    LIMIT,
    IMAGE_LENGTH,
    TOKENIZER,
)
"""Rows for all data sets of images. Their columns are those of our preset."""

LABELED = (
    SPLIT,
    LIMIT,
    Key("max_length", "seq_length", default="256"),
    NoEffect("trust_remote_code"),
    TOKENIZER,
)
"""Rows for the data sets of texts with labels, which AutoModel truncates to 256 tokens."""
