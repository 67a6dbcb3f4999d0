"""What NeMo AutoModel's recipes train of a model: ``peft``, ``freeze_config`` and ``quantization``."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Degraded,
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    apply_rows,
    is_of_automodel,
    is_true,
    switch,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

FREEZE = (
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

PEFT = (
    NoEffect("_target_", "use_triton", "use_memory_efficient_lora"),
    Key("dim", "r"),
    Key("alpha", default="32"),
    Key("dropout"),
    Key("use_dora"),
    Key("lora_dtype", "dtype", words={"float32": "float32", "torch.float32": "float32"}),
    Degraded(
        "dropout_position",
        "dropout is applied to the input of the adapter",
        when=lambda node: node.value != "pre",
    ),
    Degraded(
        "lora_A_init",
        "peft's default initialization is used (Kaiming uniform for A, zeros for B)",
        when=lambda node: node.value == "xavier",
    ),
    Degraded("moe_rank_scaling", "all layers get the same rank"),
    Degraded(
        "expert_weight_format",
        "frozen experts keep the data type of the base",
        when=lambda node: node.value != "unquantized",
    ),
)
"""Keys of the section peft. The layers are selected by :func:`adapted_layers`."""


def _reject_selectors(section: Section) -> None:
    for name in ("freeze_modules", "unfreeze_modules"):
        node = section.take(name)
        if node is not None:
            what = "freezing by selectors is not supported"
            section.reject(name, node, what, "write model.freeze: [GLOB, ...] in its place")


def freeze(section: Section) -> None:
    """Translate freeze_config to model.freeze_if_present.

    With adapters the whole base is frozen. AutoModel freezes the adapters in these parts, too: here, their layers get
    none.
    """
    _reject_selectors(section)
    if not section.work.has_images or section.node is None:
        return
    has_adapters = section.work.source.at("peft") is not None
    patterns = []
    given = []
    for name, modules, default in FREEZE:
        node = section.take(name)
        if node is not None and (
            not is_true(node) or (has_adapters and name == "freeze_embeddings")
        ):
            section.no_effect(name, node)
            continue
        if node is None and not default:
            continue
        if node is not None:
            given.append(name)
        if node is not None and name == "freeze_embeddings":
            text = (
                "frozen here, with an output layer that is tied to them; AutoModel ignores this key: set it to false "
                "to train them, as there"
            )
            section.note(name, node, text)
        origin = AUTOMODEL_DEFAULT if node is None else node.origin
        for module in modules:
            pattern = module if has_adapters else f"{module}.*"
            patterns.append(Node(pattern, origin, quoted=True))
    if not has_adapters and _has_audio(section):
        # A parameter of Qwen2.5-Omni that its forward pass does not use; AutoModel removes it.
        patterns.append(Node("*.audio_bos_eos_token.*", AUTOMODEL_DEFAULT, quoted=True))
    if not patterns:
        return
    if has_adapters:
        _leave_out(section, patterns, given)
        return
    ours = section.work.section("freeze_config", "model")
    ours.put("freeze_if_present", Node(patterns, section.origin), was=", ".join(given))


def _has_audio(section: Section) -> bool:
    """Whether the data set of the recipe is one of AutoModel's with audio."""
    work = section.work
    # The section of the data set is translated before this one, or after it.
    sections = (work.source.at("dataset"), work.result.at("dataset"))
    return any(_builds_audio(each) for each in sections if each is not None)


def _builds_audio(node: Node) -> bool:
    """Whether a section, or one inside of it, names a builder of samples with audio."""
    if not isinstance(node.value, dict):
        return False
    target = node.value.get("_target_")
    name = "" if target is None else str(target.value)
    if ".datasets.audio." in name or name.endswith(".vlm.transcripts"):
        return True
    return any(_builds_audio(child) for child in node.value.values())


def _leave_out(section: Section, patterns: list[Node], given: list[str]) -> None:
    """Add patterns of frozen modules to the layers that get no adapters."""
    ours = section.work.section("freeze_config", "peft")
    before = section.work.result.at("peft.exclude_if_present")
    known: list[Node] = []
    if before is not None and isinstance(before.value, list):
        known = before.value
    names = {str(node.value) for node in known}
    added = [node for node in patterns if str(node.value) not in names]
    ours.put("exclude_if_present", Node([*known, *added], section.origin), was=", ".join(given))


def adapters(section: Section) -> None:
    """Translate the section peft and the quantization of its base."""
    if section.node is None:
        return
    target = section.peek("_target_")
    if target is not None and not is_of_automodel(str(target.value)):
        return
    adapted_layers(section)
    apply_rows(PEFT, section)
    model = section.work.result.at("model.from_config")
    if model is not None:
        # An adapter names its base: the random one is written to this directory.
        section.put("base_dir", Node("automodel_base", model.origin))


