"""What NeMo AutoModel's recipes train: ``model``, a teacher, ``peft``, ``freeze_config`` and ``quantization``."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Section,
    above_1,
    is_of_automodel,
    is_true,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

AUTO_CLASS = re.compile(
    r"(nemo_automodel|transformers)\.([\w.]*\.)?(NeMo)?AutoModelFor"
    r"(?P<task>CausalLM|ImageTextToText|MultimodalLM|Seq2SeqLM|SequenceClassification)\.(?P<method>from_pretrained|from_config)"
)
_CONFIG_CLASS = re.compile(r"(nemo_automodel|transformers)\.[\w.]+\.from_pretrained")
_WRITTEN_OUT = re.compile(r"transformers\.models\.(?P<type>\w+)\.configuration_\w+\.\w+Config")
_ONE_CONFIG = "use transformers.AutoConfig.from_pretrained, or transformers.models.TYPE.configuration_TYPE.NAMEConfig"
STUDENTS = ("distill", "vlm_distill")
"""Our recipes that distill a teacher."""
_ONE_MODEL = "use NeMoAutoModelForCausalLM or NeMoAutoModelForImageTextToText with from_pretrained"
_ROUTER_LOSS = (
    "the loss is computed over the experts of all layers together; AutoModel adds one loss per layer, each divided by "
    "the experts per token. For the same strength, multiply by layers / experts per token"
)
_MODEL = """
attn_implementation @attentions
torch_dtype -> dtype @dtypes
~ backend.fake_balanced_gate: the router chooses experts by its weights; with random ones, loads are nearly equal
~ backend.te_fp8: matrix products are computed in bfloat16; fp8.recipe computes those of linear layers in FP8
num_labels -> /classification.num_labels
- backend use_liger_kernel use_sdpa_patching sdpa_method force_hf output_hidden_states kda_mode
- load_base_model cache_dir text_config.use_cache text_config.output_hidden_states text_config.cp_full_attn_backend
- config.kda_mode config.kda_unpad_inputs config.kda_use_fused_gate config.kda_use_qk_l2norm_in_kernel
- config.architectures config.name_or_path config.use_cache config._attn_implementation config.attn_implementation_new
"""


def model(section: Section) -> None:
    """Translate the section model; a section with a ``_target_`` of the user's own code stays as it is."""
    target = section.peek("_target_")
    found = AUTO_CLASS.fullmatch(section.text("_target_"))
    if target is not None and found is None:
        if is_of_automodel(str(target.value)):
            section.take("_target_")
            section.reject("_target_", target, "this model class is not supported", _ONE_MODEL)
        return
    section.take("_target_")
    from_config = found is not None and found["method"] == "from_config"
    if section.is_on("quantization_config.dequantize"):
        # A base in FP8 is dequantized whenever its weights are trained.
        section.drop("quantization_config")
    _name(section, from_config=from_config)
    _router_loss(section)
    section.apply(_MODEL)
    _default_dtype(section, from_config=from_config)
    _remote_code(section)
    _further_tokens(section)
    for name, to in (
        ("text_config", "config_overrides.text_config"),
        ("config", "config_overrides"),
    ):
        part = section.inner(name, to=f"model.{to}")
        for key in part.names():
            part.rename(key)


def _default_dtype(section: Section, *, from_config: bool) -> None:
    """Write the data type of the weights where ``torch_dtype`` is missing or ``auto``.

    The default is the data type of the files. It is bfloat16 for a model of ``from_config``, and float32 for a student
    with an optimizer of torch (``components/optim/precision_warnings.py``, which only distillation calls).
    """
    given = section.ours("model.dtype")
    if given is not None and (given.is_flag or given.value != "auto"):
        return
    optimizer = section.theirs("optimizer._target_")
    is_of_torch = optimizer is not None and str(optimizer.value).startswith("torch.optim.")
    if section.work.recipe in STUDENTS and is_of_torch and section.theirs("peft") is None:
        # Null is float32, but frozen weights may keep the 16 bits of their files.
        section.put_default("dtype", "null")
    elif from_config:
        section.put_default("dtype", "bfloat16")
    elif given is None:
        section.put_default("dtype", "auto")


def _name(section: Section, *, from_config: bool) -> None:
    """Translate the model's name, which is given in one of three places, and whether its weights are loaded."""
    to = (
        "from_config" if from_config and not section.is_on("load_base_model") else "from_pretrained"
    )
    config, name = section.peek("config"), "pretrained_model_name_or_path"
    if section.peek(name) is not None:
        section.rename(name, to)
        section.drop("config._target_", f"config.{name}")
    elif config is not None and isinstance(config.value, str):
        section.rename("config", to)
    elif config is not None:
        target = section.text("config._target_")
        section.take("config._target_")
        given = section.take(f"config.{name}")
        if given is not None and (not target or _CONFIG_CLASS.fullmatch(target)):
            section.put(to, given)
        elif target:
            _config_class(section, target)


