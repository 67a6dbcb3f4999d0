"""The data of NeMo AutoModel's recipes: data sets, data loaders, packing, tokenizer and processor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Degraded,
    Key,
    Needs,
    NoEffect,
    Row,
    Section,
    Steps,
    apply_rows,
    is_of_automodel,
    is_true,
    take_target,
    value_of,
)
from automodel_ckpt.config.bind import join
from automodel_ckpt.config.yaml_tree import Node

_DATASETS = "nemo_automodel.components.datasets."
_OURS = "automodel_ckpt.data."
OTHER_DATA = (
    "write the data as JSON lines and use automodel_ckpt.data.chat.messages, "
    "automodel_ckpt.data.text.prompt_completion or automodel_ckpt.data.vlm.conversations"
)
SQUAD_PROMPT = "Context: {{ context }} Question: {{ question }} Answer: "
"""AutoModel's prompt for a row of SQuAD, which ends with a space."""
EMPTY_THINKING = "<|channel>thought\n<channel|>"
"""What AutoModel writes before each answer for Gemma 4: a thinking channel without content."""


@dataclass(frozen=True)
class Builder:
    """A data set of AutoModel: our builder for it, the rows for its arguments, and arguments that are always set."""

    ours: str
    rows: tuple[Row, ...]
    fixed: tuple[tuple[str, str], ...] = ()


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


def max_samples(section: Section) -> None:
    """Translate the limit of the number of samples, which AutoModel ignores if the split is a slice."""
    split = section.peek("split")
    is_slice = split is not None and "[" in str(split.value)
    for name in ("limit_dataset_samples", "num_samples_limit"):
        limit = section.peek(name)
        if limit is not None and is_slice and name == "limit_dataset_samples":
            NoEffect(name).apply(section)
        else:
            Key(name, "max_samples").apply(section)