def adapted_layers(section: Section) -> None:
    """Translate the selection of layers. AutoModel adapts ``*_proj`` if nothing selects them."""
    match_all = section.take("match_all_linear")
    names = section.take("target_modules")
    excluded = section.take("exclude_modules")
    selects_all = is_true(match_all) or _selects_all(names)
    if names is not None and not selects_all:
        section.put("target_modules", _as_list(names), was="target_modules")
    elif selects_all or excluded is not None:
        if _selects_all(names):
            assert names is not None
            experts(section, names)
        chosen = match_all if is_true(match_all) else names
        origin = AUTOMODEL_DEFAULT if chosen is None else chosen.origin
        section.put("target_modules", Node("all-linear", origin, quoted=True))
    else:
        section.put("target_modules", Node([Node("*_proj", AUTOMODEL_DEFAULT, True)], ""))
    if match_all is not None:
        section.no_effect("match_all_linear", match_all)
    if excluded is not None:
        # AutoModel accepts patterns that match nothing; one list serves several models.
        section.put("exclude_if_present", _as_list(excluded), was="exclude_modules")
    if names is None or selects_all:
        _output_layer(section, match_all if is_true(match_all) else names, excluded)


def _output_layer(section: Section, selecting: Node | None, excluded: Node | None) -> None:
    """Warn if AutoModel would also adapt the output layer, which is no part of all-linear here."""
    listed = [] if excluded is None else _as_list(excluded).value
    patterns = [str(node.value) for node in listed] if isinstance(listed, list) else []
    if any(fnmatch.fnmatchcase("lm_head", pattern) for pattern in patterns):
        return
    node = selecting or excluded
    if node is not None:
        name = "exclude_modules"
        if selecting is not None:
            name = "match_all_linear" if is_true(selecting) else "target_modules"
        text = "the output layer gets no adapter; in AutoModel it gets one"
        section.degraded(name, Node({}, node.origin), text)


def experts(section: Section, names: Node) -> None:
    """Adapt fused experts too, as AutoModel's pattern ``*`` does, unless another option excludes it."""
    dropout = section.peek("dropout")
    has_dropout = dropout is not None and bool(value_of(dropout))
    if has_dropout or is_true(section.peek("use_dora")):
        shown = replace(names, value="'*'")
        text = "fused experts get no adapters, because of dropout or use_dora"
        section.degraded("target_modules", shown, text)
        return
    section.put("target_parameters", Node("all-experts", names.origin), was="target_modules")


def _selects_all(names: Node | None) -> bool:
    if names is None:
        return False
    words = [names.value]
    if isinstance(names.value, list):
        words = [item.value for item in names.value]
    return words == ["*"]


def _as_list(node: Node) -> Node:
    """Make a list of a single name. The text of a flag with brackets is a list already."""
    if isinstance(node.value, str) and not node.value.startswith("["):
        return Node([replace(node, quoted=True)], node.origin)
    return node


QUANTIZATION = (
    NoEffect("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type"),
    Degraded("bnb_4bit_use_double_quant", "the scales of quantized weights are not quantized"),
    NoEffect("load_in_4bit", "load_in_8bit"),
)


def quantization(section: Section) -> None:
    """Translate the quantization of the base model (QLoRA) to peft.quantize_base."""
    if section.node is None:
        return
    kind = None
    name = ""
    if switch(section, "load_in_4bit"):
        name = "load_in_4bit"
        kind = section.peek("bnb_4bit_quant_type") or Node("fp4", AUTOMODEL_DEFAULT)
    elif switch(section, "load_in_8bit"):
        name = "load_in_8bit"
        kind = Node("int8", section.origin_of(name))
    has_adapters = section.work.result.at("peft") is not None
    if kind is not None and has_adapters:
        section.work.section("quantization", "peft").put("quantize_base", kind, was=name)
        section.take(name)
    elif kind is not None:
        hint = "add a section peft (QLoRA), or remove the section"
        Needs("load_in_4bit", "training of quantized weights", hint, is_true).apply(section)
        Needs("load_in_8bit", "training of quantized weights", hint, is_true).apply(section)
    if kind is None:
        NoEffect("bnb_4bit_use_double_quant").apply(section)
    apply_rows(QUANTIZATION, section)


ROWS = (
    ("peft", Steps(adapters)),
    ("freeze_config", Steps(freeze)),
    ("quantization", Steps(quantization)),
)
