"""Names that other trainers give to settings, and the keys of a recipe that mean the same.

An unknown key with one of these names is reported with its counterpart. ``tools/make_reference.py`` writes them to
docs/reference/names.md. The names are those of transformers' TrainingArguments and TRL, axolotl, LLaMA-Factory,
torchtune, sentence-transformers and FlagEmbedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counterpart:
    """The *keys* of a recipe that correspond to a name, and a *note* on what differs; without keys, only the note.

    In the note, VALUE stands for the value that was given. *values* are the values here of some values there.
    """

    keys: tuple[str, ...]
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def hint(self, value: str) -> str:
        """The text of the hint of an error about *value*, such as ``here: optimizer.lr``."""
        note = self.note.replace("VALUE", value)
        if not self.keys:
            return note
        here = "here: " + " and ".join(self.keys)
        if value.lower() in self.values:
            here += f": {self.values[value.lower()]}"
        return f"{here} ({note})" if note else here


def _same(
    names: str, *keys: str, note: str = "", values: Mapping[str, str] | None = None
) -> dict[str, Counterpart]:
    """The entries of several names, separated by spaces, that mean the same."""
    return dict.fromkeys(names.split(), Counterpart(keys, note, values or {}))


_OPTIMIZER = {
    **_same("learning_rate", "optimizer.lr"),
    **_same("adam_beta1 adam_beta2", "optimizer.betas", note="[0.9, 0.999]"),
    **_same("adam_epsilon", "optimizer.eps"),
    **_same("optim optim_args", "optimizer", note="without _target_: AdamW"),
    **_same("optimizer.name optimizer.type", "optimizer", note="_target_: torch.optim.SGD"),
    **_same("lr_scheduler_type", "lr_scheduler.name"),
    **_same("lr_scheduler_kwargs", "lr_scheduler.kwargs"),
    **_same("cosine_min_lr_ratio", "lr_scheduler.kwargs", note="min_lr_rate of cosine_with_min_lr"),
    **_same("max_grad_norm", "clip_grad_norm"),
}

_STEPS = {
    **_same(
        "per_device_train_batch_size per_device_batch_size micro_batch_size batch_size",
        "step_scheduler.local_batch_size",
    ),
    **_same(
        "per_device_eval_batch_size eval_batch_size",
        "step_scheduler.local_batch_size",
        note="the same for training and validation",
    ),
    **_same(
        "gradient_accumulation_steps gradient_accumulation",
        "step_scheduler.global_batch_size",
        note="local_batch_size x ranks x accumulation steps",
    ),
    **_same("num_train_epochs epochs", "step_scheduler.num_epochs"),
    **_same("max_steps_per_epoch", "step_scheduler.max_steps", note="steps of the whole run"),
    **_same(
        "save_steps saves_per_epoch save_every_n_steps",
        "step_scheduler.ckpt_every_steps",
        note="or a fraction of an epoch with ckpt_every_epochs",
    ),
    **_same("save_strategy", "step_scheduler.ckpt_every_steps", "step_scheduler.ckpt_every_epochs"),
    **_same(
        "eval_steps eval_strategy evaluation_strategy evals_per_epoch run_val_every_n_steps",
        "step_scheduler.val_every_steps",
        note="each checkpoint is validated too",
    ),
    **_same(
        "early_stopping_patience early_stopping_steps", "step_scheduler.early_stopping.patience"
    ),
    **_same("early_stopping_threshold", "step_scheduler.early_stopping.min_delta"),
}

_CHECKPOINTS = {
    **_same("output_dir", "checkpoint.checkpoint_dir"),
    **_same("overwrite_output_dir", note="use another checkpoint.checkpoint_dir for a new run"),
    **_same("save_total_limit keep_last_n_checkpoints", "checkpoint.keep_last"),
    **_same("save_only_model", "checkpoint.save_optimizer", note="false"),
    **_same("save_safetensors", "checkpoint.model_save_format"),
    **_same("load_best_model_at_end", "checkpoint.export_best"),
    **_same("metric_for_best_model", "checkpoint.best_metric_key"),
    **_same("greater_is_better", "checkpoint.best_mode", note="max"),
    **_same(
        "resume_from_checkpoint auto_resume_from_checkpoints",
        "checkpoint.restore_from",
        note="without it, a run resumes from its newest checkpoint",
    ),
    **_same("checkpointer", "model.from_pretrained", "checkpoint"),
    # A key of this program until November 2026.
    **_same(
        "checkpoint.files_per_node",
        note="remove it: each rank writes its own files, or with checkpoint.model_layout hf all ranks write the same",
    ),
}

_PRETRAINING = {
    **_same("z_loss_weight z_loss_coefficient softmax_auxiliary_loss", "pretrain.z_loss"),
    **_same(
        "reset_attention_mask reset_position_ids",
        "pretrain.attend_across_documents",
        note="false, the default",
    ),
    **_same("mup_base_width mup_base_hidden_size", "pretrain.base_width"),
    **_same("data_path", "dataset", note="data.mixture.mixture of data.token_files.megatron"),
}

_BF16 = "bfloat16"
_MODEL = {
    **_same(
        "model_name_or_path base_model pretrained_model_name_or_path model_name model.name model.path",
        "model.from_pretrained",
    ),
    **_same("model_revision base_model_revision", "model.revision"),
    **_same("tokenizer_name tokenizer_name_or_path", "tokenizer.from_pretrained"),
    **_same("torch_dtype", "model.dtype"),
    **_same(
        "flash_attention flash_attn sdp_attention xformers_attention",
        "model.attn_implementation",
    ),
    **_same(
        "gradient_checkpointing enable_activation_checkpointing",
        "model.activation_checkpointing",
    ),
    **_same(
        "enable_activation_offloading activation_offloading",
        "model.activation_checkpointing",
        note="offload",
    ),
    **_same("tf32", "float32_precision", note="high"),
    **_same("neftune_noise_alpha", "model.neftune_alpha"),
    **_same("disable_dropout", "dropout", note="auto: off in dpo, kto, orpo and reward_model"),
    **_same(
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
        "model.freeze",
        note="[vision_tower, projector, language_model]",
    ),
    **_same("unfrozen_parameters freeze_trainable_layers", "model.freeze", note="what is frozen"),
    **_same("image_max_pixels image_min_pixels", "processor.kwargs"),
    **_same("torch_compile", "compile.enabled"),
    **_same("torch_compile_backend", "compile.backend"),
    **_same("torch_compile_mode", "compile.mode"),
    **_same(
        "use_liger_kernel enable_liger_kernel liger_kernel",
        "model.fused_layers",
        note="on by default on a GPU; the output layer and its loss are computed in chunks without a key",
    ),
    **_same("bf16 fp16", "distributed.mixed_precision", values={"true": _BF16, "false": "none"}),
    **_same(
        "precision half_precision_backend mixed_precision",
        "distributed.mixed_precision",
        values={"bf16": _BF16, "bf16-mixed": _BF16, "fp16": _BF16, "fp32": "none", "no": "none"},
    ),
}

_ADAPTERS = {
    **_same("lora_r lora_rank peft.rank peft.dim", "peft.r"),
    **_same("lora_alpha", "peft.alpha"),
    **_same("lora_rank_pattern", "peft.rank_pattern"),
    **_same("lora_alpha_pattern", "peft.alpha_pattern"),
    **_same("lora_dropout", "peft.dropout"),
    **_same(
        "lora_target_modules lora_target lora_attn_modules lora_target_linear",
        "peft.target_modules",
    ),
    **_same("lora_target_parameters", "peft.target_parameters"),
    **_same("lora_modules_to_save additional_target", "peft.modules_to_save"),
    **_same(
        "adapter finetuning_type use_peft peft_config", "peft", note="a section: peft: {r: 16}"
    ),
    **_same("peft_use_dora", "peft.use_dora"),
    **_same("load_in_4bit quantization_bit", "peft.quantize_base", note="nf4"),
    **_same("load_in_8bit", "peft.quantize_base", note="int8"),
    **_same("bnb_4bit_quant_type", "peft.quantize_base"),
}

_DATA = {
    **_same(
        "max_seq_length max_seq_len seq_length max_length sequence_len cutoff_len model_max_length",
        "dataset.seq_length",
    ),
    **_same(
        "packing sample_packing neat_packing packed group_by_length",
        "packed_sequence",
        note="a section: packed_sequence: {size: 4096}",
    ),
    **_same("dataset_text_field", "dataset.field"),
    **_same(
        "train_on_inputs train_on_input train_on_prompt completion_only_loss roles_to_train",
        "dataset.learn",
    ),
    **_same("assistant_only_loss mask_history", "dataset.learn"),
    **_same("template", "dataset.chat_template"),
    **_same("dataset_dir dataset_name train_file dataset_path", "dataset.path"),
    **_same("datasets", "dataset", note="several: automodel_ckpt.data.mixture.mixture"),
    **_same("test_datasets eval_dataset", "validation_dataset", note="or validation_datasets"),
    **_same("val_set_size val_size", "validation_dataset", note="a section with other data"),
    **_same("dataloader_num_workers", "dataloader.num_workers"),
    **_same("dataloader_drop_last", "dataloader.drop_last"),
    **_same("dataset_num_proc preprocessing_num_workers dataset_processes", note="remove it"),
    **_same("data_seed", "seed"),
}

_PREFERENCES = {
    **_same("beta rl_beta pref_beta", "dpo.beta", note="orpo.beta for ORPO"),
    **_same("loss_type pref_loss", "dpo.loss", note="ORPO is a recipe: recipe: orpo"),
    **_same("dpo_label_smoothing", "dpo.label_smoothing"),
    **_same(
        "ref_model ref_model_name_or_path",
        "dpo.reference",
        note="without it, the model that training starts from",
    ),
    **_same("precompute_ref_log_probs", "dpo.precompute"),
    **_same("orpo_alpha", "orpo.beta"),
}

_JUDGMENTS = {
    **_same("desirable_weight kto_desirable_weight kto_chosen_weight", "kto.desirable_weight"),
    **_same(
        "undesirable_weight kto_undesirable_weight kto_rejected_weight", "kto.undesirable_weight"
    ),
    **_same("center_rewards_coefficient", "reward_model.center_coefficient"),
}

_EMBEDDINGS = {
    **_same("scale", "embedding.temperature", note="its inverse: scale 20 is temperature 0.05"),
    **_same("pooling_mode pooling_type sentence_pooling_method", "embedding.pooling"),
    **_same("normalize_embeddings normlized normalized", "embedding.normalize"),
    **_same(
        "gather_across_devices negatives_cross_device mini_batch_size",
        "embedding.negatives",
        note="negatives are always those of all ranks; micro-batches are step_scheduler.local_batch_size",
    ),
    **_same("query_instruction_for_retrieval query_instruction", "embedding.query_prompt"),
    **_same("passage_instruction_for_retrieval passage_prompt", "embedding.document_prompt"),
    **_same("prompts", "embedding.query_prompt", "embedding.document_prompt"),
    **_same("train_group_size", "dataset.max_negatives", note="train_group_size - 1"),
}

_RANKS = {
    **_same("fsdp fsdp_config fsdp_version deepspeed", "distributed.strategy", note="fsdp2"),
    **_same("tensor_parallel_size tensor_parallel_dim", "distributed.tp_size"),
    **_same(
        "context_parallel_size sequence_parallel_degree context_parallel_dim",
        "distributed.cp_size",
    ),
    **_same("expert_parallel_size", "distributed.ep_size"),
    **_same("pipeline_parallel_size", "distributed.pp_size"),
    **_same("data_parallel_shard_dim dp_shard_size", "distributed.dp_size"),
    **_same("data_parallel_replicate_dim", "distributed.dp_replicate_size"),
    **_same("fsdp_cpu_offload", "distributed.cpu_offload"),
    **_same("ddp_timeout", "distributed.timeout_minutes", note="in minutes"),
    **_same("ddp_backend", "distributed.backend"),
    **_same("use_cpu no_cuda device", note="remove it: a run uses its GPUs, else the CPU"),
}

_STAGES = {
    "sft": "llm_finetune",
    "pt": "pretrain",
    "rm": "reward_model",
    **{name: name for name in ("dpo", "kto", "orpo")},
}
_LOGS = {
    **_same("logging_steps log_every_n_steps log_freq", "logging.log_every_steps"),
    **_same("logging_dir", "checkpoint.checkpoint_dir"),
    **_same(
        "report_to metric_logger tensorboard mlflow trackio use_tensorboard use_mlflow",
        "logging.trackers",
        note="such as {tensorboard: {}}",
    ),
    **_same("wandb use_wandb", "logging.trackers", note="{wandb: {project: NAME}}"),
    **_same("wandb_project wandb.project", "logging.trackers", note="{wandb: {project: VALUE}}"),
    **_same("wandb_entity wandb.entity", "logging.trackers", note="{wandb: {entity: VALUE}}"),
    **_same("push_to_hub hub_model_id", "hub.repo", note="a section: hub: {repo: ORG/NAME}"),
    **_same("hub_strategy", "hub.push"),
    **_same("hub_private_repo", "hub.private"),
    **_same("hub_token", note="remove it: run hf auth login, or set HF_TOKEN"),
    **_same("run_name", note="give it on the command line: --run-name NAME"),
    **_same("plot_loss", note="remove it: ckpt plot draws a run"),
    **_same("stage rl", "recipe", values=_STAGES),
    **_same("full_determinism", "deterministic"),
}

_KINDS = {
    **_same(
        "teacher_model_name_or_path teacher_model teacher_checkpointer kd_trainer",
        "distill.teacher",
        note="from_pretrained, with recipe: distill or vlm_distill",
    ),
    **_same("kd_ratio kd_alpha", "distill.kd_ratio"),
    **_same(
        "kd_ce_alpha", "distill.kd_ratio", note="the share of the cross-entropy is 1 - kd_ratio"
    ),
    **_same("kd_temperature", "distill.temperature"),
    **_same("kd_loss kd_loss_fn", "distill.divergence"),
}

_REMOVED = {
    **_same(
        "evaluation.tool_calls",
        note="remove it: `ckpt eval` runs a task of lm_eval on a checkpoint",
    ),
}
"""Keys of earlier versions."""

OTHER_NAMES: dict[str, Counterpart] = {
    **_OPTIMIZER,
    **_STEPS,
    **_CHECKPOINTS,
    **_PRETRAINING,
    **_MODEL,
    **_ADAPTERS,
    **_DATA,
    **_EMBEDDINGS,
    **_PREFERENCES,
    **_JUDGMENTS,
    **_RANKS,
    **_LOGS,
    **_KINDS,
    **_REMOVED,
}
"""Name in another program -> what corresponds to it here. A name with a section is meant in that section only."""
