"""The data sets of NeMo AutoModel's recipes: our builder for each, and the translation of its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from automodel_ckpt.config.automodel import dataset_steps as steps
from automodel_ckpt.config.automodel.rows import Section, is_of_automodel
from automodel_ckpt.config.tree.yaml_tree import Node

_DATASETS = "nemo_automodel.components.datasets."
_CHAT = "data.chat.messages"
OTHER_DATA = (
    "write the data as JSON lines and use automodel_ckpt.data.chat.messages, "
    "automodel_ckpt.data.text.prompt_completion or automodel_ckpt.data.vlm.conversations"
)
_SQUAD_PROMPT = "Context: {{ context }} Question: {{ question }} Answer: "
"""AutoModel's prompt for a row of SQuAD, which ends with a space."""

_COLUMNS = """
path_or_dataset_id -> path
* columns split
name
* limit labels length tokenizer
"""
_CHATS = """
path_or_dataset_id -> path
dataset_name -> path
path
* split
name
chat_template
- shuffle_seed start_of_turn_token unshifted skip_invalid_samples fp8
~ mask_generation_prompt: labels begin after the header of an answer; empty reasoning of the template can have labels
"""
_CONVERSATION = f"""
{_CHATS}
revision
mask_reasoning_content -> mask_reasoning
drop_history_reasoning_content -> drop_earlier_reasoning
trim_incomplete_last_turn -> end_with_answer
filter_no_assistant -> skip_unanswered
* limit labels length tokenizer
"""
_TEXT_ONLY = "use the recipe TrainFinetuneRecipeForNextTokenPrediction, or remove the key"
_CONVERSATION_WITHOUT_IMAGES = f"""
{_CHATS}
! mask_reasoning_content: reasoning without labels in this recipe | {_TEXT_ONLY}
! drop_history_reasoning_content: removal of reasoning in this recipe | {_TEXT_ONLY}
! trim_incomplete_last_turn: removal of last turns in this recipe | {_TEXT_ONLY}
! filter_no_assistant: a filter of conversations in this recipe | {_TEXT_ONLY}
! truncate_history: removal of first messages in this recipe | {_TEXT_ONLY}
! revision: a revision of the data in this recipe | download it, and name the files
* limit labels length tokenizer
"""
_IMAGES = """
path_or_dataset -> path
path_or_dataset_id -> path
* split
chat_template
- pretokenize inject_fake_images max_turns seed shuffle_seed
* limit image_length tokenizer
"""
_LABELED = """
* split limit
max_length -> seq_length = 256
- trust_remote_code
* tokenizer
"""
_AUDIO = """
* split
audio_column -> audio_field
system_prompt
user_prompt -> prompt
drop_empty_text -> skip_empty
min_audio_duration_seconds -> min_seconds
max_audio_duration_seconds -> max_seconds
- sampling_rate trust_remote_code
* limit image_length tokenizer
"""
# AutoModel writes the question before the audio, averages channels, and changes the sampling rate to 16 kHz. Ours
# follows the processor. An audio that cannot be read is left out there, and an error here.


@dataclass(frozen=True)
class Builder:
    """A data set of AutoModel: our builder for it, the table of its arguments, and arguments that are always set."""

    ours: str
    table: str
    fixed: dict[str, str] = field(default_factory=dict)


