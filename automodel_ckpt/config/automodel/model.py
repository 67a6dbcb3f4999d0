"""The model of NeMo AutoModel's recipes: ``model``, ``freeze_config``, ``peft`` and ``quantization``."""

from __future__ import annotations

import re
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Degraded,
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    above_1,
    apply_rows,
    is_of_automodel,
    is_true,
    switch,
    take_target,
    value_of,
)
from automodel_ckpt.config.yaml_tree import Node

DTYPES = {
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp16": "float16",
    "torch.float16": "float16",
    "fp32": "float32",
    "torch.float32": "float32",
}
"""AutoModel's names of data types -> ours. Others are the same."""
AUTO_CLASS = re.compile(
    r"(nemo_automodel|transformers)\.([\w.]*\.)?(NeMo)?AutoModelFor"
    r"(?P<task>CausalLM|ImageTextToText|MultimodalLM|SequenceClassification)\.(?P<method>from_pretrained|from_config)"
)
_CONFIG_CLASS = re.compile(r"(nemo_automodel|transformers)\.[\w.]+\.from_pretrained")
_ONE_MODEL = "use NeMoAutoModelForCausalLM or NeMoAutoModelForImageTextToText with from_pretrained"

_BACKENDS = ("te", "ffpa", "magi", "cudnn", "tilelang")
"""Attention implementations of AutoModel that transformers does not have."""

MODEL = (
    Key("torch_dtype", "dtype", words=DTYPES),
    Key("num_labels", where="classification.num_labels"),
    Degraded(
        "attn_implementation",
        "transformers does not have this attention; its default is used",
        when=lambda node: node.value in _BACKENDS,
    ),
    NoEffect(
        "backend",
        "use_liger_kernel",
        "use_sdpa_patching",
        "sdpa_method",
        "force_hf",
        "output_hidden_states",
        "kda_mode",
        "load_base_model",
        "text_config.use_cache",
        "text_config.output_hidden_states",
        "text_config.cp_full_attn_backend",
        "config.kda_mode",
        "config.kda_unpad_inputs",
        "config.kda_use_fused_gate",
        "config.kda_use_qk_l2norm_in_kernel",
        "config.architectures",
        "config.name_or_path",
        "config.use_cache",
        "config._attn_implementation",
        "config.attn_implementation_new",
    ),
)
"""Keys of the section model. The model's name and configuration are translated by :func:`name_of_model`."""

FREEZE = (
    ("freeze_vision_tower", "vision_tower", True),
    ("freeze_language_model", "language_model", False),
    ("freeze_embeddings", "*.embed_tokens.*", False),
    ("freeze_audio_tower", "*audio*", False),
    ("freeze_video_embedder", "*patch_generator.video_embedder*", False),
)
"""Keys of freeze_config: AutoModel's name, our pattern in model.freeze_if_present, and AutoModel's default."""

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
        when=lambda node: node.value != "kaiming",
    ),
    Degraded("moe_rank_scaling", "all layers get the same rank"),
)
"""Keys of the section peft. The layers are selected by :func:`adapted_layers`."""


def model(section: Section) -> None:
    """Translate the section model; a section with a ``_target_`` of the user's own code stays as it is."""
    target = section.peek("_target_")
    found = AUTO_CLASS.fullmatch(str(target.value)) if target is not None else None
    if target is not None and found is None:
        if is_of_automodel(str(target.value)):
            section.take("_target_")
            section.reject("_target_", target, "this model class is not supported", _ONE_MODEL)
        return
    if target is not None:
        section.take("_target_")
        section.translated("_target_", target, "recipe")
    _keep_attention(section)
    name_of_model(section, from_config=found is not None and found["method"] == "from_config")
    apply_rows(MODEL, section)
    if section.work.result.at("model.dtype") is None:
        section.put_default("dtype", "auto")
    remote_code(section)
    further_tokens(section)
    overrides(section)


def _keep_attention(section: Section) -> None:
    """Move an attention implementation that transformers has; the row of the table handles the others.

    ``sdpa`` is what transformers chooses for all models that support it. GPT-OSS has it in AutoModel only.
    """
    node = section.peek("attn_implementation")
    if node is None or node.value in _BACKENDS:
        return
    if node.value == "sdpa" and not node.is_flag:
        NoEffect("attn_implementation").apply(section)
    else:
        Key("attn_implementation").apply(section)


def name_of_model(section: Section, *, from_config: bool) -> None:
    """Translate the model's name, which is given in one of three places, and whether its weights are loaded."""
    has_weights = not from_config or is_true(section.peek("load_base_model"))
    to = "from_pretrained" if has_weights else "from_config"
    node = section.take("pretrained_model_name_or_path")
    if node is not None:
        section.put(to, node, was="pretrained_model_name_or_path")
        NoEffect("config._target_", "config.pretrained_model_name_or_path").apply(section)
        return
    config = section.peek("config")
    if config is None:
        return
    if isinstance(config.value, str):
        section.take("config")
        section.put(to, config, was="config")
        return
    inner = section.inner("config")
    node = inner.peek("_target_")
    target = take_target(inner)
    if node is not None:
        inner.translated("_target_", node, f"model.{to}")
    name = inner.take("pretrained_model_name_or_path")
    if name is not None and (not target or _CONFIG_CLASS.fullmatch(target)):
        section.put(to, name, was="config.pretrained_model_name_or_path")
    elif target:
        _config_class(section, target)


