"""Parallelism in NeMo AutoModel's recipes: ``distributed`` and ``dist_env``."""

from __future__ import annotations

from automodel_ckpt.config.automodel.model import DTYPES
from automodel_ckpt.config.automodel.rows import (
    Degraded,
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    above_1,
    apply_rows,
    is_true,
    take_request,
    value_of,
)
from automodel_ckpt.config.tree.convert import FALSE_WORDS
from automodel_ckpt.config.tree.yaml_tree import Node

DIST_ENV = (
    Key("backend", where="distributed.backend", words={"nccl": ""}),
    Key("timeout_minutes", where="distributed.timeout_minutes"),
)

STRATEGIES = {
    "fsdp2": "auto",
    "megatron_fsdp": "auto",
    "megatron-fsdp": "auto",
    "mfsdp": "auto",
    "ddp": "ddp",
}
"""AutoModel's strategies and ours."""
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved1f1b"}
"""AutoModel's schedules of pipeline stages (in lower case) and ours."""
UNDIVIDED = "fsdp2 shards the model instead: only language models have stages; the same mathematics"
SHARDED = "experts are sharded by fsdp2 instead; the same mathematics"


def experts(section: Section) -> None:
    """Translate expert parallelism, which needs fsdp2 without tensor parallelism and adapters on experts here."""
    node = section.take("ep_size")
    if node is None:
        return
    tensor = section.work.result.at("distributed.tp_size")
    strategy = section.work.result.at("distributed.strategy")
    is_sharded = strategy is None or strategy.value == "auto"
    has_adapters = section.work.result.at("peft.target_parameters") is not None
    is_divided = tensor is not None and above_1(tensor)
    if value_of(node) in (0, 1):
        section.no_effect("ep_size", node)
    elif not is_sharded:
        section.degraded("ep_size", node, "ddp replicates the experts; the same mathematics")
    elif has_adapters or is_divided:
        section.degraded("ep_size", node, SHARDED)
    else:
        section.put("ep_size", node)


DISTRIBUTED = (
    NoEffect("_target_", "dp_size", "defer_fsdp_grad_sync", "multimodal", "use_hf_tp_plan"),
    Key("tp_size"),
    Key("cp_size"),
    Key("dp_replicate_size"),
    Key("sequence_parallel"),
    Key("reshard_after_forward"),
    Steps(experts, ("ep_size",)),
    NoEffect("moe"),
    NoEffect("autocast_dtype", "activation_checkpointing_scope", "enable_async_tensor_parallel"),
    # FSDP2: when weights are gathered, and a synchronization that our masks do not need.
    NoEffect(
        "enable_fsdp2_prefetch",
        "fsdp2_forward_prefetch_depth",
        "fsdp2_backward_prefetch_depth",
        "patch_is_packed_sequence",
    ),
    # DDP: how gradients are reduced.
    NoEffect(
        "broadcast_buffers",
        "find_unused_parameters",
        "static_graph",
        "bucket_cap_mb",
        "gradient_as_bucket_view",
    ),
    # Megatron FSDP, which is replaced by fsdp2.
    NoEffect(
        "megatron_fsdp_unit_modules",
        "zero_dp_strategy",
        "init_fsdp_with_meta_device",
        "grad_reduce_in_fp32",
        "preserve_fp32_weights",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "check_for_nan_in_grad",
        "report_nan_in_param_grad",
        "average_in_collective",
        "disable_bucketing",
        "calculate_per_token_loss",
        "keep_fp8_transpose_cache",
        "nccl_ub",
        "fsdp_double_buffer",
    ),
    Needs(
        "tp_plan", "a plan by name", "write distributed.tp_plan._target_ (docs/guides/multi-gpu.md)"
    ),
)

PIPELINE = NoEffect(
    "pp_microbatch_size",
    "pp_batch_size",
    "pp_seq_len",
    "patch_causal_lm_model",
    "patch_inner_model",
    "patch_stage_backward_maybe_with_nosync",
    "scale_grads_in_schedule",
    "dtype",
    "pp_recv_buffer_pool",
    "pp_recv_buffer_pool_slack",
)
DIVISION = (
    "layers_per_stage",
    "round_virtual_stages_to_pp_multiple",
    "module_fqns_per_model_part",
    "pp_schedule_csv",
)
"""Keys of the section pipeline that change which rank computes which layers, and when."""


def distributed(section: Section) -> None:
    """Translate the sizes of the device mesh, the strategy and the precision."""
    strategy = section.take("strategy")
    if strategy is not None:
        _strategy(section, strategy)
    is_ddp = strategy is not None and strategy.value == "ddp"
    _precision(section, is_ddp=is_ddp)
    _checkpointing(section)
    _compilation(section)
    _offloading(section)
    _pipeline(section)
    apply_rows(DISTRIBUTED, section)


def _strategy(section: Section, node: Node) -> None:
    name = str(node.value).lower()
    if name not in STRATEGIES:
        hint = f"use one of {', '.join(STRATEGIES)}"
        section.reject("strategy", node, "this strategy is not supported", hint)
        return
    if name not in ("fsdp2", "ddp"):
        section.degraded("strategy", node, "fsdp2 of torch is used; the same mathematics")
    section.put("strategy", Node(STRATEGIES[name], node.origin), was="strategy")


