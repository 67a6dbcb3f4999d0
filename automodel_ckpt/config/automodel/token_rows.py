"""Rows for the arguments of NeMo AutoModel's data sets of tokens: Megatron's indexed files and nanoGPT's files.

AutoModel's samples of N tokens have a label for the last one, too, and so N + 1 tokens here, which a model with a
context of N tokens would not accept. Samples of N tokens have N - 1 labels here, and each token is predicted once.
"""

from __future__ import annotations

from dataclasses import replace

from automodel_ckpt.config.automodel.dataset_rows import TOKENIZER
from automodel_ckpt.config.automodel.rows import (
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    is_true,
)
from automodel_ckpt.config.tree.yaml_tree import Node


def megatron_paths(section: Section) -> None:
    """Translate the prefixes of Megatron's files. Weights and separate files for each part have other builders."""
    node = section.peek("paths")
    if node is None:
        return
    given = node.value if isinstance(node.value, list) else [node]
    stored = next((each for each in given if "://" in str(each.value)), None)
    if stored is not None:
        section.take("paths")
        what = "reading tokens from object storage is not supported"
        section.reject("paths", stored, what, "copy the files first")
        return
    hint = ""
    if isinstance(node.value, dict):
        hint = "give each data section the paths of its part"
    elif isinstance(node.value, list) and any(_is_weight(each) for each in node.value):
        hint = "mix the files with automodel_ckpt.data.mixture.mixture and its weights"
    elif str(node.value).endswith(".json"):
        hint = "give the paths that this file lists"
    if hint:
        section.take("paths")
        section.reject("paths", node, "blends of Megatron's files are not supported", hint)
        return
    Key("paths", "path").apply(section)


def _is_weight(node: Node) -> bool:
    try:
        float(str(node.value))
    except ValueError:
        return False
    return True


def megatron_split(section: Section) -> None:
    """Translate the shares of the parts, and the part of this data section, whose samples can be limited."""
    shares = section.take("split")
    if shares is not None and isinstance(shares.value, list):
        listed = ", ".join(str(each.value) for each in shares.value)
        shares = replace(shares, value=listed)
    if shares is None:
        section.put_default("split", "900, 50, 50")
    else:
        section.put("split", replace(shares, quoted=True))
    part = section.take("splits_to_build")
    if part is not None:
        section.put("part", part, was="splits_to_build")
    if part is not None and part.value == "validation":
        Key("num_val_samples", "max_samples").apply(section)
    elif part is not None and part.value == "test":
        Key("num_test_samples", "max_samples").apply(section)
    NoEffect("num_train_samples", "num_val_samples", "num_test_samples").apply(section)


def nanogpt_start(section: Section) -> None:
    """Translate the token that samples begin with, which AutoModel uses with align_to_bos only."""
    align = section.take("align_to_bos")
    if is_true(align):
        assert align is not None
        section.translated("align_to_bos", align, "dataset.bos_token")
        Key("bos_token").apply(section)
        return
    if align is not None:
        section.no_effect("align_to_bos", align)
    NoEffect("bos_token").apply(section)


MEGATRON = (
    Steps(megatron_paths, ("paths",)),
    Steps(
        megatron_split,
        ("split", "splits_to_build", "num_train_samples", "num_val_samples", "num_test_samples"),
    ),
    Key("seq_length", default="2048"),
    Needs("object_storage_config", "reading tokens from object storage", "copy the files first"),
    NoEffect(
        "index_mapping_dir",
        "create_attention_mask",
        "seed",
        "num_dataset_builder_threads",
        "trainer_limit_val_batches",
        "trainer_limit_test_batches",
        "mmap_bin_files",
    ),
    TOKENIZER,
)
NANOGPT = (
    Key("file_pattern", "path"),
    Key("seq_len", "seq_length"),
    Steps(nanogpt_start, ("align_to_bos", "bos_token")),
    NoEffect("shuffle_files"),
    TOKENIZER,
)