def _config_class(section: Section, target: str) -> None:
    """Translate a configuration that is written out: ``_target_`` is the class of a transformers configuration."""
    found = re.fullmatch(
        r"transformers\.models\.(?P<type>\w+)\.configuration_\w+\.\w+Config", target
    )
    config = section.take("config")
    assert config is not None
    if found is None:
        section.reject("config", config, f"the class {target} is not supported", _ONE_MODEL)
        return
    assert isinstance(config.value, dict)
    ours = replace(config, value={"model_type": Node(found["type"], config.origin)})
    dropped = ("_target_", "architectures", "use_cache", "name_or_path")
    for name, child in config.value.items():
        if name in dropped:
            section.no_effect(f"config.{name}", child)
        else:
            ours.value[name] = child  # type: ignore[index,call-overload]
    section.put("from_config", ours, was="config")


def remote_code(section: Section) -> None:
    """Translate the permission to run code of the model's repository, which also needs a flag here."""
    for name in ("trust_remote_code", "config.trust_remote_code"):
        node = section.take(name)
        ours = section.work.result.at("model.from_config")
        is_written_out = ours is not None and isinstance(ours.value, dict)
        is_given = section.work.result.at("model.trust_remote_code") is not None
        if is_true(node) and not is_written_out and not is_given:
            assert node is not None
            section.put("trust_remote_code", node, was=name)
        elif node is not None:
            section.no_effect(name, node)


MTP_DEPTHS = (
    "num_nextn_predict_layers",
    "config.num_nextn_predict_layers",
    "text_config.num_nextn_predict_layers",
    "text_config.mtp_num_hidden_layers",
    "text_config.num_mtp_modules",
)
"""AutoModel's keys for the number of further tokens that are predicted. The first one that is given counts."""
MTP = (
    *((name, "num_depths") for name in MTP_DEPTHS),
    ("mtp_loss_scaling_factor", "loss_scaling_factor"),
    ("mtp_use_repeated_layer", "repeat_layer"),
)
"""AutoModel's keys for multi-token prediction, and ours in model.mtp."""


def further_tokens(section: Section) -> None:
    """Translate multi-token prediction; 0 tokens is no such training, whatever the other keys are.

    Without a number, AutoModel and this program predict as many as the config of the base states.
    """
    given: list[tuple[str, str, Node]] = []
    for name, to in MTP:
        node = section.take(name)
        if node is not None:
            given.append((name, to, node))
    layout = section.take("text_config.mtp_expert_hf_layout")
    if layout is not None:
        # The names in the base's files show it.
        section.no_effect("text_config.mtp_expert_hf_layout", layout)
    numbers = [value_of(node) for _, to, node in given if to == "num_depths"]
    asks = {to for _, to, _ in given}
    if (numbers and not numbers[0]) or not asks & {"num_depths", "loss_scaling_factor"}:
        for name, _, node in given:
            section.no_effect(name, node)
        return
    blocking = _ranks_without_mtp(section)
    done: set[str] = set()
    for name, to, node in given:
        if to in done:
            section.no_effect(name, node)
        elif blocking:
            text = f"the model is trained without multi-token prediction, because of {blocking}"
            section.degraded(name, node, text)
        else:
            section.put(f"mtp.{to}", node, was=name)
        done.add(to)


def _ranks_without_mtp(section: Section) -> str:
    """The key of the device mesh that multi-token prediction cannot be combined with; empty without one."""
    for name in ("pp_size", "tp_size"):
        node = section.work.source.at(f"distributed.{name}")
        if node is not None and above_1(node):
            return f"distributed.{name}"
    return ""


def overrides(section: Section) -> None:
    """Translate changes of the model's configuration, which AutoModel takes in text_config and config."""
    text = section.inner("text_config", to="model.config_overrides.text_config")
    config = section.inner("config", to="model.config_overrides")
    for part in (text, config):
        if part.node is None:
            continue
        for name, node in list(part.node.children()):
            part.take(name)
            if node.is_null:
                continue
            part.put(name, node, was=name)


def freeze(section: Section) -> None:
    """Translate freeze_config to model.freeze_if_present. With adapters the whole base is frozen."""
    if section.work.recipe != "vlm_finetune" or section.node is None:
        return
    has_adapters = section.work.source.at("peft") is not None
    patterns = []
    given = []
    for name, pattern, default in FREEZE:
        node = section.take(name)
        if has_adapters or (node is not None and not is_true(node)):
            if node is not None:
                section.no_effect(name, node)
            continue
        if node is not None:
            given.append(name)
        if node is not None and name == "freeze_embeddings":
            section.note(name, node, "frozen here; AutoModel ignores this key")
        if node is not None or default:
            origin = AUTOMODEL_DEFAULT if node is None else node.origin
            patterns.append(Node(pattern, origin, quoted=True))
    if not patterns:
        return
    origin = section.origin
    ours = section.work.section("freeze_config", "model")
    ours.put("freeze_if_present", Node(patterns, origin), was=", ".join(given))


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
        section.put("exclude_modules", _as_list(excluded), was="exclude_modules")


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
    ("model", Steps(model)),
    ("peft", Steps(adapters)),
    ("freeze_config", Steps(freeze)),
    ("quantization", Steps(quantization)),
)