def _precision(section: Section, *, is_ddp: bool) -> None:
    """Translate the precision of the forward pass.

    Without ``mp_policy``, AutoModel computes in bfloat16 with FSDP2, and in the data type of the weights with DDP
    (``components/distributed/config.py`` and ``ddp.py``, revision 36044ad3d).
    """
    policy = section.inner("mp_policy")
    node = policy.take("param_dtype")
    if node is None and is_ddp and section.peek("autocast_dtype") is not None:
        Key("autocast_dtype", "mixed_precision", words=DTYPES).apply(section)
    elif node is not None:
        value = DTYPES.get(str(node.value), str(node.value))
        if value == "float32":
            value = "null"
        section.put("mixed_precision", Node(value, node.origin), was="mp_policy.param_dtype")
    elif policy.node is None:
        section.put_default("mixed_precision", "none" if is_ddp else "bfloat16")
    apply_rows(
        (
            NoEffect("_target_", "output_dtype", "cast_forward_inputs"),
            Degraded(
                "reduce_dtype",
                "gradients are reduced in the data type of the weights",
                when=lambda node: DTYPES.get(str(node.value), node.value) == "bfloat16",
            ),
        ),
        policy,
    )
    if policy.node is not None and not policy.node.value:
        section.take("mp_policy")


def _checkpointing(section: Section) -> None:
    """Translate activation checkpointing, which belongs to the model here."""
    node = section.take("activation_checkpointing")
    if node is None:
        return
    given = str(node.value).lower().replace("-", "_")
    # Other words are values of ours, or errors.
    mode = given
    if is_true(node) or given in ("full", "enabled"):
        mode = "true"
    elif given in FALSE_WORDS:
        mode = "false"
    value = Node(mode, node.origin)
    root = section.work.section("")
    root.inner("model").put("activation_checkpointing", value)
    if str(node.value).lower() != mode:
        section.note("activation_checkpointing", node, f"translated to {value}")


def _compilation(section: Section) -> None:
    """Translate the compilation of each layer, which is what the section compile does here."""
    node = take_request(section, "enable_compile", is_true)
    if node is None:
        return
    given = section.work.source.at("compile.enabled")
    if given is not None and (given.is_flag or is_true(given)):
        section.no_effect("enable_compile", node)
        return
    section.work.section("").inner("compile").put("enabled", Node("true", node.origin))
    section.translated("enable_compile", node, "compile.enabled")


def _offloading(section: Section) -> None:
    node = section.take("offload_policy")
    if node is not None:
        section.put("cpu_offload", Node("true", node.origin), was="offload_policy")


def _pipeline(section: Section) -> None:
    """Translate pipeline parallelism. Without it, AutoModel ignores the section pipeline."""
    pipeline = section.inner("pipeline")
    size = section.take("pp_size")
    schedule = pipeline.take("pp_schedule")
    is_used = size is not None and above_1(size)
    micro_batch = pipeline.take("pp_microbatch_size") if is_used else None
    if micro_batch is not None:
        # AutoModel splits a local batch into these; here a local batch is what passes a stage.
        steps = section.work.section("distributed.pipeline", "step_scheduler")
        steps.put("local_batch_size", micro_batch, was="pp_microbatch_size")
    PIPELINE.apply(pipeline)
    if size is not None and is_used and section.work.has_images:
        section.degraded("pp_size", size, UNDIVIDED)
        is_used = False
    elif size is not None:
        section.put("pp_size", size)
    name = "1f1b"
    if schedule is not None and not is_used:
        pipeline.no_effect("pp_schedule", schedule)
    elif schedule is not None:
        name = SCHEDULES.get(str(schedule.value).lower(), "")
        if not name:
            pipeline.degraded("pp_schedule", schedule, "1f1b is used; the same mathematics")
            name = "1f1b"
        section.put("pp_schedule", Node(name, schedule.origin), was="pipeline.pp_schedule")
    if not is_used:
        NoEffect(*DIVISION).apply(pipeline)
    else:
        _stages(pipeline, name)


def _stages(pipeline: Section, schedule: str) -> None:
    """Translate how layers are divided into stages.

    With one stage per rank, AutoModel also divides the layers evenly: layers_per_stage can only confirm this. With
    several, it sets their number, which depends on the model's number of layers.
    """
    layers = pipeline.take("layers_per_stage")
    is_ours_given = pipeline.work.source.at("distributed.pp_stages_per_rank") is not None
    if layers is not None and schedule == "interleaved1f1b" and not is_ours_given:
        text = (
            "each rank computes 2 stages; for more, set distributed.pp_stages_per_rank to "
            f"layers / (pp_size x {layers}); the same mathematics"
        )
        pipeline.note("layers_per_stage", layers, text)
    elif layers is not None:
        pipeline.no_effect("layers_per_stage", layers)
    NoEffect("round_virtual_stages_to_pp_multiple").apply(pipeline)
    Degraded(
        "module_fqns_per_model_part", "layers are divided evenly; the same mathematics", _is_given
    ).apply(pipeline)
    Degraded("pp_schedule_csv", f"{schedule} is used; the same mathematics", _is_given).apply(
        pipeline
    )


def _is_given(node: Node) -> bool:
    return not node.is_null


def dist_env(section: Section) -> None:
    """Translate the backend and its timeout."""
    apply_rows(DIST_ENV, section)


ROWS = (
    ("dist_env", Steps(dist_env)),
    ("distributed", Steps(distributed)),
)