def _config_class(section: Section, target: str) -> None:
    """Translate a configuration that is written out: ``_target_`` is the class of a transformers configuration."""
    section.drop("config.architectures", "config.use_cache", "config.name_or_path")
    found, config = _WRITTEN_OUT.fullmatch(target), section.take("config")
    assert config is not None and isinstance(config.value, dict)
    if found is None:
        section.reject("config", config, f"the class {target} is not supported", _ONE_CONFIG)
        return
    values = {"model_type": Node(found["type"], config.origin), **config.value}
    section.put("from_config", replace(config, value=values))


def _router_loss(section: Section) -> None:
    """Translate the coefficient of the load balancing loss, which transformers adds only if the config asks for it."""
    name = "router_aux_loss_coef"
    node = section.peek(name)
    section.rename(name, f"config_overrides.{name}")
    if node is not None and value_of(node) != 0:
        section.put("config_overrides.output_router_logits", Node("true", node.origin))
        section.put_default("router_aux_loss", "micro_batch")
        section.note(name, node, _ROUTER_LOSS)


def _remote_code(section: Section) -> None:
    """Translate the permission to run code of the model's repository, which also needs a flag here."""
    ours = section.ours("model.from_config")
    is_written_out = ours is not None and isinstance(ours.value, dict)
    for name in ("trust_remote_code", "config.trust_remote_code"):
        if is_written_out or section.ours("model.trust_remote_code") is not None:
            section.drop(name)
        elif (node := section.flag(name)) is not None:
            section.put("trust_remote_code", node)


_MTP = {
    "num_nextn_predict_layers": "num_depths",
    "config.num_nextn_predict_layers": "num_depths",
    "text_config.num_nextn_predict_layers": "num_depths",
    "text_config.mtp_num_hidden_layers": "num_depths",
    "text_config.num_mtp_modules": "num_depths",
    "mtp_loss_scaling_factor": "loss_scaling_factor",
    "mtp_use_repeated_layer": "repeat_layer",
}
"""AutoModel's keys for multi-token prediction, and ours in model.mtp. The first of several that is given counts."""


def _further_tokens(section: Section) -> None:
    """Translate multi-token prediction; 0 tokens is no such training, whatever the other keys are.

    Without a number, AutoModel and this program predict as many as the config of the base states.
    """
    # The names in the base's files show the layout.
    section.drop("text_config.mtp_expert_hf_layout")
    first: dict[str, tuple[str, Node]] = {}
    for name, to in _MTP.items():
        if to in first:
            section.drop(name)
        elif (node := section.take(name)) is not None:
            first[to] = name, node
    is_used = "loss_scaling_factor" in first
    if "num_depths" in first:
        is_used = bool(value_of(first["num_depths"][1]))
    sizes = ("distributed.pp_size", "distributed.tp_size")
    blocking = [name for name in sizes if above_1(section.theirs(name))]
    for to, (name, node) in first.items():
        if not is_used:
            section.no_effect(name, node)
        elif blocking:
            text = f"the model is trained without multi-token prediction, because of {blocking[0]}"
            section.degraded(name, node, text)
        else:
            section.put(f"mtp.{to}", node)


_NOT_DISTILLED = (
    "! teacher_model: a teacher in this recipe | set recipe: KnowledgeDistillationRecipeForNextTokenPrediction or "
    "KnowledgeDistillationRecipeForVLM, or remove the section"
)


def teacher(section: Section) -> None:
    """Translate the model that is distilled."""
    if section.work.recipe not in STUDENTS:
        section.work.section("").apply(_NOT_DISTILLED)
        return
    section = section.work.section(section.path, "distill.teacher")
    found = AUTO_CLASS.fullmatch(section.text("_target_"))
    if found is not None and found["method"] == "from_pretrained":
        section.take("_target_")
    section.apply("""
        _target_
        pretrained_model_name_or_path -> from_pretrained
        torch_dtype -> dtype @dtypes = auto
        attn_implementation
        trust_remote_code
        revision
        - backend use_liger_kernel use_sdpa_patching sdpa_method force_hf
    """)


def divergence(section: Section) -> None:
    """Translate the divergence. AutoModel's class KDLoss is the forward one, which is the default here."""
    if section.work.recipe in STUDENTS:
        section = section.work.section(section.path, "distill")
        section.apply("""
            ! _target_ not in nemo_automodel.components.loss.kd_loss.KDLoss: this divergence | set distill.divergence
            temperature
            - ignore_index fp32_upcast chunk_size tp_group
        """)


def distillation(section: Section) -> None:
    """Translate the keys that are not in a section."""
    if section.work.recipe in STUDENTS:
        section.apply("""
            kd_ratio -> /distill.kd_ratio
            offload_teacher_model -> /distill.offload_teacher
            ~ separate_meshes: the teacher is shared over the ranks of the student
            ~ teacher_distributed: the teacher is shared over the ranks of the student
            - teacher_freeze_config
        """)


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
        section.reject(
            name,
            node,
            "training of quantized weights is not supported",
            "add a section peft (QLoRA), or remove the section",
        )
    section.apply("""
        - bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit
        ~ bnb_4bit_use_double_quant: the scales of quantized weights are not quantized
    """)
