"""Parallelism in NeMo AutoModel's recipes, the seed, checkpoints, trackers and tools around the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    DTYPES,
    Section,
    above_1,
    is_true,
    value_of,
)
from automodel_ckpt.config.tree.convert import FALSE_WORDS
from automodel_ckpt.config.tree.yaml_tree import Node

_STRATEGIES = {
    "fsdp2": "auto",
    "megatron_fsdp": "auto",
    "megatron-fsdp": "auto",
    "mfsdp": "auto",
    "ddp": "ddp",
}
"""AutoModel's strategies and ours."""
_SCHEDULES = ("1f1b", "gpipe")
"""Schedules of pipeline stages that both programs have."""
_UNDIVIDED = (
    "fsdp2 shards the model instead: only language models have stages; the same mathematics"
)
_PIPELINE_SIZES = (
    "pp_microbatch_size pp_batch_size pp_seq_len patch_causal_lm_model patch_inner_model"
)
_PIPELINE = f"""
- {_PIPELINE_SIZES} patch_stage_backward_maybe_with_nosync
~ module_fqns_per_model_part: layers are divided evenly; the same mathematics
~ pp_schedule_csv: the schedule of pp_schedule is used; the same mathematics
- scale_grads_in_schedule dtype pp_recv_buffer_pool pp_recv_buffer_pool_slack round_virtual_stages_to_pp_multiple
"""
# FSDP2: when weights are gathered, and a synchronization that our masks do not need. DDP: how gradients are reduced.
# Megatron FSDP is replaced by fsdp2.
_DISTRIBUTED = """
- _target_ dp_size defer_fsdp_grad_sync multimodal use_hf_tp_plan
tp_size
cp_size
dp_replicate_size
sequence_parallel
reshard_after_forward
- moe autocast_dtype activation_checkpointing_scope enable_async_tensor_parallel
- enable_fsdp2_prefetch fsdp2_forward_prefetch_depth fsdp2_backward_prefetch_depth patch_is_packed_sequence
- broadcast_buffers find_unused_parameters static_graph bucket_cap_mb gradient_as_bucket_view
- megatron_fsdp_unit_modules zero_dp_strategy init_fsdp_with_meta_device grad_reduce_in_fp32 preserve_fp32_weights
- overlap_grad_reduce overlap_param_gather check_for_nan_in_grad report_nan_in_param_grad average_in_collective
- disable_bucketing calculate_per_token_loss keep_fp8_transpose_cache nccl_ub fsdp_double_buffer
! tp_plan: a plan by name | write distributed.tp_plan._target_ (docs/guides/multi-gpu.md)
"""


def distributed(section: Section) -> None:
    """Translate the sizes of the device mesh, the strategy and the precision."""
    node = section.take("strategy")
    if node is not None:
        _strategy(section, node)
    _precision(section, is_ddp=node is not None and node.value == "ddp")
    _checkpointing(section)
    _compilation(section)
    offloaded = section.take("offload_policy")
    if offloaded is not None:
        section.put("cpu_offload", Node("true", offloaded.origin))
    _pipeline(section)
    section.apply(_DISTRIBUTED)
    _experts(section)


def _experts(section: Section) -> None:
    """Translate expert parallelism, which needs fsdp2 without tensor parallelism and adapters on experts here."""
    node = section.peek("ep_size")
    strategy = section.ours("distributed.strategy")
    text = ""
    if strategy is not None and strategy.value != "auto":
        text = "ddp replicates the experts; the same mathematics"
    elif section.ours("peft.target_parameters") or above_1(section.ours("distributed.tp_size")):
        text = "experts are sharded by fsdp2 instead; the same mathematics"
    if value_of(node) in (0, 1):
        section.drop("ep_size")
    elif node is not None and text:
        section.take("ep_size")
        section.degraded("ep_size", node, text)
    else:
        section.rename("ep_size")


