"""Text embeddings and rerankers in NeMo AutoModel's recipes: the model's output, the negatives, and the texts.

Facts are from ``recipes/retrieval/train_bi_encoder.py``, ``_transformers/retrieval.py`` and
``components/datasets/llm/retrieval_collator.py``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Section,
    is_true,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

KINDS = ("embedding", "reranker")
"""Our recipes for which AutoModel has classes."""
_MODEL = re.compile(r"nemo_automodel\.([\w.]+\.)?NeMoAutoModel(Bi|Cross)Encoder\.from_pretrained")
_COLLATOR = re.compile(
    r"nemo_automodel\.components\.datasets\.llm\.(retrieval_collator\.)?(?P<name>\w+)"
)
_COLLATORS = {
    "BiEncoderCollator": "embedding",
    "RetrievalBiencoderCollator": "embedding",  # the name in releases up to 0.3
    "CrossEncoderCollator": "reranker",
}
_IMAGE_COLLATORS = ("ProcessorMethodCollator", "make_vision_collator_from_processor_method")
_POOLINGS = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last"}
_TEXT_ONLY = "embeddings of images are not supported"
_GRADIENTS = "documents of other ranks get gradients, too"
_TEMPLATE = "question:{query} \n \n passage:{passage}"
"""What AutoModel writes of a query and a document without a template."""
_NAMES = {"{query}": "{{ query }}", "{passage}": "{{ document }}"}
_EXTRACTED = (
    "! extract_submodel: a part of a vision-language model | save it with transformers "
    "(AutoModel.from_pretrained(NAME).language_model.save_pretrained(DIRECTORY)), and name the directory in "
    "pretrained_model_name_or_path"
)
_EMBEDDING_MODEL = f"""
l2_normalize -> /embedding.normalize
{_EXTRACTED}
do_gradient_checkpointing -> /model.activation_checkpointing
! share_encoder not in true True: a separate encoder for documents | remove the key: all texts share the encoder
! add_linear_pooler: a linear layer after the pooling | remove the key, or use a model whose class has such a layer
- out_dimension train_n_passages eval_negative_size
"""
_RERANKER_MODEL = f"""
temperature -> /reranker.temperature
{_EXTRACTED}
~ pooling not in last: the score is computed at the last token, as transformers does it
"""


def model(section: Section) -> None:
    """Translate how the model makes embeddings or scores, and what they are trained with."""
    recipe = section.work.recipe
    if recipe not in KINDS:
        return
    target = section.peek("_target_")
    if target is not None and _MODEL.fullmatch(str(target.value)):
        section.implied("_target_", "recipe")
    ours = replace(section, to=recipe)
    # AutoModel makes the attention of decoders bidirectional; for scores, that of Llama.
    causal = section.take("is_causal")
    if causal is None:
        ours.put_default("attention", "bidirectional")
    else:
        word = "model" if is_true(causal) else "bidirectional"
        ours.put("attention", replace(causal, value=word), was="is_causal")
    if recipe == "reranker":
        labels = section.peek("num_labels")
        if labels is not None and value_of(labels) != 1:
            hint = "set num_labels: 1"
            section.reject("num_labels", labels, "a reranker computes one score", hint)
        section.drop("num_labels")
        section.apply(_RERANKER_MODEL)
        return
    _pooling(ours)
    _negatives(ours)
    _temperature(section.work.section("", "embedding"), section.peek("l2_normalize"))
    section.apply(_EMBEDDING_MODEL)


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
    name, detached = "do_distributed_inbatch_negative", "detach_distributed_inbatch_negatives"
    is_shared = section.take(name)
    if is_shared is not None and is_true(is_shared):
        section.put("negatives", replace(is_shared, value="micro_batch"), was=name)
        section.degraded(name, Node({}, is_shared.origin), _GRADIENTS)
        section.drop(detached)
        return
    if is_shared is not None:
        section.put("negatives", replace(is_shared, value="own"), was=name)
    else:
        section.put_default("negatives", "own")
    section.put_default("hide_equal_texts", "false")
    section.drop(detached)


def _temperature(section: Section, normalize: Node | None) -> None:
    """Translate the temperature, by which AutoModel divides only scores of normalized embeddings."""
    if section.peek("temperature") is not None and (normalize is None or is_true(normalize)):
        section.rename("temperature")
        return
    section.drop("temperature")
    section.put_default("temperature", "1.0")


def collators(section: Section) -> None:
    """Translate the collate functions of pairs: the lengths of texts, and the prompts before them."""
    if section.work.recipe not in KINDS:
        return
    for name, data in (("dataloader", "dataset"), ("validation_dataloader", "validation_dataset")):
        is_training = name == "dataloader"
        loader = section.inner(name)
        collate = loader.inner("collate_fn", to=data)
        target = collate.peek("_target_")
        found = _COLLATOR.fullmatch(str(target.value)) if target is not None else None
        if target is None or found is None:
            continue
        if _COLLATORS.get(found["name"]) != section.work.recipe:
            if found["name"] in _IMAGE_COLLATORS:
                hint = "use BiEncoderCollator, and a model of texts"
                collate.reject("_target_", target, _TEXT_ONLY, hint)
                loader.take("collate_fn")
            continue
        if section.work.recipe == "embedding":
            _pair_collator(collate, is_training=is_training)
        else:
            _joint_collator(collate, is_training=is_training)
        multiple = collate.take("pad_to_multiple_of")
        if multiple is not None and is_training:
            loader.put("pad_to_multiple_of", multiple)
        if collate.node is not None and not collate.node.value:
            loader.take("collate_fn")


def _pair_collator(collate: Section, *, is_training: bool) -> None:
    """Translate the collator of queries and documents, each with an instruction before it or none."""
    has_instructions = is_true(collate.peek("use_dataset_instruction"))
    if not has_instructions:
        _ignore_instructions(collate)
    for name, prompt in (("query_prefix", "query_prompt"), ("passage_prefix", "document_prompt")):
        node = collate.peek(name)
        if node is not None and not has_instructions and node.value and is_training:
            collate.take(name)
            text = Node(f"{node.value} ", node.origin, quoted=True)
            replace(collate, to="embedding").put(prompt, text, was=name)
        collate.drop(name)
    collate.apply("""
        q_max_len -> query_length = 512
        p_max_len -> seq_length = 512
        - _target_ padding use_dataset_instruction
    """)


def _ignore_instructions(collate: Section) -> None:
    """The collator ignores what the data set adds."""
    data = collate.work.source.at(f"{collate.to}.use_dataset_instruction")
    if data is not None:
        data.value = "false"


def _joint_collator(collate: Section, *, is_training: bool) -> None:
    """Translate the collator of queries with documents, which has no instructions."""
    _ignore_instructions(collate)
    if is_training:
        template = collate.take("prompt_template") or Node(_TEMPLATE, AUTOMODEL_DEFAULT)
        text = re.sub(r"\{(query|passage)\}", lambda part: _NAMES[part[0]], str(template.value))
        node = Node(text, template.origin, quoted=True)
        replace(collate, to="reranker").put("template", node, was="prompt_template")
    collate.apply(
        "rerank_max_length -> seq_length\n- prompt_template _target_ padding return_tensors"
    )


def decay(section: Section) -> None:
    """Leave norms and biases without weight decay, as only these recipes of AutoModel do."""
    node = section.work.result.at("optimizer.no_decay")
    if section.work.recipe in KINDS and node is not None and node.origin == AUTOMODEL_DEFAULT:
        section.put("no_decay", replace(node, value="auto"))
