"""Text embeddings and rerankers in NeMo AutoModel's recipes: the model's output, the negatives, and the texts.

Facts are from ``recipes/retrieval/train_bi_encoder.py``, ``_transformers/retrieval.py`` and
``components/datasets/llm/retrieval_collator.py``.
"""

from __future__ import annotations

import re
from dataclasses import replace

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
    is_enabled,
    is_true,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

CLASS = "TrainBiEncoderRecipe"
RERANKER = "TrainCrossEncoderRecipe"
_MODEL = re.compile(r"nemo_automodel\.([\w.]+\.)?NeMoAutoModel(Bi|Cross)Encoder\.from_pretrained")
_COLLATOR = re.compile(
    r"nemo_automodel\.components\.datasets\.llm\.(retrieval_collator\.)?(?P<name>\w+)"
)
_PAIR_COLLATORS = ("BiEncoderCollator", "RetrievalBiencoderCollator")
"""The second name is that of the releases up to 0.3."""
_IMAGE_COLLATORS = ("ProcessorMethodCollator", "make_vision_collator_from_processor_method")
_POOLINGS = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last"}
_TEXT_ONLY = "embeddings of images are not supported"
_GRADIENTS = "documents of other ranks get gradients, too"
_TEMPLATE = "question:{query} \n \n passage:{passage}"
"""What AutoModel writes of a query and a document without a template."""
_NAMES = {"{query}": "{{ query }}", "{passage}": "{{ document }}"}
_SCORED_AT = "the score is computed at the last token, as transformers does it"

EXTRACTED = Needs(
    "extract_submodel",
    "a part of a vision-language model",
    "save it with transformers (AutoModel.from_pretrained(NAME).language_model.save_pretrained(DIRECTORY)), and name "
    "the directory in pretrained_model_name_or_path",
)
MODEL: tuple[Row, ...] = (
    Key("l2_normalize", where="embedding.normalize"),
    EXTRACTED,
    Key("do_gradient_checkpointing", where="model.activation_checkpointing"),
    Needs(
        "share_encoder",
        "a separate encoder for documents",
        "remove the key: both kinds of text share the encoder",
        when=lambda node: not is_true(node),
    ),
    Needs(
        "add_linear_pooler",
        "a linear layer after the pooling",
        "remove the key, or use a model whose class has such a layer",
    ),
    NoEffect("out_dimension", "train_n_passages", "eval_negative_size"),
)
RERANKER_MODEL: tuple[Row, ...] = (
    Key("temperature", where="reranker.temperature"),
    EXTRACTED,
    Degraded("pooling", _SCORED_AT, when=lambda node: node.value != "last"),
)


def _is_embedding(section: Section) -> bool:
    return section.work.their_class == CLASS


def _is_reranker(section: Section) -> bool:
    return section.work.their_class == RERANKER


def model(section: Section) -> None:
    """Translate how the model makes embeddings, and what they are trained with."""
    if not _is_embedding(section) and not _is_reranker(section):
        return
    target = section.peek("_target_")
    if target is not None and _MODEL.fullmatch(str(target.value)):
        section.take("_target_")
        section.translated("_target_", target, "recipe")
    ours = replace(section, to=section.work.recipe)
    # AutoModel makes the attention of decoders bidirectional; for scores, that of Llama.
    causal = section.take("is_causal")
    if causal is None:
        ours.put_default("attention", "bidirectional")
    else:
        word = "model" if is_true(causal) else "bidirectional"
        ours.put("attention", replace(causal, value=word), was="is_causal")
    if _is_reranker(section):
        _one_label(section)
        apply_rows(RERANKER_MODEL, section)
        return
    _pooling(ours)
    _negatives(ours)
    _temperature(section.work.section("", "embedding"), section.peek("l2_normalize"))
    apply_rows(MODEL, section)