_MRPC = {
    "path": "nyu-mll/glue",
    "name": "mrpc",
    "text_field": "sentence1",
    "pair_field": "sentence2",
    "truncation": "right",
}
_LLAVA = {
    "messages_field": "conversations",
    "images_field": "image",
    "image_marker": "<image>",
}
DATASETS: dict[str, Builder] = {
    "llm.squad.make_squad_dataset": Builder(
        "data.squad.squad",
        """
        dataset_name -> path
        * split
        chat_template
        * limit_of_split
        - fp8
        * length tokenizer
        """,
        {"prompt": _SQUAD_PROMPT, "as_chat": "auto"},
    ),
    "llm.seq2seq.make_seq2seq_dataset": Builder(
        "data.seq2seq.source_target",
        """
        dataset_name -> path = rajpurkar/squad
        * split limit_of_split source
        decoder_start_token_id -> /model.config_overrides.decoder_start_token_id
        - fp8
        * source_length tokenizer
        """,
    ),
    "llm.hellaswag.HellaSwag": Builder(
        "data.hellaswag.hellaswag",
        "path_or_dataset -> path\n* split limit own_length tokenizer",
    ),
    "llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset": Builder(
        "data.text.prompt_completion", _COLUMNS
    ),
    "llm.column_mapped_text_instruction_iterable_dataset."
    "ColumnMappedTextInstructionIterableDataset": Builder(
        "data.text.prompt_completion",
        f"""
        {_COLUMNS}
        - repeat_on_exhaustion start_of_turn_token
        ! delta_storage_options: reading of Delta Lake tables | write the data as JSON lines
        ! delta_version: reading of Delta Lake tables | write the data as JSON lines
        ! delta_sql_query: reading of Delta Lake tables | write the data as JSON lines
        """,
        {"streaming": "true"},
    ),
    "llm.chat_dataset.ChatDataset": Builder(_CHAT, _CONVERSATION),
    "llm.agent_chat.make_agent_chat_dataset": Builder(_CHAT, _CONVERSATION),
    "llm.xlam.make_xlam_dataset": Builder(
        "data.function_calls.xlam",
        "dataset_name -> path\n* split limit_of_split\n- fp8\n* length tokenizer",
    ),
    "llm.mock_iterable_dataset.MockIterableDataset": Builder(
        "examples.data.mock.random_tokens",
        """
        vocab_size
        seq_len -> seq_length
        num_samples = 1000000
        ~ exclude_token_ids: the tokens are drawn from the whole vocabulary
        - batch_size
        * tokenizer
        """,
    ),
    "llm.mock.build_unpacked_dataset": Builder(
        "examples.data.mock.random_tokens",
        """
        num_sentences -> num_samples = 10
        mean_len -> mean_length = 20.0
        std_len -> std_length = 6.0
        vocab_size = 100
        max_sentence_len -> seq_length = 64
        seed
        * tokenizer
        """,
        {"first_token": "2", "end_token": "1"},
    ),
    "llm.megatron_dataset.MegatronPretraining": Builder(
        "data.token_files.megatron",
        """
        * megatron
        seq_length = 2048
        ! object_storage_config: reading tokens from object storage | copy the files first
        - index_mapping_dir create_attention_mask seed num_dataset_builder_threads mmap_bin_files
        - trainer_limit_val_batches trainer_limit_test_batches
        * tokenizer
        """,
    ),
    "llm.nanogpt_dataset.NanogptDataset": Builder(
        "data.token_files.nanogpt",
        """
        file_pattern -> path
        seq_len -> seq_length
        * nanogpt
        - shuffle_files
        * tokenizer
        """,
    ),
    "llm.seq_cls.GLUE_MRPC": Builder("data.classification.texts", _LABELED, _MRPC),
    "llm.seq_cls.IMDB": Builder(
        "data.classification.texts",
        _LABELED,
        {"path": "stanfordnlp/imdb", "truncation": "right"},
    ),
    "llm.seq_cls.YelpReviewFull": Builder(
        "data.classification.texts",
        _LABELED,
        {"path": "Yelp/yelp_review_full", "truncation": "right"},
    ),
    "vlm.datasets.make_medpix_dataset": Builder(
        "data.vlm.image_answers", _IMAGES, {"preset": "medpix"}
    ),
    "vlm.datasets.make_cord_v2_dataset": Builder(
        "data.vlm.image_answers", _IMAGES, {"preset": "cord_v2"}
    ),
    "vlm.datasets.make_rdr_dataset": Builder("data.vlm.image_answers", _IMAGES, {"preset": "rdr"}),
    "vlm.datasets.make_shopify_product_catalogue_dataset": Builder(
        "data.vlm.image_answers", _IMAGES, {"preset": "shopify"}
    ),
    "vlm.datasets.make_tulu3_dataset": Builder(
        "data.vlm.conversations",
        f"path_or_dataset -> path = allenai/tulu-3-sft-mixture\n{_IMAGES}",
    ),
    "vlm.datasets.make_llava_onevision_dataset": Builder("data.vlm.conversations", _IMAGES, _LLAVA),
    "vlm.mock.build_mock_vlm_dataset": Builder(
        "examples.data.mock_images.mock_images",
        """
        num_samples
        num_images_per_sample
        image_size
        prompt
        responses
        seed
        * mock_length
        - pretokenize inject_fake_images truncate split
        * tokenizer
        """,
    ),
    "audio.datasets.make_hf_audio_asr_dataset": Builder(
        "data.vlm.transcripts",
        f"path_or_dataset -> path\nname\ntext_column -> text_field\n{_AUDIO}",
    ),
    "audio.datasets.make_cv17_dataset": Builder(
        "data.vlm.transcripts",
        "path_or_dataset -> path = ysdede/commonvoice_17_tr_fixed\n"
        f"text_column -> text_field = transcription\n{_AUDIO}",
        {"prompt": "Transcribe the Turkish audio clip.", "prompt_first": "false"},
    ),
}
"""AutoModel's data sets, below nemo_automodel.components.datasets, and our builders, below automodel_ckpt."""

_IN_PACKAGES = {
    f"{name.partition('.')[0]}.{name.rpartition('.')[2]}": builder
    for name, builder in DATASETS.items()
}
"""The same builders by the names that AutoModel's packages llm and vlm export, without the module."""


def dataset(section: Section) -> None:
    """Translate a data set of AutoModel. Other builders, such as the user's own code, stay as they are."""
    node = section.peek("_target_")
    if node is None or not is_of_automodel(str(node.value)):
        return
    section.take("_target_")
    name = str(node.value).removeprefix(_DATASETS)
    builder = DATASETS.get(name) or _IN_PACKAGES.get(name)
    if builder is None:
        section.reject("_target_", node, "this data set is not supported", OTHER_DATA)
        # Its arguments would all be reported as unknown keys.
        for each in section.names():
            section.take(each)
        return
    if builder.ours == _CHAT and section.work.has_images:
        builder = Builder("data.vlm.conversations", _CONVERSATION_WITHOUT_IMAGES)
    ours = replace(node, value=f"automodel_ckpt.{builder.ours}")
    section.put("_target_", ours)
    for key, value in builder.fixed.items():
        is_text = not value.isdecimal() and value not in ("true", "false")
        section.put(key, Node(value, node.origin, quoted=is_text))
    section.apply(builder.table, steps.STEPS)


def validation(section: Section) -> None:
    """Translate the validation data: one set, or further ones with names after ``validation_dataset_``."""
    dataset(section)
    root = section.work.section("")
    for name in root.names():
        label = name.removeprefix("validation_dataset_")
        if label == name:
            continue
        named = root.inner(name, to=f"validation_datasets.{label}")
        if named.node is None:
            root.take(name)
            continue
        dataset(named)
        # The user's own builder moves as it is.
        for key in named.names():
            named.rename(key)
