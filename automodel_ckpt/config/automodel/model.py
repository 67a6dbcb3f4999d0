"""The section ``model`` of NeMo AutoModel's recipes."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    Degraded,
    Key,
    NoEffect,
    Section,
    Steps,
    above_1,
    apply_rows,
    is_enabled,
    is_of_automodel,
    is_true,
    take_target,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

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
    r"(?P<task>CausalLM|ImageTextToText|MultimodalLM|Seq2SeqLM|SequenceClassification)\.(?P<method>from_pretrained|from_config)"
)
_CONFIG_CLASS = re.compile(r"(nemo_automodel|transformers)\.[\w.]+\.from_pretrained")
_WRITTEN_OUT = re.compile(
    r"transformers\.(models\.(?P<type>\w+)\.configuration_\w+\.)?(?P<name>\w+Config)"
)
_GPT2 = "nemo_automodel.components.models.gpt2.build_gpt2_model"
_SIZES_OF_GPT2 = {
    "vocab_size": "50257",
    "n_positions": "2048",
    "n_embd": "768",
    "n_layer": "12",
    "n_head": "12",
}
"""The sizes that AutoModel's GPT-2 takes, with their defaults."""
_ONE_CONFIG = "use transformers.AutoConfig.from_pretrained, or a configuration class of transformers with its keys"
STUDENTS = ("distill", "vlm_distill")
"""Our recipes that distill a teacher."""
_ONE_MODEL = "use NeMoAutoModelForCausalLM or NeMoAutoModelForImageTextToText with from_pretrained"

_ROUTER_LOSS = (
    "the loss is computed over the experts of all layers together; AutoModel adds one loss per layer, each divided by "
    "the experts per token. For the same strength, multiply by layers / experts per token"
)
_ROUTING = "the router chooses experts by its weights; with random ones the load is nearly equal"
_NO_TE_FP8 = (
    "matrix products are computed in bfloat16; fp8.recipe computes those of linear layers in FP8"
)
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
        "cache_dir",
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


def model(section: Section) -> None:
    """Translate the section model; a section with a ``_target_`` of the user's own code stays as it is."""
    target = section.peek("_target_")
    if target is not None and target.value == _GPT2:
        _gpt2(section)
        return
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
    _dequantized(section)
    name_of_model(section, from_config=found is not None and found["method"] == "from_config")
    router_loss(section)
    _backend(section)
    apply_rows(MODEL, section)
    _default_dtype(section, from_config=found is not None and found["method"] == "from_config")
    remote_code(section)
    further_tokens(section)
    overrides(section)


def _backend(section: Section) -> None:
    """Warn of what AutoModel's layers compute differently. The rest of the section selects its kernels."""
    for name, text in (("fake_balanced_gate", _ROUTING), ("te_fp8", _NO_TE_FP8)):
        key = f"backend.{name}"
        node = section.peek(key)
        if node is not None and is_enabled(node):
            section.take(key)
            section.degraded(key, node, text)


def _default_dtype(section: Section, *, from_config: bool) -> None:
    """Write the data type of the weights where ``torch_dtype`` is missing or ``auto``.

    It is that of the files. A model of ``from_config`` is in bfloat16, and a student whose optimizer is one of torch in
    float32 (``components/optim/precision_warnings.py``, which only distillation calls).
    """
    given = section.work.result.at("model.dtype")
    if given is not None and (given.is_flag or given.value != "auto"):
        return
    source = section.work.source
    optimizer = source.at("optimizer._target_")
    is_of_torch = optimizer is not None and str(optimizer.value).startswith("torch.optim.")
    if section.work.recipe in STUDENTS and is_of_torch and source.at("peft") is None:
        # Null is float32, but frozen weights may keep the 16 bits of their files.
        section.put_default("dtype", "null")
    elif from_config:
        section.put_default("dtype", "bfloat16")
    elif given is None:
        section.put_default("dtype", "auto")


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


def _dequantized(section: Section) -> None:
    """Take the request to dequantize a base in FP8, which happens here whenever its weights are trained."""
    node = section.peek("quantization_config")
    if node is None or not is_true(section.peek("quantization_config.dequantize")):
        return
    section.take("quantization_config")
    section.no_effect("quantization_config", node)


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
    found = _WRITTEN_OUT.fullmatch(target)
    model_type = (found["type"] or _model_type(found["name"])) if found is not None else None
    config = section.take("config")
    assert config is not None
    if model_type is None:
        section.reject("config", config, f"the class {target} is not supported", _ONE_CONFIG)
        return
    assert isinstance(config.value, dict)
    ours = replace(config, value={"model_type": Node(model_type, config.origin)})
    dropped = ("_target_", "architectures", "use_cache", "name_or_path")
    for name, child in config.value.items():
        if name in dropped:
            section.no_effect(f"config.{name}", child)
        else:
            ours.value[name] = child  # type: ignore[index,call-overload]
    section.put("from_config", ours, was="config")


def _model_type(class_name: str) -> str | None:
    """The type of the models that a configuration class of transformers describes; None if there is no such class."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    if class_name not in auto.CONFIG_MAPPING_NAMES.values():
        return None
    config_class = getattr(importlib.import_module("transformers"), class_name)
    # Several types can share a class; this is the one that its models are saved with.
    return str(config_class.model_type)


def _gpt2(section: Section) -> None:
    """Translate AutoModel's GPT-2 to transformers' one with the same activation and dropout."""
    target = section.take("_target_")
    assert target is not None
    values = {"model_type": "gpt2", "activation_function": "gelu", "resid_pdrop": "0.0"}
    ours = Node({name: Node(value, target.origin) for name, value in values.items()}, target.origin)
    section.put("from_config", ours, was="_target_")
    section.note(
        "_target_",
        target,
        "the weights of a new model are drawn as transformers draws them for GPT-2: "
        "the last layer of each block's parts starts with smaller ones",
    )
    NoEffect("attn_implementation").apply(section)
    for name in ("bos_token_id", "eos_token_id"):
        Key(name, f"from_config.{name}").apply(section)
    length = section.take("n_ctx")
    if length is not None:
        NoEffect("n_positions").apply(section)
        section.put("from_config.n_positions", length, was="n_ctx")
    for name, default in _SIZES_OF_GPT2.items():
        node = section.take(name)
        if node is not None:
            section.put(f"from_config.{name}", node, was=name)
        elif section.work.result.at(f"model.from_config.{name}") is None:
            section.put_default(f"from_config.{name}", default)


def router_loss(section: Section) -> None:
    """Translate the coefficient of the load balancing loss, which transformers adds only if the config asks for it."""
    node = section.take("router_aux_loss_coef")
    if node is None:
        return
    section.put("config_overrides.router_aux_loss_coef", node, was="router_aux_loss_coef")
    if value_of(node) != 0:
        section.put("config_overrides.output_router_logits", Node("true", node.origin))
        section.put_default("router_aux_loss", "micro_batch")
        section.note("router_aux_loss_coef", node, _ROUTER_LOSS)


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


ROWS = (("model", Steps(model)),)