def _strategy(section: Section, node: Node) -> None:
    name = str(node.value).lower()
    if name not in _STRATEGIES:
        section.reject(
            "strategy",
            node,
            "this strategy is not supported",
            f"use one of {', '.join(_STRATEGIES)}",
        )
        return
    if name not in ("fsdp2", "ddp"):
        section.degraded("strategy", node, "fsdp2 of torch is used; the same mathematics")
    section.put("strategy", Node(_STRATEGIES[name], node.origin))


def _precision(section: Section, *, is_ddp: bool) -> None:
    """Translate the precision of the forward pass.

    Without ``mp_policy``, AutoModel computes in bfloat16 with FSDP2, and in the data type of the weights with DDP
    (``components/distributed/config.py`` and ``ddp.py``, revision 36044ad3d).
    """
    policy = section.inner("mp_policy")
    node = policy.take("param_dtype")
    if node is None and is_ddp and section.peek("autocast_dtype") is not None:
        section.rename("autocast_dtype", "mixed_precision", words="dtypes")
    elif node is not None:
        value = DTYPES.get(str(node.value), str(node.value))
        value = "null" if value == "float32" else value
        section.put("mixed_precision", Node(value, node.origin))
    elif policy.node is None:
        section.put_default("mixed_precision", "none" if is_ddp else "bfloat16")
    policy.apply("""
        - _target_ output_dtype cast_forward_inputs
        ~ reduce_dtype in bfloat16 bf16 torch.bfloat16: gradients are reduced in the data type of the weights
    """)
    if policy.node is not None and not policy.node.value:
        section.take("mp_policy")


def _checkpointing(section: Section) -> None:
    """Translate activation checkpointing, which belongs to the model here."""
    node = section.take("activation_checkpointing")
    if node is None:
        return
    # Other words are values of ours, or errors.
    mode = str(node.value).lower().replace("-", "_")
    if is_true(node) or mode in ("full", "enabled"):
        mode = "true"
    elif mode in FALSE_WORDS:
        mode = "false"
    section.put_root("model.activation_checkpointing", Node(mode, node.origin))
    if str(node.value).lower() != mode:
        section.note("activation_checkpointing", node, f"translated to {mode}")


def _compilation(section: Section) -> None:
    """Translate the compilation of each layer, which is what the section compile does here."""
    node = section.flag("enable_compile")
    given = section.theirs("compile.enabled")
    if node is not None and given is not None and (given.is_flag or is_true(given)):
        section.no_effect("enable_compile", node)
    elif node is not None:
        section.put_root("compile.enabled", Node("true", node.origin))


def _pipeline(section: Section) -> None:
    """Translate pipeline parallelism. Without it, AutoModel ignores the section pipeline.

    Each rank has one stage, and the layers are divided evenly: layers_per_stage can only confirm this.
    """
    pipeline = section.inner("pipeline")
    size = section.peek("pp_size")
    is_used = above_1(size)
    if is_used and (micro_batch := pipeline.take("pp_microbatch_size")) is not None:
        # AutoModel splits a local batch into these; here a local batch is what passes a stage.
        steps = section.work.section("distributed.pipeline", "step_scheduler")
        steps.put("local_batch_size", micro_batch)
    if size is not None and is_used and section.work.has_images:
        section.take("pp_size")
        section.degraded("pp_size", size, _UNDIVIDED)
        is_used = False
    else:
        section.rename("pp_size")
    name = "1f1b"
    if is_used and (schedule := pipeline.take("pp_schedule")) is not None:
        name = str(schedule.value).lower()
        if name not in _SCHEDULES:
            pipeline.degraded("pp_schedule", schedule, "1f1b is used; the same mathematics")
            name = "1f1b"
        section.put("pp_schedule", Node(name, schedule.origin))
    pipeline.drop("layers_per_stage", "pp_schedule")
    pipeline.apply(_PIPELINE)


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
        given = Node("5.0", AUTOMODEL_DEFAULT)
    elif value_of(given) == 0:
        given = Node("null", given.origin)
    model.put("neftune_alpha", given)
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
    if section.is_on("enabled"):
        enabled = section.take("enabled")
        assert enabled is not None
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
