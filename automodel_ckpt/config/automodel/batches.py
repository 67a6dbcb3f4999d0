"""How NeMo AutoModel's recipes make batches: data loaders, collate functions, packing, tokenizer and processor."""

from __future__ import annotations

import re
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Section,
    is_of_automodel,
    is_true,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

EMPTY_THINKING = "<|channel>thought\n<channel|>"
"""What AutoModel writes before each answer for Gemma 4: a thinking channel without content."""
_COLLATORS = """
datasets.utils.default_collater
datasets.utils.seq_cls_collater
datasets.utils.packed_sequence_thd_collater
datasets.utils.packed_sequence_thd_collater_vlm
datasets.vlm.collate_fns.default_collate_fn
datasets.vlm.collate_fns.qwen2_5_collate_fn
datasets.vlm.collate_fns.qwen3_omni_collate_fn
datasets.vlm.collate_fns.llava_onevision_collate_fn
datasets.vlm.collate_fns.kimi_vl_collate_fn
datasets.vlm.collate_fns.kimi_k25_vl_collate_fn
datasets.vlm.collate_fns.nemotron_omni_collate_fn
datasets.vlm.collate_fns.gemma4_prefix_collate_fn
datasets.audio.collate_fns.qwen2_5_omni_asr_collate_fn
datasets.audio.collate_fns.qwen3_omni_asr_collate_fn
"""
"""Functions of AutoModel that ours replaces, which follows the processor; below nemo_automodel.components."""


def dataloader(section: Section) -> None:
    """Translate the data loader of the training data."""
    collator(section, "dataset")
    node = section.peek("batch_size")
    size = value_of(node)
    local = value_of(section.theirs("step_scheduler.local_batch_size"))
    if node is not None and isinstance(size, int) and size != (1 if local is None else local):
        # AutoModel computes the accumulation with the other size.
        section.take("batch_size")
        text = "step_scheduler.local_batch_size is used, so that steps have the global batch size"
        section.degraded("batch_size", node, text)
    section.apply("""
        shuffle
        num_workers
        drop_last
        - _target_ pin_memory persistent_workers prefetch_factor batch_size group_by_length
        - shuffle_buffer_size dataloader_type
    """)
    target = section.ours("dataset._target_")
    is_nanogpt = target is not None and str(target.value).endswith(".token_files.nanogpt")
    is_stream = is_nanogpt or is_true(section.ours("dataset.streaming"))
    if is_stream and section.ours("dataloader.shuffle") is None:
        # AutoModel does not shuffle data that are read in order unless the recipe says so.
        section.put_default("shuffle", "false")


def validation_dataloader(section: Section) -> None:
    """Translate the data loader of the validation data: only the maximum length has a meaning here."""
    collator(section, "validation_dataset")
    section.work.section("").drop("validation_dataloader")


def collator(section: Section, data: str) -> None:
    """Translate the collate function for the section *data*. AutoModel's are replaced by ours."""
    node = section.peek("collate_fn")
    if node is None:
        return
    target = node.at("_target_") or node
    name = str(target.value)
    if name == "torch.utils.data.default_collate":
        # For samples of one length, such as samples of token files. Ours needs no other one.
        section.drop("collate_fn")
        return
    if not is_of_automodel(name):
        return
    section.take("collate_fn")
    if name.removeprefix("nemo_automodel.components.") not in _COLLATORS.split():
        section.reject(
            "collate_fn",
            target,
            "this collate function is not supported",
            "remove collate_fn to use the processor's own conversion of text, images and audio",
        )
        return
    section.no_effect("collate_fn", node)
    ours = section.work.section(data)
    if name.endswith("gemma4_prefix_collate_fn"):
        _answer_prefix(ours, target.origin)
    divisor = node.at("pad_seq_len_divisible")
    if divisor is not None and data == "dataset":
        section.put("pad_to_multiple_of", divisor)
    limit = node.at("max_length")
    if limit is not None and section.ours(data) is not None:
        ours.put("seq_length", limit)
        policy = "skip" if is_true(node.at("drop_overlong")) else "right"
        ours.put("truncation", Node(policy, limit.origin))


