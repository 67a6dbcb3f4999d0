"""Recipes of NeMo AutoModel's earlier releases, brought into the form of the newest one.

:func:`modernize` renames and moves keys, so that the tables of the other modules know one form. Facts are from the
examples and the source of the releases 0.1.2 to 0.5.0. Until 0.2, ``distributed._target_`` named a manager class, and
the sections ``autopipeline`` and ``parallelizer`` had what is in ``distributed`` now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from automodel_ckpt.config.automodel import benchmark, retrieval
from automodel_ckpt.config.automodel.rows import is_of_automodel, is_true, put
from automodel_ckpt.config.tree.yaml_tree import Node

_MODELS = re.compile(
    r"(nemo_automodel\.components\.models\.[\w.]+|transformers)\.\w+For(?P<task>CausalLM|ConditionalGeneration)"
    r"\.(?P<method>from_pretrained|from_config)"
)
"""Classes of one kind of model, which AutoModel's auto classes choose by the configuration."""
_BUILDERS = re.compile(r"nemo_automodel\.components\.models\.[\w.]+\.build_(llama|qwen2)_model")
_BI_ENCODER = re.compile(r"nemo_automodel\.([\w.]+\.)?NeMoAutoModelBiencoder\.(?P<method>\w+)")
_TASKS = {"CausalLM": "CausalLM", "ConditionalGeneration": "ImageTextToText"}
_QUANTIZERS = {
    "Int8DynActInt4WeightQATQuantizer": "int8_dynact_int4weight",
    "Int4WeightOnlyQATQuantizer": "int4_weight_only",
}
"""torchao's classes, and AutoModel's names for them."""
_MANAGERS = {
    "FSDP2Manager": "fsdp2",
    "MegatronFSDPManager": "megatron_fsdp",
    "DDPManager": "ddp",
}
"""Classes that ``distributed._target_`` named, and the strategies that replaced them."""
_VLM_CLASSES = ("ForImageTextToText", "ForConditionalGeneration", "ForMultimodalLM")
_VLM_DATA = (".datasets.vlm.", ".datasets.audio.")
_LOADERS = {"dataloader": "dataset", "validation_dataloader": "validation_dataset"}
_PIPELINE = "distributed.pipeline"
_CHECKPOINTING = "activation_checkpointing"
_PLACES_OF_CHECKPOINTING = ("parallelizer", "parallelize_fn", "autopipeline", _PIPELINE)


def class_without_recipe(root: Node) -> str | None:
    """Return the recipe class that a file without the key ``recipe`` is for; None if it is not AutoModel's.

    Before 2026, the script that read the file decided. Here, the classes of the model and the data decide.
    """
    model = _target(root, "model")
    if not model or not any(is_of_automodel(name) for name in _targets(root)):
        return None
    if "BiEncoder" in model or "Biencoder" in model:
        return retrieval.CLASS
    if "CrossEncoder" in model:
        return retrieval.RERANKER
    if "ForSequenceClassification" in model:
        return "TrainFinetuneRecipeForSequenceClassification"
    has_images = any(name in model for name in _VLM_CLASSES)
    has_images = has_images or any(name in _target(root, "dataset") for name in _VLM_DATA)
    if root.at("teacher_model") is not None:
        task = "VLM" if has_images else "NextTokenPrediction"
        return f"KnowledgeDistillationRecipeFor{task}"
    if has_images:
        return "FinetuneRecipeForVLM"
    if root.at("benchmark") is not None:
        return benchmark.CLASS
    return "TrainFinetuneRecipeForNextTokenPrediction"


def modernize(root: Node) -> None:
    """Change a tree in place. Nodes that are moved keep their origins."""
    model = root.at("model")
    if model is not None and isinstance(model.value, dict):
        _rename_class(model.value.get("_target_"))
        _rename(model, "t", root, "temperature")
    for loader, data in _LOADERS.items():
        section = root.at(loader)
        if section is not None:
            _rename(section, "dataset", root, data)
        _rename(root, f"{data}.train_n_passages", root, f"{data}.n_passages")
    manager = root.at("distributed._target_")
    if manager is not None:
        _name_strategy(root, manager)
        _move_parallelism(root)
    _rename_quantizer(root)


def _rename_class(target: Node | None) -> None:
    """Replace the class of one kind of model by the auto class that builds it."""
    if target is None:
        return
    name = str(target.value)
    if (found := _MODELS.fullmatch(name)) is not None:
        name = f"nemo_automodel.NeMoAutoModelFor{_TASKS[found['task']]}.{found['method']}"
    elif (found := _BI_ENCODER.fullmatch(name)) is not None:
        name = f"nemo_automodel.NeMoAutoModelBiEncoder.{found['method']}"
    elif _BUILDERS.fullmatch(name):
        name = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
    target.value = name


def _name_strategy(root: Node, manager: Node) -> None:
    strategy = _MANAGERS.get(str(manager.value).rpartition(".")[2])
    if strategy is not None and root.at("distributed.strategy") is None:
        put(root, "distributed.strategy", Node(strategy, manager.origin))


def _move_parallelism(root: Node) -> None:
    """Move the schedule of a pipeline and activation checkpointing to ``distributed``."""
    if root.at(_PIPELINE) is None:
        _rename(root, "autopipeline", root, _PIPELINE)
        _remove(root, f"{_PIPELINE}._target_")
    for place in _PLACES_OF_CHECKPOINTING:
        node = _remove(root, f"{place}.{_CHECKPOINTING}")
        if node is not None and is_true(node):
            put(root, f"distributed.{_CHECKPOINTING}", node)


def _rename_quantizer(root: Node) -> None:
    """Replace torchao's quantizer by AutoModel's configuration of it."""
    kind = _QUANTIZERS.get(_target(root, "qat.quantizer").rpartition(".")[2])
    if kind is None or root.at("qat.qat_config") is not None:
        return
    quantizer = _remove(root, "qat.quantizer")
    assert quantizer is not None
    target = _remove(quantizer, "_target_")
    assert target is not None
    put(root, "qat.qat_config", quantizer)
    put(root, "qat.qat_config.quantizer_type", Node(kind, target.origin))


def _targets(root: Node) -> Iterator[str]:
    for name in ("model", "dataset", "dataloader.dataset", "distributed", "loss_fn"):
        yield _target(root, name)


def _target(root: Node, section: str) -> str:
    """The ``_target_`` of a section; empty if it has none."""
    node = root.at(f"{section}._target_")
    return "" if node is None else str(node.value)


def _rename(section: Node, name: str, root: Node, to: str) -> None:
    """Move the node at a dotted *name* to *to*, unless that is given."""
    if section.at(name) is None or root.at(to) is not None:
        return
    node = _remove(section, name)
    assert node is not None
    put(root, to, node)


def _remove(root: Node, key: str) -> Node | None:
    """Remove and return the node at a dotted *key*; None if there is none."""
    parent, _, last = key.rpartition(".")
    section = root.at(parent) if parent else root
    if section is None or not isinstance(section.value, dict):
        return None
    return section.value.pop(last, None)
