"""Names that other trainers give to settings, and the keys of a recipe that mean the same.

An unknown key with one of these names is reported with its counterpart. ``tools/make_reference.py`` writes them to
docs/reference/names.md. The names are from transformers' TrainingArguments and TRL, axolotl, LLaMA-Factory,
torchtune, sentence-transformers and FlagEmbedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from automodel_ckpt.config.tree.yaml_tree import Node

AXOLOTL, FACTORY, TRL = "axolotl", "LLaMA-Factory", "TRL"
_MARKS = {
    AXOLOTL: ("base_model", "datasets adapter micro_batch_size"),
    FACTORY: ("model_name_or_path", "stage finetuning_type template dataset_dir"),
    TRL: ("model_name_or_path", "dataset_name dataset_text_field use_peft"),
}
"""A key that the files of each program have, and keys of which they have at least one."""


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


_TABLE = """\
learning_rate -> optimizer.lr
adam_beta1 adam_beta2 -> optimizer.betas | [0.9, 0.999]
adam_epsilon -> optimizer.eps
optim optim_args -> optimizer | without _target_: AdamW
optimizer.name optimizer.type -> optimizer | _target_: torch.optim.SGD
lr_scheduler_type -> lr_scheduler.name
lr_scheduler_kwargs -> lr_scheduler.kwargs
cosine_min_lr_ratio -> lr_scheduler.kwargs | min_lr_rate of cosine_with_min_lr
max_grad_norm -> clip_grad_norm
per_device_train_batch_size per_device_batch_size micro_batch_size batch_size -> step_scheduler.local_batch_size
per_device_eval_batch_size eval_batch_size -> step_scheduler.local_batch_size | the same for training and validation
gradient_accumulation_steps gradient_accumulation -> step_scheduler.global_batch_size | local_batch_size x ranks
  x accumulation steps
num_train_epochs epochs -> step_scheduler.num_epochs
max_steps_per_epoch -> step_scheduler.max_steps | steps of the whole run
save_steps saves_per_epoch save_every_n_steps -> step_scheduler.ckpt_every_steps | or a fraction of an epoch
  with ckpt_every_epochs
save_strategy -> step_scheduler.ckpt_every_steps step_scheduler.ckpt_every_epochs
eval_steps eval_strategy evaluation_strategy evals_per_epoch run_val_every_n_steps ->
  step_scheduler.val_every_steps | each checkpoint is validated too
early_stopping_patience early_stopping_steps -> step_scheduler.early_stopping.patience
early_stopping_threshold -> step_scheduler.early_stopping.min_delta
output_dir -> checkpoint.checkpoint_dir
overwrite_output_dir -> | use another checkpoint.checkpoint_dir for a new run
save_total_limit keep_last_n_checkpoints -> checkpoint.keep_last
save_only_model -> checkpoint.save_optimizer = true:false false:true
save_safetensors -> checkpoint.model_save_format = true:safetensors false:torch_save
load_best_model_at_end -> checkpoint.export_best
metric_for_best_model -> checkpoint.best_metric_key = eval_loss:val_loss loss:val_loss
greater_is_better -> checkpoint.best_mode = true:max false:min
resume_from_checkpoint auto_resume_from_checkpoints -> checkpoint.restore_from | without it, a run resumes from
  its newest checkpoint
checkpointer -> model.from_pretrained checkpoint
distributed.pp_stages_per_rank -> | remove it: each rank computes one stage of the pipeline
throughput -> | remove it: training.jsonl has the seconds, tokens per second and MFU of each step
checkpoint.files_per_node -> | remove it: each rank writes its own files, or with checkpoint.model_layout hf all
  ranks write the same