def _answer_prefix(data: Section, origin: str) -> None:
    if data.ours(data.to) is not None:
        data.put("answer_prefix", Node(EMPTY_THINKING, origin, quoted=True))


_PACKING = """
packed_sequence_size -> size
pack_size -> size
- packing_strategy packing_format packing_ratio split_across_pack num_proc prepacked pretokenize collate_max_length
- balance_media_tokens attn_implementation drop_long_samples pad_to_multiple_of max_length enabled
~ max_packs: all packs are used; limit the samples instead (dataset.max_samples)
! post_tokenize_hook_fn: a function that changes samples | remove the key
"""


def packing(section: Section) -> None:
    """Translate sequence packing. A size of 0 disables it in AutoModel."""
    if section.node is None:
        return
    sizes = [section.peek(name) for name in ("packed_sequence_size", "pack_size")]
    if not any(value_of(size) for size in sizes):
        # Keys of ours, such as an override of packed_sequence.size, are not AutoModel's.
        section.drop(*[name for name in section.names() if name not in ("size", "strategy")])
        return
    if sizes[1] is not None:
        _image_packs(section)
    section.apply(_PACKING)


def _image_packs(section: Section) -> None:
    """Translate what packing of images does with long samples, and the text that it adds before answers."""
    data = section.work.section("dataset")
    if limit := section.take("max_length"):
        data.put("seq_length", limit)
    if drops := section.flag("drop_long_samples"):
        data.put("truncation", Node("skip", drops.origin))
    hook = section.peek("post_tokenize_hook_fn")
    if hook is not None and str(hook.value).endswith(".gemma4_inject_thinking_prefix"):
        section.drop("post_tokenize_hook_fn")
        _answer_prefix(data, hook.origin)


_NAME = "pretrained_model_name_or_path"


def tokenizer(section: Section) -> None:
    """Translate the section tokenizer. Settings need the tokenizer's class as ``_target_``."""
    if section.node is None or not _is_pretrained(section, "AutoTokenizer"):
        return
    name = _own_name(section)
    settings = [key for key, child in section.node.children() if not child.is_null]
    if not settings and name is not None:
        section.put("from_pretrained", name)
    name = name or name_of_model(section)
    if settings and name is not None:
        section.put("_target_", Node("transformers.AutoTokenizer.from_pretrained", name.origin))
        section.put(_NAME, name)
        for key in settings:
            section.rename(key)


def processor(section: Section) -> None:
    """Translate the section processor. The data sets have no videos, so their settings have no effect."""
    section.drop("video_processor")
    if section.node is None or not _is_pretrained(section, "AutoProcessor"):
        return
    name = _own_name(section)
    if name is not None:
        section.put("from_pretrained", name)
    for key in section.names():
        if key not in ("from_pretrained", "kwargs"):
            section.rename(key, f"kwargs.{key}")


def _is_pretrained(section: Section, auto_class: str) -> bool:
    """Remove the ``_target_`` of a tokenizer or processor that is read from files.

    AutoModel's own classes, such as its processors for MiniMax M3, Step 3.7 and Inkling, are in transformers. Returns
    False for another ``_target_``, such as the user's own code.
    """
    target = section.text("_target_")
    is_auto = re.fullmatch(rf"[\w.]*\.{auto_class}\.from_pretrained", target) is not None
    if target and not is_auto and not is_of_automodel(target):
        return False
    section.take("_target_")
    section.drop("trust_remote_code")
    return True


def _own_name(section: Section) -> Node | None:
    """Remove and return the name of a tokenizer or processor. Returns None when it is the model's.

    The model's own one also follows model.revision and model.trust_remote_code.
    """
    name = section.peek(_NAME)
    model = name_of_model(section)
    if name is not None and model is not None and name.value == model.value:
        section.drop(_NAME)
    return section.take(_NAME)


def name_of_model(section: Section) -> Node | None:
    """Return the name of the model, which its tokenizer and processor have if nothing else is given."""
    model = section.ours("model.from_pretrained")
    return None if model is None else replace(model, origin=AUTOMODEL_DEFAULT)
