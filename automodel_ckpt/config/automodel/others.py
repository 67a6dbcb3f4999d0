"""The other sections of NeMo AutoModel's recipes: seed, checkpoints, trackers, and tools around the training."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_ckpt.config.automodel.rows import (
    Degraded,
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    above_1,
    apply_rows,
    switch,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

CHECKPOINT = (
    Key("enabled"),
    Key("checkpoint_dir"),
    Key("save_consolidated"),
    Key("is_async"),
    Key("restore_from"),
    Key("max_recent_checkpoints", "keep_last"),
    NoEffect(
        "staging_dir",
        "dequantize_base_checkpoint",
        "single_rank_consolidation",
        "v4_compatible",
        "diffusers_compatible",
        "consolidation_timeout_minutes",
        "cpu_offload",
        "wait_for_staging",
        "model_cache_dir",
        "model_repo_id",
        "original_model_root_dir",
        "skip_task_head_prefixes_for_base_model",
        "allow_legacy_pickle_restore",
        "load_base_model",
    ),
    Needs(
        "legacy_paramwrapper_layout",
        "the layout of adapters on experts before peft 0.19.1",
        "remove the key, and load the adapters with peft 0.19.1 or later",
    ),
)
_SAVED_HERE = (
    "checkpoints of this program are found by this name; import AutoModel's with ckpt import first"
)


def checkpoint(section: Section) -> None:
    """Translate the section checkpoint. Adapters are always saved as safetensors, as in AutoModel."""
    if section.node is None:
        return
    restored = section.peek("restore_from")
    if restored is not None:
        section.note("restore_from", restored, _SAVED_HERE)
    saved = section.take("model_save_format")
    if saved is not None and saved.value == "torch_save" and section.work.result.at("peft"):
        section.degraded("model_save_format", saved, "adapters are saved as safetensors")
    elif saved is not None:
        section.put("model_save_format", saved, was="model_save_format")
    metric = section.take("best_metric_key")
    if metric is not None:
        words = {"default": "val_loss"}
        value = words.get(str(metric.value), str(metric.value))
        section.put("best_metric_key", Node(value, metric.origin), was="best_metric_key")
    apply_rows(CHECKPOINT, section)


def seed(section: Section) -> None:
    """Translate the seed. AutoModel's recipes read ``seed`` and ignore ``rng.seed``."""
    given = section.take("seed")
    if given is not None:
        section.put("seed", given)
    rng = section.inner("rng", to="")
    other = rng.peek("seed")
    if other is not None and given is None:
        section.note("rng.seed", other, "used as seed; AutoModel reads only seed, and would use 42")
        rng.put("seed", other)
        rng.take("seed")
    apply_rows((NoEffect("_target_", "seed", "ranked"), Key("deterministic")), rng)


def trackers(section: Section) -> None:
    """Translate the experiment trackers."""
    wandb = section.inner("wandb", to="logging.trackers.wandb")
    if wandb.node is not None:
        enabled = not wandb.has("enable") or switch(wandb, "enable")
        NoEffect("enable").apply(wandb)
        _tracker(wandb, {}, enabled=enabled)
    mlflow = section.inner("mlflow", to="logging.trackers.mlflow")
    if mlflow.node is not None:
        apply_rows(
            (NoEffect("resume", "flatten_depth", "description", "artifact_location"),), mlflow
        )
        _tracker(mlflow, {"experiment_name": "experiment"}, enabled=True)
    _logged_steps(section.work.section("step_scheduler", "logging"))


def _logged_steps(section: Section) -> None:
    """Translate which steps the trackers get. Without a tracker, the key has no effect in AutoModel."""
    name = "log_remote_every_steps"
    node = section.take(name, is_ours=False)
    if node is None:
        return
    has_trackers = section.work.result.at("logging.trackers") is not None
    if has_trackers and above_1(node):
        section.put("log_every_steps", node, was=name)
    else:
        section.no_effect(name, node)


def _tracker(section: Section, names: dict[str, str], *, enabled: bool) -> None:
    """Move the options of a tracker; one that is not enabled is left out."""
    assert section.node is not None
    for name, node in list(section.node.children()):
        if not enabled:
            section.take(name)
            section.no_effect(name, node)
        else:
            Key(name, names.get(name, "")).apply(section)
    if enabled and section.work.result.at(section.to) is None:
        section.work.section("").put(section.to, Node({}, section.origin))


def neftune(section: Section) -> None:
    """Translate the noise on embeddings: a section with noise_alpha, or a number."""
    node = section.work.section("").peek("neftune")
    if node is None:
        return
    model = section.work.section("neftune", "model")
    if isinstance(node.value, str):
        section.work.section("").take("neftune")
        model.put("neftune_alpha", _alpha(node))
        section.work.section("").translated("neftune", node, "model.neftune_alpha")
        return
    given = model.take("noise_alpha")
    if given is not None:
        model.put("neftune_alpha", _alpha(given), was="noise_alpha")
    else:
        section.work.section("").translated("neftune", node, "model.neftune_alpha")
        model.put_default("neftune_alpha", "5.0")
    NoEffect("enabled").apply(model)


