"""What NeMo AutoModel's recipes train of a model: ``peft``, ``freeze_config`` and ``quantization``."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Section,
    is_of_automodel,
    is_true,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

_FREEZE = (
    ("freeze_vision_tower", ("*vision*", "*visual*", "*image_encoder*"), True),
    ("freeze_language_model", ("*language*", "*text*", "*llm*"), False),
    ("freeze_embeddings", ("*.embed_tokens",), False),
    ("freeze_audio_tower", ("*audio*", "*speech*", "*sound*"), False),
    ("freeze_video_embedder", ("*patch_generator.video_embedder*",), False),
)
"""Keys of freeze_config: AutoModel's name, the names of the modules that it freezes, and AutoModel's default.

AutoModel freezes each module with such a word in its full name (``components/utils/model_utils.py``): with a vision
tower also its projector, where that has the word in its name, as in Qwen's ``visual.merger`` and Gemma's
``embed_vision``, and with the language model not the output layer.
"""
_TIED = (
    "frozen here, with an output layer that is tied to them; AutoModel ignores this key: set it to false to train "
    "them, as there"
)
_PEFT = """
- _target_ use_triton use_memory_efficient_lora
dim -> r
alpha = 32
dropout
use_dora
lora_dtype -> dtype @dtypes
~ dropout_position not in pre: dropout is applied to the input of the adapter
~ lora_A_init in xavier: peft's default initialization is used (Kaiming uniform for A, zeros for B)
~ moe_rank_scaling: all layers get the same rank
~ expert_weight_format not in unquantized: frozen experts keep the data type of the base
"""


def freeze(section: Section) -> None:
    """Translate freeze_config to model.freeze_if_present.

    With adapters the whole base is frozen. AutoModel freezes the adapters in these parts, too: here, their layers get
    none.
    """
    section.apply("""
        ! freeze_modules: freezing by selectors | write model.freeze: [GLOB, ...] in its place
        ! unfreeze_modules: freezing by selectors | write model.freeze: [GLOB, ...] in its place
    """)
    if not section.work.has_images or section.node is None:
        return
    has_adapters = section.theirs("peft") is not None
    if has_adapters:
        section.drop("freeze_embeddings")
    elif (node := section.peek("freeze_embeddings")) and is_true(node):
        section.note("freeze_embeddings", node, _TIED)
    suffix = "" if has_adapters else ".*"
    patterns = []
    given = []
    for name, modules, default in _FREEZE:
        origin = AUTOMODEL_DEFAULT
        if section.peek(name) is not None or not default:
            node = section.flag(name)
            if node is None:
                continue
            origin = node.origin
            given.append(name)
        patterns += [Node(f"{module}{suffix}", origin, quoted=True) for module in modules]
    if not has_adapters and _has_audio(section):
        # A parameter of Qwen2.5-Omni that its forward pass does not use; AutoModel removes it.
        patterns.append(Node("*.audio_bos_eos_token.*", AUTOMODEL_DEFAULT, quoted=True))
    if not patterns:
        return
    key = "model.freeze_if_present"
    if has_adapters:
        key = "peft.exclude_if_present"
        before = section.ours(key)
        known = before.value if before is not None and isinstance(before.value, list) else []
        patterns = list({str(node.value): node for node in [*known, *patterns]}.values())
    replace(section, to="").put(key, Node(patterns, section.origin))


def _has_audio(section: Section) -> bool:
    """Whether the data set of the recipe is one of AutoModel's with audio. It is translated after this section."""
    target = section.theirs("dataset._target_")
    return target is not None and ".datasets.audio." in str(target.value)


def adapters(section: Section) -> None:
    """Translate the section peft and the quantization of its base."""
    target = section.peek("_target_")
    if section.node is None or (target is not None and not is_of_automodel(str(target.value))):
        return
    _adapted_layers(section)
    section.apply(_PEFT)
    model = section.ours("model.from_config")
    if model is not None:
        # An adapter names its base: the random one is written to this directory.
        section.put("base_dir", Node("automodel_base", model.origin))


def _adapted_layers(section: Section) -> None:
    """Translate the selection of layers. AutoModel adapts ``*_proj`` if nothing selects them."""
    match_all = section.flag("match_all_linear")
    names = section.take("target_modules")
    excluded = section.take("exclude_modules")
    is_all = names is not None and [str(each.value) for each in _items(names)] == ["*"]
    if names is not None and is_all:
        _experts(section, names)
    if match_all is not None or is_all or (names is None and excluded is not None):
        selecting = match_all or names
        origin = AUTOMODEL_DEFAULT if selecting is None else selecting.origin
        section.put("target_modules", Node("all-linear", origin, quoted=True))
        name = "match_all_linear" if match_all else "target_modules" if names else "exclude_modules"
        _output_layer(section, name, selecting or excluded, excluded)
    elif names is not None:
        section.put("target_modules", _as_list(names))
    else:
        section.put("target_modules", Node([Node("*_proj", AUTOMODEL_DEFAULT, True)], ""))
    if excluded is not None:
        # AutoModel accepts patterns that match nothing; one list serves several models.
        section.put("exclude_if_present", _as_list(excluded))


def _output_layer(
    section: Section, name: str, selecting: Node | None, excluded: Node | None
) -> None:
    """Warn if AutoModel would also adapt the output layer, which is no part of all-linear here."""
    patterns = [str(node.value) for node in _items(excluded)] if excluded is not None else []
    is_excluded = any(fnmatch.fnmatchcase("lm_head", pattern) for pattern in patterns)
    if selecting is not None and not is_excluded:
        text = "the output layer gets no adapter; in AutoModel it gets one"
        section.degraded(name, Node({}, selecting.origin), text)


def _experts(section: Section, names: Node) -> None:
    """Adapt fused experts too, as AutoModel's pattern ``*`` does, unless another option excludes it."""
    if value_of(section.peek("dropout")) or section.is_on("use_dora"):
        text = "fused experts get no adapters, because of dropout or use_dora"
        section.degraded("target_modules", replace(names, value="'*'"), text)
        return
    section.put("target_parameters", Node("all-experts", names.origin))


def _items(node: Node) -> list[Node]:
    return node.value if isinstance(node.value, list) else [node]


def _as_list(node: Node) -> Node:
    """Make a list of a single name. The text of a flag with brackets is a list already."""
    if isinstance(node.value, str) and not node.value.startswith("["):
        return Node([replace(node, quoted=True)], node.origin)
    return node


def quantization(section: Section) -> None:
    """Translate the quantization of the base model (QLoRA) to peft.quantize_base."""
    if section.node is None:
        return
    kinds = {
        "load_in_4bit": section.peek("bnb_4bit_quant_type") or Node("fp4", AUTOMODEL_DEFAULT),
        "load_in_8bit": Node("int8", section.origin),
    }
    name = next((each for each in kinds if section.is_on(each)), "")
    node = section.take(name) if name else None
    if node is None:
        section.drop("bnb_4bit_use_double_quant")
    elif section.ours("peft") is not None:
        kind = kinds[name]
        origin = node.origin if name == "load_in_8bit" else kind.origin
        kind = replace(kind, origin=origin)
        section.work.section("quantization", "peft").put("quantize_base", kind)
    else:
        hint = "add a section peft (QLoRA), or remove the section"
        section.reject(name, node, "training of quantized weights is not supported", hint)
    section.apply("""
        - bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit
        ~ bnb_4bit_use_double_quant: the scales of quantized weights are not quantized
    """)
