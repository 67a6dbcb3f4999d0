"""The other sections of NeMo AutoModel's recipes: seed, checkpoints, trackers, and tools around the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import Section, above_1, value_of
from automodel_ckpt.config.tree.yaml_tree import Node

_CHECKPOINT = """
enabled
checkpoint_dir
save_consolidated
is_async
restore_from
max_recent_checkpoints -> keep_last
best_metric_key @metrics
- staging_dir dequantize_base_checkpoint single_rank_consolidation v4_compatible diffusers_compatible
- consolidation_timeout_minutes cpu_offload wait_for_staging model_cache_dir model_repo_id original_model_root_dir
- skip_task_head_prefixes_for_base_model allow_legacy_pickle_restore load_base_model
! legacy_paramwrapper_layout: the layout of adapters on experts before peft 0.19.1 | remove the key, and load the \
adapters with peft 0.19.1 or later
"""
_SAVED_HERE = (
    "checkpoints of this program are found by this name; import AutoModel's with ckpt import first"
)
_LAUNCH = "start the ranks as docs/guides/multi-node.md describes"
UNUSED = (
    "autocast ci nvtx prewarm longalign parallelizer parallelize_fn moe_config autopipeline distributed_config "
    "moe_metrics mfu sdpa_method benchmark"
)
_WHOLE = f"""
- {UNUSED}
~ skypilot: {_LAUNCH}
~ nemo_run: {_LAUNCH}
~ slurm: {_LAUNCH}
~ tool_call_eval: run `ckpt eval` with a task of lm_eval on the checkpoints
! embedding_row_repair: repair of embedding rows | remove the section, or repair the rows in the files of the base
! domain_mixture: a weight of the loss for each domain | remove it; automodel_ckpt.data.mixture.mixture mixes samples
! comet: the tracker Comet | use wandb, mlflow, tensorboard or trackio
"""
"""Whole sections."""
WHOLE_SECTIONS = f"{UNUSED} skypilot nemo_run slurm tool_call_eval embedding_row_repair domain_mixture comet".split()


def checkpoint(section: Section) -> None:
    """Translate the section checkpoint. Adapters are always saved as safetensors, as in AutoModel."""
    restored = section.peek("restore_from")
    if restored is not None:
        section.note("restore_from", restored, _SAVED_HERE)
    name = "model_save_format"
    saved = section.peek(name)
    if saved is not None and saved.value == "torch_save" and section.ours("peft"):
        section.take(name)
        section.degraded(name, saved, "adapters are saved as safetensors")
    else:
        section.rename(name)
    section.apply(_CHECKPOINT)


def seed(section: Section) -> None:
    """Translate the seed. AutoModel's recipes read ``seed`` and ignore ``rng.seed``."""
    rng = section.inner("rng", to="")
    other = rng.peek("seed")
    if other is not None and section.peek("seed") is None:
        section.note("rng.seed", other, "used as seed; AutoModel reads only seed, and would use 42")
        rng.rename("seed")
    else:
        section.rename("seed")
    rng.apply("deterministic\n- _target_ seed ranked")


def trackers(section: Section) -> None:
    """Translate the experiment trackers."""
    wandb = section.inner("wandb", to="logging.trackers.wandb")
    if wandb.node is not None:
        enabled = wandb.get("enable") is None or wandb.is_on("enable")
        wandb.drop("enable")
        if enabled:
            _tracker(wandb)
        else:
            wandb.drop(*wandb.names())
    mlflow = section.inner("mlflow", to="logging.trackers.mlflow")
    if mlflow.node is not None:
        mlflow.apply("""
            - resume flatten_depth description artifact_location
            experiment_name -> experiment
        """)
        _tracker(mlflow)
    # Without a tracker, the key has no effect in AutoModel.
    steps = section.work.section("step_scheduler", "logging")
    name = "log_remote_every_steps"
    if section.ours("logging.trackers") is not None and above_1(steps.peek(name)):
        steps.rename(name, "log_every_steps")
    steps.drop(name)


def _tracker(section: Section) -> None:
    """Move the options of a tracker."""
    for name in section.names():
        section.rename(name)
    if section.ours(section.to) is None:
        section.put_root(section.to, Node({}, section.origin))


def neftune(section: Section) -> None:
    """Translate the noise on embeddings: a section with noise_alpha, or a number. AutoModel's 0 disables it."""
    root = section.work.section("")
    node = root.peek("neftune")
    if node is None:
        return
    model = section.work.section("neftune", "model")
    given = root.take("neftune") if isinstance(node.value, str) else model.take("noise_alpha")
    if given is None:
        model.put_default("neftune_alpha", "5.0")
    else:
        off = value_of(given) == 0
        model.put("neftune_alpha", Node("null", given.origin) if off else given)
    model.drop("enabled")


def _enabled(section: Section, ours: Sequence[str]) -> Node | None:
    """Take the key enabled of AutoModel's section. Returns None when the section is disabled, or is one of ours.

    It is ours if it has one of the keys *ours* and no key enabled. A disabled section is dropped.
    """
    if section.node is None:
        return None
    is_ours = any(section.get(key) is not None for key in ours)
    if is_ours and section.get("enabled") is None:
        return None
    is_on = section.is_on("enabled")
    enabled = section.take("enabled")
    if is_on and enabled is not None:
        # Errors about the section are reported at this line.
        section.put_root(section.to, Node({}, enabled.origin))
        return enabled
    section.work.section("").drop(section.path)
    return None


def qat(section: Section) -> None:
    """Translate the section qat. AutoModel's quantizers are torchao's, and disabled without the key enabled."""
    enabled = _enabled(section, ("scheme", "group_size", "start_step"))
    if enabled is None:
        return
    note = "weights and inputs are rounded to the grid of compressed-tensors, which is symmetric"
    section.note("enabled", enabled, note)
    section.apply("""
        fake_quant_after_n_steps -> start_step
        ! quantizer: a quantizer by its class | set qat_config.quantizer_type, such as int4_weight_only
    """)
    # The default of both quantizers in torchao/quantization/qat/linear.py.
    section.inner("qat_config").apply("""
        quantizer_type -> /qat.scheme @schemes = W4A8
        groupsize -> /qat.group_size = 256
        - _target_ precision scales_precision padding_allowed inner_k_tiles
    """)


def fp8(section: Section) -> None:
    """Translate the section fp8, which is disabled without the key enabled. Names to exclude are parts of names."""
    enabled = _enabled(section, ("recipe", "exclude"))
    if enabled is None:
        return
    section.apply("""
        recipe_name -> recipe
        emulate
        ~ enable_fsdp_float8_all_gather: weights are gathered in the dtype of products
        - precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd
    """)
    excluded = section.peek("filter_fqns")
    if excluded is not None and isinstance(excluded.value, list):
        excluded.value = [replace(each, value=f"*{each.value}*") for each in excluded.value]
    section.rename("filter_fqns", "exclude")


def top_level(section: Section) -> None:
    """Translate sections as a whole. AutoModel ignores sections with names that begin with an underscore."""
    section.apply(_WHOLE)
    section.drop(*[name for name in section.names() if name.startswith("_")])
