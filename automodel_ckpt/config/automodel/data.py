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
from automodel_ckpt.config.yaml_tree import Node

_DATASETS = "nemo_automodel.components.datasets."
_OURS = "automodel_ckpt.data."
OTHER_DATA = (
    "write the data as JSON lines and use automodel_ckpt.data.chat.messages, "
    "automodel_ckpt.data.text.prompt_completion or automodel_ckpt.data.vlm.conversations"
)


@dataclass(frozen=True)
class Builder:
    """A data set of AutoModel: our builder for it, the rows for its arguments, and a note about what differs."""

    ours: str
    rows: tuple[Row, ...]
    note: str = ""


def column_mapping(section: Section) -> None:
    """Translate the columns of a prompt and its completion. AutoModel writes a space after each part of the prompt."""
    mapping = section.inner("column_mapping", to=section.to)
    names = []
    for name in ("context", "question"):
        node = mapping.take(name)
        if node is not None:
            names.append((name, node))
    if names:
        template = "".join(f"{{{{ {node.value} }}}} " for _, node in names)
        was = ", ".join(f"column_mapping.{name}" for name, _ in names)
        section.put("prompt_field", Node(template, names[0][1].origin, quoted=True), was=was)
    Key("answer", "completion_field").apply(mapping)


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


def history(section: Section) -> None:
    """Translate mask_history: only the last turn of the assistant has labels."""
    node = section.take("mask_history")
    if is_true(node):
        assert node is not None
        section.put("learn", Node("last", node.origin), was="mask_history")
    elif node is not None:
        section.no_effect("mask_history", node)


def length(section: Section) -> None:
    """Translate the maximum length. Without one, AutoModel does not truncate: ours is the model's context."""
    node = section.take("seq_length")
    packed = pack_size(section)
    if node is not None:
        section.put("seq_length", node, was="seq_length")
    elif packed is not None:
        section.put("seq_length", packed, was="")
    else:
        section.put_default("seq_length", "null")
    truncation = section.take("truncation")
    if truncation is None:
        section.put_default("truncation", "right")
    else:
        section.put("truncation", Node("right", truncation.origin), was="truncation")
    apply_rows((NoEffect("padding", "pad_to_max_length", "tokenizer"),), section)


def pack_size(section: Section) -> Node | None:
    """Return the node of the tokens per pack of the training data; None without packing."""
    if section.path != "dataset":
        return None
    node = section.work.source.at("packed_sequence.packed_sequence_size")
    return node if node is not None and value_of(node) else None


TEXT = (Steps(length),)
DATASETS: dict[str, Builder] = {
    "llm.squad.make_squad_dataset": Builder(
        "squad.squad",
        (
            Key("dataset_name", "path"),
            Key("split"),
            Steps(max_samples, ("limit_dataset_samples",)),
            NoEffect("fp8"),
            Needs("chat_template", "a chat template for SQuAD", "remove the key"),
            *TEXT,
        ),
        "the prompt is 'Context: ...', 'Question: ...' and 'Answer:' on three lines, without a chat template",
    ),
    "llm.hellaswag.HellaSwag": Builder(
        "hellaswag.hellaswag",
        (
            Key("path_or_dataset", "path"),
            Key("split"),
            Steps(max_samples, ("num_samples_limit",)),
            *TEXT,
        ),
    ),
    "llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset": Builder(
        "text.prompt_completion",
        (
            Key("path_or_dataset_id", "path"),
            Steps(column_mapping, ("column_mapping",)),
            Key("split"),
            Key("name"),
            Steps(max_samples, ("limit_dataset_samples",)),
            Needs(
                "answer_only_loss_mask",
                "a loss on the prompt",
                "remove the key: only the answer has labels",
                when=lambda node: not is_true(node),
            ),
            Needs("use_hf_chat_template", "a chat template for columns", OTHER_DATA),
            *TEXT,
        ),
    ),
    "llm.chat_dataset.ChatDataset": Builder(
        "chat.messages",
        (
            Key("path_or_dataset_id", "path"),
            Key("split"),
            Key("name"),
            Key("chat_template"),
            Steps(history, ("mask_history",)),
            Needs("mask_reasoning_content", "masking of reasoning", "remove the key"),
            NoEffect("shuffle_seed", "start_of_turn_token", "unshifted", "skip_invalid_samples"),
            *TEXT,
        ),
    ),
}
"""AutoModel's data sets, below nemo_automodel.components.datasets, and our builders, below automodel_ckpt.data."""

FEATURES = {
    "vlm.": "this data set of images and text",
    "audio.": "training on audio",
    "llm.agent_chat.": "the data set of agent conversations",
    "llm.xlam.": "the data set of function calls",
    "llm.seq2seq.": "a sequence-to-sequence data set",
    "llm.mock": "synthetic data",
}
"""The features that data sets without a counterpart need, by the beginning of the name below datasets."""


def dataset(section: Section) -> None:
    """Translate a data set of AutoModel. Other builders, such as the user's own code, stay as they are."""
    node = section.peek("_target_")
    if node is None or not is_of_automodel(str(node.value)):
        return
    target = take_target(section)
    name = target.removeprefix(_DATASETS)
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
    apply_rows(builder.rows, section)
    _tokenizer_of_data(section)
    if builder.note and section.path == "dataset":
        section.note("_target_", node, builder.note)


def _discard(section: Section) -> None:
    """Remove the arguments of a builder that was rejected, which would all be reported as unknown keys."""
    node = section.node
    if node is not None:
        node.value = {}