def _one_label(section: Section) -> None:
    node = section.take("num_labels")
    if node is not None and value_of(node) != 1:
        section.reject("num_labels", node, "a reranker computes one score", "set num_labels: 1")
    elif node is not None:
        section.no_effect("num_labels", node)


def _pooling(section: Section) -> None:
    node = section.take("pooling")
    if node is None:
        return
    known = _POOLINGS.get(str(node.value))
    if known is None:
        section.reject("pooling", node, "this pooling is not supported", "use avg, cls or last")
    else:
        section.put("pooling", replace(node, value=known), was="pooling")


def _negatives(section: Section) -> None:
    """Without the documents of all ranks, each query has only its own ones, and equal texts are not left out."""
    is_shared = section.take("do_distributed_inbatch_negative")
    detached = Degraded("detach_distributed_inbatch_negatives", _GRADIENTS)
    if is_shared is not None and is_true(is_shared):
        name = "do_distributed_inbatch_negative"
        section.put("negatives", replace(is_shared, value="micro_batch"), was=name)
        if section.peek(detached.name) is None:
            section.degraded(name, Node({}, is_shared.origin), _GRADIENTS)
        detached.apply(section)
        return
    if is_shared is not None:
        section.put(
            "negatives", replace(is_shared, value="own"), was="do_distributed_inbatch_negative"
        )
    else:
        section.put_default("negatives", "own")
    section.put_default("hide_equal_texts", "false")
    NoEffect(detached.name).apply(section)


def _temperature(section: Section, normalize: Node | None) -> None:
    """Translate the temperature, by which AutoModel divides only scores of normalized embeddings."""
    given = section.take("temperature")
    is_divided = normalize is None or is_true(normalize)
    if given is not None and is_divided:
        section.put("temperature", given, was="temperature")
        return
    if given is not None:
        section.no_effect("temperature", given)
    section.put_default("temperature", "1.0")


def collators(section: Section) -> None:
    """Translate the collate functions of pairs: the lengths of texts, and the prompts before them."""
    if not _is_embedding(section) and not _is_reranker(section):
        return
    for name, data in (("dataloader", "dataset"), ("validation_dataloader", "validation_dataset")):
        is_training = name == "dataloader"
        loader = section.inner(name)
        collate = loader.inner("collate_fn", to=data)
        target = collate.peek("_target_")
        found = _COLLATOR.fullmatch(str(target.value)) if target is not None else None
        if target is None or found is None:
            continue
        if found["name"] in _PAIR_COLLATORS and _is_embedding(section):
            _pair_collator(collate, is_training=is_training)
        elif found["name"] == "CrossEncoderCollator" and _is_reranker(section):
            _joint_collator(collate, is_training=is_training)
        else:
            if found["name"] in _IMAGE_COLLATORS:
                collate.reject(
                    "_target_", target, _TEXT_ONLY, "use BiEncoderCollator, and a model of texts"
                )
                loader.take("collate_fn")
            continue
        multiple = collate.take("pad_to_multiple_of")
        if multiple is not None and is_training:
            loader.put("pad_to_multiple_of", multiple)
        if collate.node is not None and not collate.node.value:
            loader.take("collate_fn")


def _pair_collator(collate: Section, *, is_training: bool) -> None:
    """Translate the collator of queries and documents, each with an instruction before it or none."""
    has_instructions = is_true(collate.peek("use_dataset_instruction"))
    if not has_instructions:
        # The collator then ignores what the data set adds.
        data = collate.work.source.at(f"{collate.to}.use_dataset_instruction")
        if data is not None:
            data.value = "false"
    for name, prompt in (("query_prefix", "query_prompt"), ("passage_prefix", "document_prompt")):
        node = collate.take(name)
        if node is None:
            continue
        if has_instructions or not node.value or not is_training:
            collate.no_effect(name, node)
        else:
            text = Node(f"{node.value} ", node.origin, quoted=True)
            replace(collate, to="embedding").put(prompt, text, was=name)
    apply_rows(
        (
            Key("q_max_len", "query_length", default="512"),
            Key("p_max_len", "seq_length", default="512"),
            NoEffect("_target_", "padding", "use_dataset_instruction"),
        ),
        collate,
    )