z_loss_weight z_loss_coefficient softmax_auxiliary_loss -> pretrain.z_loss
reset_attention_mask reset_position_ids -> pretrain.attend_across_documents | false, the default
mup_base_width mup_base_hidden_size -> pretrain.base_width
data_path -> dataset | data.mixture.mixture of data.token_files.megatron
model_name_or_path base_model pretrained_model_name_or_path model_name model.name model.path -> model.from_pretrained
model_revision base_model_revision revision_of_model -> model.revision
tokenizer_name tokenizer_name_or_path tokenizer_config -> tokenizer.from_pretrained
torch_dtype dtype -> model.dtype
flash_attention -> model.attn_implementation = true:flash_attention_2
sdp_attention -> model.attn_implementation = true:sdpa
flash_attn xformers_attention -> model.attn_implementation = fa2:flash_attention_2 sdpa:sdpa disabled:eager
gradient_checkpointing enable_activation_checkpointing -> model.activation_checkpointing
enable_activation_offloading activation_offloading -> model.activation_checkpointing | full
tf32 -> float32_precision = true:high false:highest
neftune_noise_alpha -> model.neftune_alpha
disable_dropout -> dropout | auto: off in dpo, kto, orpo and reward_model
freeze_vision_tower freeze_multi_modal_projector freeze_language_model -> model.freeze | [vision_tower,
  projector, language_model]
unfrozen_parameters freeze_trainable_layers -> model.freeze | what is frozen
image_max_pixels image_min_pixels -> processor.kwargs
torch_compile -> compile.enabled
torch_compile_backend -> compile.backend
torch_compile_mode -> compile.mode
use_liger_kernel enable_liger_kernel liger_kernel -> model.fused_layers | on by default on a GPU; the output
  layer and its loss are computed in chunks without a key
bf16 fp16 -> distributed.mixed_precision = true:bfloat16 false:none
precision half_precision_backend mixed_precision -> distributed.mixed_precision = bf16:bfloat16
  bf16-mixed:bfloat16 fp16:bfloat16 fp32:none no:none
lora_r lora_rank peft.rank peft.dim -> peft.r
lora_alpha -> peft.alpha
lora_rank_pattern -> peft.rank_pattern
lora_alpha_pattern -> peft.alpha_pattern
lora_dropout -> peft.dropout
lora_target_modules lora_target lora_attn_modules lora_target_linear -> peft.target_modules
lora_target_parameters -> peft.target_parameters
lora_modules_to_save additional_target -> peft.modules_to_save
adapter finetuning_type use_peft peft_config -> peft | a section: peft: {r: 16}
peft_use_dora -> peft.use_dora
load_in_4bit quantization_bit -> peft.quantize_base | nf4
load_in_8bit -> peft.quantize_base | int8
bnb_4bit_quant_type -> peft.quantize_base
max_seq_length max_seq_len seq_length max_length sequence_len cutoff_len model_max_length -> dataset.seq_length
packing sample_packing neat_packing packed group_by_length -> packed_sequence | a section: packed_sequence:
  {size: 4096}
dataset_text_field -> dataset.field
train_on_inputs train_on_input train_on_prompt completion_only_loss roles_to_train -> dataset.learn
assistant_only_loss mask_history -> dataset.learn
template -> dataset.chat_template
dataset_dir dataset_name train_file dataset_path -> dataset.path
datasets -> dataset | several: automodel_ckpt.data.mixture.mixture
test_datasets eval_dataset -> validation_dataset | or validation_datasets
val_set_size val_size -> validation_dataset | a section with other data
dataloader_num_workers -> dataloader.num_workers
dataloader_drop_last -> dataloader.drop_last
dataset_num_proc preprocessing_num_workers dataset_processes -> | remove it
data_seed -> seed
scale -> embedding.temperature | its inverse: scale 20 is temperature 0.05
pooling_mode pooling_type sentence_pooling_method -> embedding.pooling
normalize_embeddings normlized normalized -> embedding.normalize
gather_across_devices negatives_cross_device mini_batch_size -> embedding.negatives | negatives are always those
  of all ranks; micro-batches are step_scheduler.local_batch_size
