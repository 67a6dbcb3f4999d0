"""The data sets of NeMo AutoModel's recipes: our builder for each, and the translation of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from automodel_ckpt.config.automodel.dataset_rows import (
    CONVERSATION,
    CONVERSATION_WITHOUT_IMAGES,
    IMAGES,
    LABELED,
    LABELS,
    LENGTH,
    LIMIT,
    LIMIT_OF_SPLIT,
    OWN_LENGTH,
    SPLIT,
    TOKENIZER,
    column_mapping,
    mock_length,
)
from automodel_ckpt.config.automodel.retrieval import PAIRS
from automodel_ckpt.config.automodel.rows import (
    Degraded,
    Key,
    Needs,
    NoEffect,
    Row,
    Section,
    Steps,
    apply_rows,
    is_of_automodel,
    take_target,
)
from automodel_ckpt.config.automodel.seq2seq import ROWS as SEQ2SEQ
from automodel_ckpt.config.automodel.speech import COMMON_VOICE, ENGLISH_MIXTURE, TRANSCRIPTS
from automodel_ckpt.config.automodel.token_rows import MEGATRON, NANOGPT
from automodel_ckpt.config.tree.yaml_tree import Node

_DATASETS = "nemo_automodel.components.datasets."
_OURS = "automodel_ckpt.data."
_CHAT = "chat.messages"
_MOCK_IMAGES = "automodel_ckpt.examples.data.mock_images.mock_images"
OTHER_DATA = (
    "write the data as JSON lines and use automodel_ckpt.data.chat.messages, "
    "automodel_ckpt.data.text.prompt_completion or automodel_ckpt.data.vlm.conversations"
)
SQUAD_PROMPT = "Context: {{ context }} Question: {{ question }} Answer: "
"""AutoModel's prompt for a row of SQuAD, which ends with a space."""


@dataclass(frozen=True)
class Builder:
    """A data set of AutoModel: our builder for it, the rows for its arguments, and arguments that are always set."""

    ours: str
    rows: tuple[Row, ...]
    fixed: tuple[tuple[str, str], ...] = ()


COLUMNS: tuple[Row, ...] = (
    Key("path_or_dataset_id", "path"),
    Steps(column_mapping, ("column_mapping", "use_hf_chat_template")),
    SPLIT,
    Key("name"),
    LIMIT,
    LABELS,
    LENGTH,
    TOKENIZER,
)
"""Rows for tables of prompts and answers."""

DATASETS: dict[str, Builder] = {
    "llm.squad.make_squad_dataset": Builder(
        "squad.squad",
        (
            Key("dataset_name", "path"),
            SPLIT,
            Key("chat_template"),
            LIMIT_OF_SPLIT,
            NoEffect("fp8"),
            LENGTH,
            TOKENIZER,
        ),
        (("prompt", SQUAD_PROMPT), ("as_chat", "auto")),
    ),
    "llm.seq2seq.make_seq2seq_dataset": Builder("seq2seq.source_target", SEQ2SEQ),
    "llm.hellaswag.HellaSwag": Builder(
        "hellaswag.hellaswag",
        (Key("path_or_dataset", "path"), SPLIT, LIMIT, OWN_LENGTH, TOKENIZER),
    ),
    "llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset": Builder(
        "text.prompt_completion", COLUMNS
    ),
    "llm.column_mapped_text_instruction_iterable_dataset."
    "ColumnMappedTextInstructionIterableDataset": Builder(
        "text.prompt_completion",
        (
            *COLUMNS,
            NoEffect("repeat_on_exhaustion", "start_of_turn_token"),
            *(
                Needs(name, "reading of Delta Lake tables", "write the data as JSON lines")
                for name in ("delta_storage_options", "delta_version", "delta_sql_query")
            ),
        ),
        (("streaming", "true"),),
    ),
    "llm.chat_dataset.ChatDataset": Builder(_CHAT, CONVERSATION),
    "llm.agent_chat.make_agent_chat_dataset": Builder(_CHAT, CONVERSATION),
    "llm.xlam.make_xlam_dataset": Builder(
        "function_calls.xlam",
        (Key("dataset_name", "path"), SPLIT, LIMIT_OF_SPLIT, NoEffect("fp8"), LENGTH, TOKENIZER),
    ),
    "llm.mock_iterable_dataset.MockIterableDataset": Builder(
        "mock.random_tokens",
        (
            Key("vocab_size"),
            Key("seq_len", "seq_length"),
            Key("num_samples", default="1000000"),
            Degraded("exclude_token_ids", "the tokens are drawn from the whole vocabulary"),
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
    "llm.megatron_dataset.MegatronPretraining": Builder("token_files.megatron", MEGATRON),
    "llm.nanogpt_dataset.NanogptDataset": Builder("token_files.nanogpt", NANOGPT),
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
    **dict.fromkeys(
        (
            "llm.retrieval_dataset.RetrievalDatasetConfig",
            "llm.retrieval_dataset.make_retrieval_dataset",
            "llm.retrieval_dataset_inline.InlineRetrievalDatasetConfig",
            "llm.retrieval_dataset_inline.make_retrieval_dataset",
        ),
        Builder("retrieval.retrieval", PAIRS),
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
        _MOCK_IMAGES,
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
    "audio.datasets.make_hf_audio_asr_dataset": Builder("vlm.transcripts", TRANSCRIPTS),
    "audio.datasets.make_cv17_dataset": Builder(
        "vlm.transcripts",
        COMMON_VOICE,
        (("prompt", "Transcribe the Turkish audio clip."), ("prompt_first", "false")),
    ),
    "audio.multi_en.make_multi_en_asr_dataset": Builder("mixture.mixture", ENGLISH_MIXTURE),
}
"""AutoModel's data sets, below nemo_automodel.components.datasets, and our builders, below automodel_ckpt.data."""

IN_PACKAGES = {
    f"{name.partition('.')[0]}.{name.rpartition('.')[2]}": builder
    for name, builder in DATASETS.items()
}
"""The same builders by the names that AutoModel's packages llm and vlm export, without the module."""

FEATURES = {
    "audio.": "this data set of audio",
    "vlm.": "this data set of images and text",
    "llm.mock_prefix_tree": "the data set of trees of prefixes",
}
"""The features that data sets without a counterpart need, by the beginning of the name below datasets."""


def dataset(section: Section) -> None:
    """Translate a data set of AutoModel. Other builders, such as the user's own code, stay as they are."""
    node = section.peek("_target_")
    if node is None or not is_of_automodel(str(node.value)):
        return
    name = take_target(section).removeprefix(_DATASETS)
    builder = DATASETS.get(name) or IN_PACKAGES.get(name)
    if builder is not None and builder.ours == _CHAT and section.work.has_images:
        builder = Builder("vlm.conversations", CONVERSATION_WITHOUT_IMAGES)
    if builder is None:
        feature = "this data set"
        for prefix, described in FEATURES.items():
            if name.startswith(prefix):
                feature = described
        section.reject("_target_", node, f"{feature} is not supported", OTHER_DATA)
        _discard(section)
        return
    ours = builder.ours if builder.ours == _MOCK_IMAGES else _OURS + builder.ours
    section.put("_target_", replace(node, value=ours), was="_target_")
    for key, value in builder.fixed:
        is_text = not value.isdecimal() and value not in ("true", "false")
        section.put(key, Node(value, node.origin, quoted=is_text), was="_target_")
    apply_rows(builder.rows, section)


def _discard(section: Section) -> None:
    """Remove the arguments of a builder that was rejected, which would all be reported as unknown keys."""
    node = section.node
    if node is not None:
        node.value = {}


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
)