def _alpha(node: Node) -> Node:
    """AutoModel's 0 disables the noise, which is null here."""
    if value_of(node) == 0:
        return Node("null", node.origin)
    return node


LAUNCH = "start the ranks as docs/guides/multi-node.md describes"
UNUSED = NoEffect(
    "autocast",
    "ci",
    "nvtx",
    "prewarm",
    "longalign",
    "parallelizer",
    "parallelize_fn",
    "moe_config",
    "autopipeline",
    "distributed_config",
    "moe_metrics",
    "mfu",
    "sdpa_method",
)
REPLACED = (
    Degraded("skypilot", LAUNCH),
    Degraded("nemo_run", LAUNCH),
    Degraded("tool_call_eval", "run `ckpt eval` with a task of lm_eval on the checkpoints"),
    Degraded("slurm", LAUNCH),
    Needs(
        "embedding_row_repair",
        "repair of embedding rows",
        "remove the section, or repair the rows in the files of the base, and train those",
    ),
    Needs(
        "domain_mixture",
        "a weight of the loss for each domain",
        "remove the section; shares of the samples: automodel_ckpt.data.mixture.mixture (docs/guides/your-data.md)",
    ),
    Needs("comet", "the tracker Comet", "use wandb, mlflow, tensorboard or trackio"),
)
"""Whole sections."""
NAMES = (*UNUSED.names, *(row.name for row in REPLACED))


QAT = (
    Key(
        "quantizer_type",
        where="qat.scheme",
        words={"int8_dynact_int4weight": "W4A8", "int4_weight_only": "W4A16"},
        default="W4A8",
    ),
    # The default of both quantizers in torchao/quantization/qat/linear.py.
    Key("groupsize", where="qat.group_size", default="256"),
    NoEffect("_target_", "precision", "scales_precision", "padding_allowed", "inner_k_tiles"),
)


def _enabled(section: Section, name: str, ours: Sequence[str]) -> Node | None:
    """Take the key enabled of AutoModel's section *name*; None if the section is disabled, or is one of ours.

    It is ours if it has one of the keys *ours* and no key enabled. A disabled section is dropped.
    """
    if section.node is None:
        return None
    has_ours = any(section.has(key) for key in ours)
    if has_ours and not section.has("enabled"):
        return None
    is_enabled = switch(section, "enabled")
    enabled = section.take("enabled")
    if is_enabled and enabled is not None:
        return enabled
    whole = section.work.section("").take(name)
    assert whole is not None
    section.work.section("").no_effect(name, whole)
    return None


def qat(section: Section) -> None:
    """Translate the section qat. AutoModel's quantizers are torchao's, and disabled without the key enabled."""
    enabled = _enabled(section, "qat", ("scheme", "group_size", "start_step"))
    if enabled is None:
        return
    note = "weights and inputs are rounded to the grid of compressed-tensors, which is symmetric"
    section.note("enabled", enabled, note)
    # Errors about the section are reported at this line.
    section.work.section("").put("qat", Node({}, enabled.origin))
    Key("fake_quant_after_n_steps", "start_step").apply(section)
    hint = "set qat_config.quantizer_type to int8_dynact_int4weight or int4_weight_only"
    Needs("quantizer", "a quantizer by its class", hint).apply(section)
    apply_rows(QAT, section.inner("qat_config"))


FP8 = (
    Key("recipe_name", "recipe"),
    Key("emulate"),
    Degraded("enable_fsdp_float8_all_gather", "weights are gathered in the dtype of products"),
    NoEffect("precompute_float8_dynamic_scale_for_fsdp", "force_recompute_fp8_weight_in_bwd"),
)


def fp8(section: Section) -> None:
    """Translate the section fp8, which is disabled without the key enabled. Names to exclude are parts of names."""
    enabled = _enabled(section, "fp8", ("recipe", "exclude"))
    if enabled is None:
        return
    # Errors about the section are reported at this line.
    section.work.section("").put("fp8", Node({}, enabled.origin))
    section.translated("enabled", enabled, "fp8")
    apply_rows(FP8, section)
    excluded = section.take("filter_fqns")
    if excluded is None:
        return
    if isinstance(excluded.value, list):
        patterns = [Node(f"*{each.value}*", each.origin) for each in excluded.value]
        excluded = Node(patterns, excluded.origin)
    section.put("exclude", excluded, was="filter_fqns")


def top_level(section: Section) -> None:
    """Translate sections as a whole. AutoModel ignores sections whose names begin with an underscore."""
    apply_rows((UNUSED, *REPLACED), section)
    assert section.node is not None
    for name in list(dict(section.node.children())):
        if name.startswith("_"):
            NoEffect(name).apply(section)


ROWS = (
    ("checkpoint", Steps(checkpoint)),
    ("qat", Steps(qat)),
    ("fp8", Steps(fp8)),
    ("", Steps(seed)),
    ("", Steps(trackers)),
    ("neftune", Steps(neftune)),
    ("", Steps(top_level)),
)