query_instruction_for_retrieval query_instruction -> embedding.query_prompt
passage_instruction_for_retrieval passage_prompt -> embedding.document_prompt
prompts -> embedding.query_prompt embedding.document_prompt
train_group_size -> dataset.max_negatives | train_group_size - 1
beta rl_beta pref_beta -> dpo.beta | orpo.beta for ORPO
loss_type pref_loss -> dpo.loss | ORPO is a recipe: recipe: orpo
dpo_label_smoothing -> dpo.label_smoothing
ref_model ref_model_name_or_path -> dpo.reference | without it, the model that training starts from
precompute_ref_log_probs -> dpo.precompute
orpo_alpha -> orpo.beta
desirable_weight kto_desirable_weight kto_chosen_weight -> kto.desirable_weight
undesirable_weight kto_undesirable_weight kto_rejected_weight -> kto.undesirable_weight
center_rewards_coefficient -> reward_model.center_coefficient
fsdp fsdp_config fsdp_version deepspeed -> distributed.strategy | fsdp2
tensor_parallel_size tensor_parallel_dim -> distributed.tp_size
context_parallel_size sequence_parallel_degree context_parallel_dim -> distributed.cp_size
expert_parallel_size -> distributed.ep_size
pipeline_parallel_size -> distributed.pp_size
data_parallel_shard_dim dp_shard_size -> distributed.dp_size
data_parallel_replicate_dim -> distributed.dp_replicate_size
fsdp_cpu_offload -> distributed.cpu_offload
ddp_timeout -> distributed.timeout_minutes | in minutes
ddp_backend -> distributed.backend
use_cpu no_cuda device -> | remove it: a run uses its GPUs, else the CPU
logging_steps log_every_n_steps log_freq -> logging.log_every_steps
logging_dir -> checkpoint.checkpoint_dir
report_to metric_logger tensorboard mlflow trackio use_tensorboard use_mlflow -> logging.trackers | such as
  {tensorboard: {}}
wandb use_wandb -> logging.trackers | {wandb: {project: NAME}}
wandb_project wandb.project -> logging.trackers | {wandb: {project: VALUE}}
wandb_entity wandb.entity -> logging.trackers | {wandb: {entity: VALUE}}
push_to_hub hub_model_id -> hub.repo | a section: hub: {repo: ORG/NAME}
hub_strategy -> hub.push
hub_private_repo -> hub.private
hub_token -> | remove it: run hf auth login, or set HF_TOKEN
run_name -> | give it on the command line: --run-name NAME
plot_loss -> | remove it: ckpt plot draws a run
stage rl -> recipe = sft:llm_finetune pt:pretrain cpt:pretrain rm:reward_model kd:distill dpo:dpo kto:kto
  orpo:orpo bi_encoder:embedding cross_encoder:reranker
full_determinism -> deterministic
teacher_model_name_or_path teacher_model teacher_checkpointer kd_trainer -> distill.teacher | from_pretrained,
  with recipe: distill or vlm_distill
kd_ratio kd_alpha -> distill.kd_ratio
kd_ce_alpha -> distill.kd_ratio | the share of the cross-entropy is 1 - kd_ratio
kd_temperature -> distill.temperature
kd_loss kd_loss_fn -> distill.divergence
# Keys of earlier versions.
evaluation.tool_calls -> | remove it: `ckpt eval` runs a task of lm_eval on a checkpoint
"""
"""Names there -> keys here = values there and here | note."""


def _counterparts() -> dict[str, Counterpart]:
    found = {}
    for line in re.sub(r"\s*\n +", " ", _TABLE).splitlines():
        names, arrow, meaning = line.partition(" ->")
        if not arrow:
            continue
        keys, _, note = meaning.partition(" | ")
        keys, _, values = keys.partition(" = ")
        pairs = dict(pair.split(":") for pair in values.split())
        counterpart = Counterpart(tuple(keys.split()), note.strip(), pairs)
        found.update(dict.fromkeys(names.split(), counterpart))
    return found


OTHER_NAMES = _counterparts()
"""Name in another program -> what corresponds to it here. A name with a section is meant in that section only."""


def program_of(root: Node) -> str | None:
    """Return the program with recipe files such as the tree *root*. Returns None for other files."""
    for program, (name, others) in _MARKS.items():
        has_others = any(root.at(other) is not None for other in others.split())
        if root.at(name) is not None and has_others:
            return program
    return None