def length(section: Section) -> None:
    """Translate the maximum length. Without one, AutoModel does not truncate: ours is the model's context."""
    node = section.take("seq_length")
    packed = pack_size(section)
    if node is not None:
        section.put("seq_length", node, was="seq_length")
    elif packed is not None:
        section.put("seq_length", packed)
    else:
        section.put_default("seq_length", "null")
    policy = "right"
    origin = AUTOMODEL_DEFAULT
    given = section.take("truncation")
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
    NoEffect("padding", "pad_to_max_length", "truncate").apply(section)


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
    """Translate the tokenizer of the training data, which AutoModel uses instead of the model's."""
    inner = section.inner("tokenizer", to="tokenizer")
    name = inner.peek("pretrained_model_name_or_path")
    model = _name_of_model(section)
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
LENGTH = Steps(length, ("seq_length", "truncation", "filter_overlong", "truncate_history"))
SPLIT = Key("split")
LIMIT = Steps(max_samples, ("limit_dataset_samples", "num_samples_limit"))
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
    NoEffect("shuffle_seed", "start_of_turn_token", "unshifted", "skip_invalid_samples", "fp8"),
    LIMIT,
    LABELS,
    LENGTH,
    TOKENIZER,
)
IMAGES = (
    Key("path_or_dataset", "path"),
    Key("path_or_dataset_id", "path"),
    SPLIT,
    Key("chat_template"),
    Key("max_length", "seq_length"),
    NoEffect("pretokenize", "inject_fake_images", "max_turns", "seed", "shuffle_seed"),
    LIMIT,
    LENGTH,
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

DATASETS: dict[str, Builder] = {
    "llm.squad.make_squad_dataset": Builder(
        "squad.squad",
        (
            Key("dataset_name", "path"),
            SPLIT,
            Key("chat_template"),
            LIMIT,
            NoEffect("fp8"),
            LENGTH,
            TOKENIZER,
        ),
        (("prompt", SQUAD_PROMPT), ("as_chat", "auto")),
    ),
    "llm.hellaswag.HellaSwag": Builder(
        "hellaswag.hellaswag",
        (Key("path_or_dataset", "path"), SPLIT, LIMIT, LENGTH, TOKENIZER),
    ),
    "llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset": Builder(
        "text.prompt_completion",
        (
            Key("path_or_dataset_id", "path"),
            Steps(column_mapping, ("column_mapping", "use_hf_chat_template")),
            SPLIT,
            Key("name"),
            LIMIT,
            LABELS,
            LENGTH,
            TOKENIZER,
        ),
    ),
    "llm.chat_dataset.ChatDataset": Builder("chat.messages", CONVERSATION),
    "llm.agent_chat.make_agent_chat_dataset": Builder("chat.messages", CONVERSATION),
    "llm.xlam.make_xlam_dataset": Builder(
        "function_calls.xlam",
        (Key("dataset_name", "path"), SPLIT, LIMIT, NoEffect("fp8"), LENGTH, TOKENIZER),
    ),
    "llm.mock_iterable_dataset.MockIterableDataset": Builder(
        "mock.random_tokens",
        (
            Key("vocab_size"),
            Key("seq_len", "seq_length"),
            Key("num_samples", default="1000000"),
            NoEffect("batch_size"),
            TOKENIZER,
        ),
    ),
    "llm.mock.build_unpacked_dataset": Builder(
        "mock.random_tokens",
        (
            Key("num_sentences", "num_samples", default="10"),
            Key("mean_len", "mean_length", default="20.0"),
            Key("std_len", "std_length", default="6.0"),
            Key("vocab_size", default="100"),
            Key("max_sentence_len", "seq_length", default="64"),
            Key("seed"),
            TOKENIZER,
        ),
        (("first_token", "2"), ("end_token", "1")),
    ),
    "llm.seq_cls.GLUE_MRPC": Builder(
        "classification.texts",
        LABELED,
        (
            ("path", "nyu-mll/glue"),
            ("name", "mrpc"),
            ("text_field", "sentence1"),
            ("pair_field", "sentence2"),
            ("truncation", "right"),
        ),
    ),
    "llm.seq_cls.IMDB": Builder(
        "classification.texts", LABELED, (("path", "stanfordnlp/imdb"), ("truncation", "right"))
    ),
    "llm.seq_cls.YelpReviewFull": Builder(
        "classification.texts",
        LABELED,
        (("path", "Yelp/yelp_review_full"), ("truncation", "right")),
    ),
    "vlm.datasets.make_medpix_dataset": Builder(
        "vlm.image_answers", IMAGES, (("preset", "medpix"),)
    ),
    "vlm.datasets.make_cord_v2_dataset": Builder(
        "vlm.image_answers", IMAGES, (("preset", "cord_v2"),)
    ),
    "vlm.datasets.make_rdr_dataset": Builder("vlm.image_answers", IMAGES, (("preset", "rdr"),)),
    "vlm.datasets.make_shopify_product_catalogue_dataset": Builder(
        "vlm.image_answers", IMAGES, (("preset", "shopify"),)
    ),
    "vlm.datasets.make_tulu3_dataset": Builder(
        "vlm.conversations",
        (Key("path_or_dataset", default="allenai/tulu-3-sft-mixture", to="path"), *IMAGES),
    ),
    "vlm.datasets.make_llava_onevision_dataset": Builder(
        "vlm.conversations",
        IMAGES,
        (
            ("messages_field", "conversations"),
            ("images_field", "image"),
            ("image_marker", "<image>"),
        ),
    ),
    "vlm.mock.build_mock_vlm_dataset": Builder(
        "mock_images.mock_images",
        (
            Key("num_samples"),
            Key("num_images_per_sample"),
            Key("image_size"),
            Key("prompt"),
            Key("responses"),
            Key("seed"),
            Steps(mock_length, ("max_length",)),
            NoEffect("pretokenize", "inject_fake_images", "truncate", "split"),
            TOKENIZER,
        ),
    ),
}
"""AutoModel's data sets, below nemo_automodel.components.datasets, and our builders, below automodel_ckpt.data."""

FEATURES = {
    "audio.": "training on audio",
    "vlm.": "this data set of images and text",
    "llm.seq2seq.": "a sequence-to-sequence data set",
    "llm.mock_prefix_tree": "the data set of trees of prefixes",
}
"""The features that data sets without a counterpart need, by the beginning of the name below datasets."""


def dataset(section: Section) -> None:
    """Translate a data set of AutoModel. Other builders, such as the user's own code, stay as they are."""
    node = section.peek("_target_")
    if node is None or not is_of_automodel(str(node.value)):
        return
    name = take_target(section).removeprefix(_DATASETS)
    builder = DATASETS.get(name)
    if builder is None:
        feature = "this data set"
        for prefix, described in FEATURES.items():
            if name.startswith(prefix):
                feature = described
        section.reject("_target_", node, f"{feature} is not supported", OTHER_DATA)
        _discard(section)
        return
    section.put("_target_", replace(node, value=_OURS + builder.ours), was="_target_")
    for key, value in builder.fixed:
        is_number = value.isdecimal()
        section.put(key, Node(value, node.origin, quoted=not is_number), was="_target_")
    apply_rows(builder.rows, section)


def _discard(section: Section) -> None:
    """Remove the arguments of a builder that was rejected, which would all be reported as unknown keys."""
    node = section.node
    if node is not None:
        node.value = {}


COLLATORS = {
    "datasets.utils.default_collater",
    "datasets.utils.seq_cls_collater",
    "datasets.utils.packed_sequence_thd_collater",
    "datasets.vlm.collate_fns.default_collate_fn",
    "datasets.vlm.collate_fns.qwen2_5_collate_fn",
    "datasets.vlm.collate_fns.qwen3_omni_collate_fn",
    "datasets.vlm.collate_fns.llava_onevision_collate_fn",
    "datasets.vlm.collate_fns.kimi_vl_collate_fn",
    "datasets.vlm.collate_fns.kimi_k25_vl_collate_fn",
    "datasets.vlm.collate_fns.nemotron_omni_collate_fn",
    "datasets.vlm.collate_fns.gemma4_prefix_collate_fn",
}
"""Functions of AutoModel that ours replaces, which follows the processor; below nemo_automodel.components."""
DATALOADER = (
    Key("shuffle"),
    Key("num_workers"),
    Key("drop_last"),
    NoEffect(
        "_target_",
        "pin_memory",
        "persistent_workers",
        "prefetch_factor",
        "batch_size",
        "group_by_length",
        "shuffle_buffer_size",
        "dataloader_type",
    ),
)


def dataloader(section: Section) -> None:
    """Translate the data loader of the training data."""
    if section.node is None:
        return
    collator(section, "dataset")
    apply_rows(DATALOADER, section)


def validation_dataloader(section: Section) -> None:
    """Translate the data loader of the validation data: only the maximum length has a meaning here."""
    if section.node is not None:
        collator(section, "validation_dataset")
    whole = section.work.section("")
    NoEffect("validation_dataloader").apply(whole)


def collator(section: Section, data: str) -> None:
    """Translate the collate function for the section *data*. AutoModel's are replaced by ours."""
    node = section.peek("collate_fn")
    if node is None:
        return
    target = node.at("_target_") or node
    name = str(target.value)
    if not is_of_automodel(name):
        return
    section.take("collate_fn")
    if name.removeprefix("nemo_automodel.components.") not in COLLATORS:
        hint = "remove collate_fn to use the processor's own conversion of text and images"
        section.reject("collate_fn", target, "this collate function is not supported", hint)
        return
    section.no_effect("collate_fn", node)
    ours = section.work.section(data)
    if name.endswith("gemma4_prefix_collate_fn"):
        _answer_prefix(ours, target.origin)
    divisor = node.at("pad_seq_len_divisible")
    if divisor is not None and data == "dataset":
        section.put("pad_to_multiple_of", divisor, was="collate_fn.pad_seq_len_divisible")
    limit = node.at("max_length")
    if limit is not None and section.work.result.at(data) is not None:
        ours.put("seq_length", limit)
        policy = "skip" if is_true(node.at("drop_overlong")) else "right"
        ours.put("truncation", Node(policy, limit.origin))


def _answer_prefix(data: Section, origin: str) -> None:
    if data.work.result.at(data.to) is not None:
        data.put("answer_prefix", Node(EMPTY_THINKING, origin, quoted=True))


PACKING = (
    Key("packed_sequence_size", "size"),
    Key("pack_size", "size"),
    NoEffect(
        "packing_strategy",
        "packing_format",
        "packing_ratio",
        "split_across_pack",
        "num_proc",
        "prepacked",
        "pretokenize",
        "collate_max_length",
        "balance_media_tokens",
        "attn_implementation",
        "drop_long_samples",
        "max_length",
        "enabled",
    ),
    Degraded("max_packs", "all packs are used; limit the samples instead (dataset.max_samples)"),
    Needs("post_tokenize_hook_fn", "a function that changes samples", "remove the key"),
)


def packing(section: Section) -> None:
    """Translate sequence packing. A size of 0 disables it in AutoModel."""
    if section.node is None:
        return
    sizes = [section.peek(name) for name in ("packed_sequence_size", "pack_size")]
    if not any(size is not None and value_of(size) for size in sizes):
        for name, node in section.node.children():
            # Keys of ours, such as an override of packed_sequence.size, are not AutoModel's.
            if name not in ("size", "strategy"):
                section.take(name)
                section.no_effect(name, node)
        return
    if sizes[1] is not None:
        _image_packs(section)
    apply_rows(PACKING, section)


def _image_packs(section: Section) -> None:
    """Translate what packing of images does with long samples, and the text that it adds before answers."""
    data = section.work.section("dataset")
    limit = section.take("max_length")
    drops = section.take("drop_long_samples")
    if limit is not None:
        data.put("seq_length", limit)
    if is_true(drops):
        assert drops is not None
        data.put("truncation", Node("skip", drops.origin))
    hook = section.peek("post_tokenize_hook_fn")
    if hook is not None and str(hook.value).endswith(".gemma4_inject_thinking_prefix"):
        section.take("post_tokenize_hook_fn")
        section.no_effect("post_tokenize_hook_fn", hook)
        _answer_prefix(data, hook.origin)


def tokenizer(section: Section) -> None:
    """Translate the section tokenizer. Settings need the tokenizer's class as ``_target_``."""
    if section.node is None or not _is_pretrained(section, "AutoTokenizer"):
        return
    name = _own_name(section)
    settings = [key for key, child in section.node.children() if not child.is_null]
    if not settings:
        if name is not None:
            section.put("from_pretrained", name, was="pretrained_model_name_or_path")
        return
    name = name or _name_of_model(section)
    if name is not None:
        section.put("_target_", Node("transformers.AutoTokenizer.from_pretrained", name.origin))
        section.put("pretrained_model_name_or_path", name)
        apply_rows([Key(key) for key in settings], section)


OUR_PROCESSOR_KEYS = ("from_pretrained", "kwargs")


def processor(section: Section) -> None:
    """Translate the section processor. The data sets have no videos, so their settings have no effect."""
    NoEffect("video_processor").apply(section)
    if section.node is None or not _is_pretrained(section, "AutoProcessor"):
        return
    name = _own_name(section)
    if name is not None:
        section.put("from_pretrained", name, was="pretrained_model_name_or_path")
    for key, _ in section.node.children():
        if key not in OUR_PROCESSOR_KEYS:
            Key(key, f"kwargs.{key}").apply(section)


def _is_pretrained(section: Section, auto_class: str) -> bool:
    """Remove the ``_target_`` of a tokenizer or processor that is read from files.

    AutoModel's own classes, such as its processors for MiniMax M3, Step 3.7 and Inkling, are in transformers. Returns
    False for another ``_target_``, such as the user's own code.
    """
    node = section.peek("_target_")
    if node is None:
        NoEffect("trust_remote_code").apply(section)
        return True
    target = str(node.value)
    is_auto = re.fullmatch(rf"[\w.]*\.{auto_class}\.from_pretrained", target) is not None
    if not is_auto and not is_of_automodel(target):
        return False
    section.take("_target_")
    section.translated("_target_", node, section.to)
    NoEffect("trust_remote_code").apply(section)
    return True


def _own_name(section: Section) -> Node | None:
    """Remove and return the name of a tokenizer or processor; None if it is the model's.

    The model's own one also follows model.revision and model.trust_remote_code.
    """
    name = section.take("pretrained_model_name_or_path")
    model = _name_of_model(section)
    if name is not None and model is not None and name.value == model.value:
        section.no_effect("pretrained_model_name_or_path", name)
        return None
    return name


def _name_of_model(section: Section) -> Node | None:
    """Return the name of the model, which its tokenizer and processor have if nothing else is given."""
    model = section.work.result.at("model.from_pretrained")
    if model is None:
        return None
    return replace(model, origin=AUTOMODEL_DEFAULT)


def validation(section: Section) -> None:
    """Translate the validation data: one set, or further ones whose names follow ``validation_dataset_``."""
    dataset(section)
    root = section.work.section("")
    assert root.node is not None
    for name in [name for name, _ in root.node.children()]:
        label = name.removeprefix("validation_dataset_")
        if label == name:
            continue
        named = root.inner(name, to=f"validation_datasets.{label}")
        if named.node is None:
            root.take(name)
            continue
        dataset(named)
        # The user's own builder moves as it is.
        apply_rows([Key(key) for key, _ in named.node.children()], named)


ROWS: Sequence[tuple[str, Row]] = (
    ("dataset", Steps(dataset)),
    ("validation_dataset", Steps(validation)),
    ("dataloader", Steps(dataloader)),
    ("validation_dataloader", Steps(validation_dataloader)),
    ("packed_sequence", Steps(packing)),
    ("tokenizer", Steps(tokenizer)),
    ("processor", Steps(processor)),
)