def _tokenizer_of_data(section: Section) -> None:
    """Record that the tokenizer of a data set is that of the recipe."""
    NoEffect("tokenizer").apply(section)


COLLATORS = {
    "datasets.utils.default_collater",
    "datasets.utils.packed_sequence_thd_collater",
    "datasets.vlm.collate_fns.default_collate_fn",
    "datasets.vlm.collate_fns.qwen2_5_collate_fn",
}
"""Functions of AutoModel that only pad or concatenate samples, below nemo_automodel.components."""
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
    collator(section)
    apply_rows(DATALOADER, section)


def collator(section: Section) -> None:
    """Translate a collate function. AutoModel's are replaced by ours, which pads and labels by the recipe's data."""
    node = section.peek("collate_fn")
    if node is None:
        return
    inner = section.inner("collate_fn")
    target = node if isinstance(node.value, str) else inner.peek("_target_")
    name = str(target.value) if target is not None else ""
    if not is_of_automodel(name):
        return
    section.take("collate_fn")
    if name.removeprefix("nemo_automodel.components.") not in COLLATORS:
        hint = "remove collate_fn to use the processor's own conversion of text and images"
        section.reject("collate_fn", target or node, "this collate function is not supported", hint)
        return
    section.no_effect("collate_fn", node)
    divisor = node.at("pad_seq_len_divisible")
    if divisor is not None:
        section.put("pad_to_multiple_of", divisor, was="collate_fn.pad_seq_len_divisible")
    limit = node.at("max_length")
    if limit is not None and section.work.recipe == "vlm_finetune":
        ours = section.work.section("dataset")
        ours.put("seq_length", limit)


PACKING = (
    Key("packed_sequence_size", "size"),
    NoEffect("packing_strategy", "split_across_pack", "num_proc", "prepacked"),
    Degraded("max_packs", "all packs are used; limit the samples instead (dataset.max_samples)"),
)


def packing(section: Section) -> None:
    """Translate sequence packing of text."""
    if section.node is None:
        return
    images = section.peek("pack_size")
    if images is not None and value_of(images):
        hint = "remove the section packed_sequence: samples are concatenated in each micro-batch"
        section.reject("pack_size", images, "packing of samples with images is not supported", hint)
        section.node.value = {}
        return
    size = section.peek("packed_sequence_size")
    if size is None or not value_of(size):
        for name, node in section.node.children():
            # Keys of ours, such as an override of packed_sequence.size, are not AutoModel's.
            if name not in ("size", "strategy"):
                section.take(name)
                section.no_effect(name, node)
        return
    apply_rows(PACKING, section)


def tokenizer(section: Section) -> None:
    """Translate the section tokenizer. Additional arguments need the tokenizer's class as ``_target_``."""
    _pretrained(section, "transformers.AutoTokenizer.from_pretrained", r"(NeMo)?AutoTokenizer")


def processor(section: Section) -> None:
    """Translate the section processor. Additional arguments need the processor's class as ``_target_``."""
    video = section.peek("video_processor")
    if video is not None:
        section.take("video_processor")
        hint = "remove it to use the processor's settings for videos"
        section.reject(
            "video_processor", video, "a separate processor of videos is not supported", hint
        )
    _pretrained(section, "transformers.AutoProcessor.from_pretrained", r"AutoProcessor")


def _pretrained(section: Section, auto_class: str, pattern: str) -> None:
    """Translate a tokenizer or processor: its name alone, or a call of *auto_class* with all arguments."""
    if section.node is None:
        return
    node = section.peek("_target_")
    target = str(node.value) if node is not None else ""
    if target and not re.fullmatch(rf"[\w.]*\.{pattern}\.from_pretrained", target):
        if is_of_automodel(target):
            assert node is not None
            hint = "use transformers.AutoProcessor.from_pretrained, or a class of your own with --trust"
            section.reject("_target_", node, f"{section.path} of this class is not supported", hint)
            section.node.value = {}
        return
    section.take("_target_")
    NoEffect("trust_remote_code").apply(section)
    name = section.take("pretrained_model_name_or_path") or _name_of_model(section)
    arguments = [(key, child) for key, child in section.node.children() if not child.is_null]
    if not arguments and name is not None:
        if name.origin != AUTOMODEL_DEFAULT:
            section.put("from_pretrained", name, was="pretrained_model_name_or_path")
        return
    if name is None:
        return
    origin = node.origin if node is not None else section.origin
    section.put("_target_", Node(auto_class, origin))
    section.put("pretrained_model_name_or_path", name)
    apply_rows([Key(key) for key, _ in arguments], section)


def _name_of_model(section: Section) -> Node | None:
    """Return the name of the model, which its tokenizer and processor have if nothing else is given."""
    model = section.work.result.at("model.from_pretrained")
    return replace(model, origin=AUTOMODEL_DEFAULT) if model is not None else None


def validation(section: Section) -> None:
    """Translate the validation data: one set, and an error for each further one, which has a name."""
    root = section.work.section("")
    dataset(section)
    assert root.node is not None
    for name, node in root.node.children():
        if name.startswith("validation_dataset_"):
            root.take(name)
            hint = "keep one section validation_dataset"
            root.reject(name, node, "several validation sets are not supported", hint)


ROWS: Sequence[tuple[str, Row]] = (
    ("dataset", Steps(dataset)),
    ("validation_dataset", Steps(validation)),
    ("dataloader", Steps(dataloader)),
    ("packed_sequence", Steps(packing)),
    ("tokenizer", Steps(tokenizer)),
    ("processor", Steps(processor)),
)