def _joint_collator(collate: Section, *, is_training: bool) -> None:
    """Translate the collator of queries with documents, which has no instructions."""
    data = collate.work.source.at(f"{collate.to}.use_dataset_instruction")
    if data is not None:
        data.value = "false"
    given = collate.take("prompt_template")
    if is_training:
        template = given or Node(_TEMPLATE, AUTOMODEL_DEFAULT)
        text = re.sub(r"\{(query|passage)\}", lambda part: _NAMES[part[0]], str(template.value))
        replace(collate, to="reranker").put(
            "template", Node(text, template.origin, quoted=True), was="prompt_template"
        )
    elif given is not None:
        collate.no_effect("prompt_template", given)
    apply_rows(
        (Key("rerank_max_length", "seq_length"), NoEffect("_target_", "padding", "return_tensors")),
        collate,
    )


def _sources(section: Section) -> None:
    node = section.take("data_dir_list")
    if node is None:
        return
    if not isinstance(node.value, list):
        node = Node([node], node.origin)
    section.put("sources", node, was="data_dir_list")


def _num_negatives(section: Section) -> None:
    """Translate the documents per query: one is the right one. Other numbers are for validation data only."""
    kind = section.take("data_type")
    if kind is not None:
        section.no_effect("data_type", kind)
    passages = section.take("n_passages") or Node("5", AUTOMODEL_DEFAULT)
    other = section.take("eval_negative_size")
    if other is not None and kind is not None and kind.value == "eval":
        section.put("num_negatives", other, was="eval_negative_size")
        return
    if other is not None:
        section.no_effect("eval_negative_size", other)
    number = value_of(passages)
    if isinstance(number, int) and number >= 1:
        section.put("num_negatives", Node(str(number - 1), passages.origin), was="n_passages")
    else:
        section.reject("n_passages", passages, "must be a number above 0", "correct the value")


def _first_samples(section: Section) -> None:
    limit = section.take("max_train_samples")
    shuffled = section.take("do_shuffle")
    if limit is not None:
        section.put("max_samples", limit, was="max_train_samples")
    if shuffled is not None and limit is not None and is_true(shuffled):
        section.degraded("do_shuffle", shuffled, "the first max_train_samples rows are used")
    elif shuffled is not None:
        section.no_effect("do_shuffle", shuffled)


PAIRS: tuple[Row, ...] = (
    Steps(_sources, ("data_dir_list",)),
    Steps(_num_negatives, ("n_passages", "data_type", "eval_negative_size")),
    Steps(_first_samples, ("max_train_samples", "do_shuffle")),
    Key("seed"),
    Key("use_dataset_instruction", "instructions"),
    Needs(
        "cycle_positive_docs",
        "another document of a query in each epoch",
        "remove the key, or write a row for each document",
    ),
    Needs(
        "train_data_select_offset",
        "samples from the middle of the data",
        "remove the key, or write the rows to a file",
        when=is_enabled,
    ),
    NoEffect("model_type", "use_text_in_document"),
)
"""Rows for the data sets of pairs."""


def decay(section: Section) -> None:
    """Leave norms and biases without weight decay, as only these recipes of AutoModel do."""
    node = section.work.result.at("optimizer.no_decay")
    is_retrieval = _is_embedding(section) or _is_reranker(section)
    if is_retrieval and node is not None and node.origin == AUTOMODEL_DEFAULT:
        section.put("no_decay", replace(node, value="auto"))


ROWS = (("model", Steps(model)), ("", Steps(collators)))
"""Before the other sections, which do not know these classes."""
LAST_ROWS = (("optimizer", Steps(decay)),)
