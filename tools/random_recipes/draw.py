"""Random options for the recipes of the examples, as flags of ``ckpt-train``."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
)

from automodel_ckpt.cli.checks.rank_counts import check_ranks
from automodel_ckpt.config.callables.prepare import resolve_recipe
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.unsupported import unsupported_keys

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 6
MOST_RANKS = 4
BASE = "BASE"
"""Stands for the directory of the base, which the frozen model of an adapter is read from."""
STORE = "STORE"
"""Stands for the directory of the run's store."""

Options = dict[str, Any]
"""The values of the flags, by the key in the recipe. Those that are not text are written as JSON, a subset of YAML."""


@dataclass(frozen=True)
class Recipe:
    """A recipe with random options, and the ranks that it is trained and then resumed with."""

    seed: int
    kind: str
    example: Path
    ranks: int
    other_ranks: int
    options: Options

    def flags(self, run: Path, ranks: int) -> list[str]:
        """The arguments of ``ckpt-train`` for the directory *run*; a mesh fits only the ranks it was drawn for."""
        options = self.options
        if ranks != self.ranks:
            options = {key: value for key, value in options.items() if not _is_of_mesh(key)}
        values = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in options.items()
        }
        values["checkpoint.checkpoint_dir"] = str(run)
        base = str(run.parent / "base")
        named = []
        for key, value in values.items():
            value = value.replace(BASE, base).replace(STORE, str(store_of(run)))
            named.append(f"--{key}={value}")
        return [f"--nproc-per-node={ranks}", str(self.example), *named]


def store_of(run: Path) -> Path:
    """The directory of the store of the run directory *run*."""
    return run.absolute().with_name(f"{run.name}-store")


def _is_of_mesh(key: str) -> bool:
    return key == "distributed.strategy" or re.fullmatch(r"distributed\..*_size", key) is not None


def draw(seed: int) -> Recipe:
    """Return the recipe of *seed*: the first of the random ones whose keys do not contradict each other."""
    numbers = random.Random(seed)
    while True:
        recipe = _draw_once(seed, numbers)
        if _is_consistent(recipe):
            return recipe


def _is_consistent(recipe: Recipe) -> bool:
    line = parse(recipe.flags(Path("run"), recipe.ranks))
    try:
        loaded = load_recipe(recipe.example, line.overrides, problems=line.problems)
        check_ranks(loaded, recipe.ranks)
    except RecipeError:
        return False
    kind = resolve_recipe(loaded.config.recipe, Trust(()))
    return not unsupported_keys(loaded.config, getattr(kind, "unsupported", ()))


def _draw_once(seed: int, numbers: random.Random) -> Recipe:
    kind = numbers.choice(sorted(KINDS))
    example, add = KINDS[kind]
    ranks = numbers.choice((1, 2, 2, 3, MOST_RANKS, MOST_RANKS))
    some = _Some(numbers)
    _add_schedule(some, kind)
    add(some)
    _add_mesh(some, ranks)
    _add_model(some)
    _add_checkpoints(some)
    _add_training(some)
    others = [count for count in (1, 2, 3) if count != ranks]
    return Recipe(
        seed=seed,
        kind=kind,
        example=EXAMPLES / example,
        ranks=ranks,
        other_ranks=numbers.choice(others),
        options=some.options,
    )


class _Some:
    """The options drawn so far."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self.options: Options = {}

    def always(self, key: str, *values: Any) -> None:
        """Set *key* to one of the values."""
        self.options[key] = self.numbers.choice(values)

    def maybe(self, probability: float, key: str, *values: Any) -> None:
        """Set *key* to one of the values with this probability."""
        if self.numbers.random() < probability:
            self.always(key, *values)


def _add_schedule(some: _Some, kind: str) -> None:
    rows = {"embedding": 4, "reranker": 2, "vlm_finetune": 2, "vlm_distill": 2}.get(kind, 1)
    some.always("step_scheduler.max_steps", STEPS)
    some.always("step_scheduler.num_epochs", None)
    some.always("step_scheduler.ckpt_every_steps", 2)
    some.always("step_scheduler.global_batch_size", 12 * rows, 24 * rows)
    some.always("step_scheduler.local_batch_size", rows, 2 * rows)
    if kind not in ("pretrain", "sequence_classification"):
        some.always("validation_dataset.max_samples", 16)
        some.maybe(0.2, "step_scheduler.early_stopping", {"patience": 1, "min_delta": 0.1})
        some.maybe(0.2, "step_scheduler.ckpt_on_best", True)
    some.maybe(0.3, "step_scheduler.val_every_steps", 1, 3)
    some.maybe(0.1, "step_scheduler.on_spike", {"rollback": 1, "window": 2, "loss_factor": 1.02})


# ---------------------------------------------------------------- kinds of training


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_HEADS = {"head_dim": 8}
_TEXTS = "automodel_ckpt.examples.data.python_docs.language_modeling"
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DECODERS: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen3": _HEADS,
    "gemma2": {**_HEADS, "sliding_window": 16},
    "gemma3_text": _HEADS,
    "mixtral": {**_HEADS, **_EXPERTS},
    "gpt_oss": {**_HEADS, **_EXPERTS},
    "olmo2": {},
    "phi3": {},
    "granite": {},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}
_WITHOUT_STAGES = ("gpt2", "falcon_h1")
"""Types of models for which transformers has no plan of pipeline stages."""
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}


def _add_decoder(some: _Some, supported: Container[str] | None = None) -> None:
    names = ["llama", *sorted(_DECODERS), "gpt2"]
    name = some.numbers.choice([name for name in names if supported is None or name in supported])
    sizes: dict[str, Any] = dict(_GPT2) if name == "gpt2" else {**_SIZES, **_DECODERS[name]}
    if name != "gpt2":
        sizes["attention_dropout"] = some.numbers.choice([0.0, 0.1])
    sizes["tie_word_embeddings"] = some.numbers.random() < 0.4
    some.always("model", {"from_config": {"model_type": name, **sizes}})
    some.maybe(0.1, "model.vocab_size", 1100, "tokenizer")
    # A GPU computes with fused layers by default.
    some.maybe(0.3, "model.fused_layers", True, False)
    if _has_experts(some.options):
        some.maybe(0.3, "model.router_aux_loss", "micro_batch", False)


def _add_adapters(some: _Some) -> None:
    if some.numbers.random() < 0.35:
        some.always("peft.base_dir", BASE)
        some.always("peft.r", 2, 4)
        some.always("peft.dropout", 0.0, 0.1)
        some.maybe(0.2, "peft.use_dora", True)
        some.maybe(0.2, "peft.use_rslora", True)
        some.maybe(0.2, "peft.modules_to_save", ["lm_head"])
        some.maybe(0.3, "peft.init", "gaussian", "orthogonal")
        some.maybe(0.2, "peft.bias", "lora_only", "all")
        some.maybe(0.2, "peft.dtype", "base")
        some.maybe(0.2, "peft.target_modules", ["q_proj", "v_proj"], ["q_proj", "down_proj"])
        some.maybe(0.2, "peft.rank_pattern", {"*layers.0.*": 3})
        some.maybe(0.1, "peft.exclude_modules", ["*layers.1.*"])
        if _has_experts(some.options):
            some.maybe(0.5, "peft.target_parameters", "all-experts", ["down_proj"])


def _add_texts(some: _Some) -> None:
    _add_decoder(some)
    _add_adapters(some)
    some.always("dataset.seq_length", 32, 64)
    some.always("validation_dataset.seq_length", 32)
    some.maybe(0.3, "packed_sequence.size", 64, 128)
    some.maybe(0.2, "model.neftune_alpha", 5)
    some.maybe(0.15, "model.mtp", {"num_depths": 1}, {"num_depths": 2, "repeat_layer": True})
    some.maybe(0.2, "generation", {"prompts": ["def ", "The "], "max_new_tokens": 3})
    if some.numbers.random() < 0.15:
        some.always("validation_datasets.short._target_", _TEXTS)
        some.always("validation_datasets.short.split", "validation")
        some.always("validation_datasets.short.seq_length", 16)
        some.always("validation_datasets.short.max_samples", 5)


def _add_pretraining(some: _Some) -> None:
    _add_decoder(some)
    some.always("packed_sequence.size", 64, 128)
    some.maybe(0.5, "pretrain.base_width", None)
    some.maybe(0.3, "pretrain.split_documents", False)
    some.maybe(0.2, "pretrain.attend_across_documents", True)
    some.maybe(0.3, "pretrain.z_loss", 1e-4)


def _add_pairs(section: str) -> Callable[[_Some], None]:
    def add(some: _Some) -> None:
        _add_decoder(some, CLASSIFIERS if section == "reward_model" else None)
        _add_adapters(some)
        if section in ("dpo", "kto"):
            some.maybe(0.3, f"{section}.beta", 0.5)
        if section == "dpo":
            some.maybe(0.4, "dpo.precompute", True)
            some.maybe(0.3, "dpo.loss", "ipo", "hinge", "robust")
            some.maybe(0.2, "dpo.label_smoothing", 0.1)
        if section == "orpo":
            some.maybe(0.3, "orpo.learn_prompt", True)
        if section == "reward_model":
            some.maybe(0.3, "reward_model.center_coefficient", 0.01)

    return add


def _add_distillation(some: _Some) -> None:
    _add_decoder(some)
    _add_adapters(some)
    some.maybe(0.3, "packed_sequence.size", 128)
    _add_divergence(some)


def _add_divergence(some: _Some) -> None:
    some.maybe(0.4, "distill.top_k", 16)
    some.maybe(0.4, "distill.divergence", "reverse_kl", "mixed")
    some.maybe(0.3, "distill.temperature", 2.0)
    some.maybe(0.3, "distill.kd_ratio", 0.5)


def _add_classes(some: _Some) -> None:
    if some.numbers.random() < 0.5:
        _add_decoder(some, CLASSIFIERS)
    _add_adapters(some)


def _add_embeddings(some: _Some) -> None:
    if some.numbers.random() < 0.3:
        _add_decoder(some)
    _add_adapters(some)
    some.maybe(0.3, "embedding.symmetric", True)
    some.maybe(0.3, "embedding.negatives", "micro_batch", "global_batch")
    some.maybe(0.3, "embedding.pooling", "cls", "last")


def _add_lists(some: _Some) -> None:
    some.always("recipe", "reranker")
    some.always("embedding", None)
    some.always("reranker.template", "{{ query }} => {{ document }}")
    some.maybe(0.3, "reranker.temperature", 0.5)
    if some.numbers.random() < 0.5:
        _add_decoder(some, CLASSIFIERS)
        some.maybe(0.3, "reranker.attention", "bidirectional")
    _add_adapters(some)
    some.always("dataset.num_negatives", 1, 3)
    some.always("validation_dataset.num_negatives", 2)


_T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_SWITCH = {
    **_T5,
    "model_type": "switch_transformers",
    "num_experts": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "router_jitter_noise": 0.0,
}
"""A model that calls only the experts that a token of the micro-batch chooses."""
_BART = {
    "model_type": "bart",
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}


def _add_sources_and_targets(some: _Some) -> None:
    dropout = some.numbers.choice([0.0, 0.1])
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    some.always(
        "model",
        {"from_config": {**_T5, "dropout_rate": dropout}},
        {"from_config": {**_T5, **gated, "dropout_rate": dropout}},
        {"from_config": {**_BART, "dropout": dropout}},
        {"from_config": {**_SWITCH, "dropout_rate": dropout}},
    )
    _add_adapters(some)
    if "peft.target_modules" in some.options and "d_kv" in json.dumps(some.options["model"]):
        some.always("peft.target_modules", ["q", "v"], "all-linear")
    some.always("dataset.seq_length", 32, 64)
    some.maybe(0.5, "dataset.target_length", 16)
    some.maybe(0.2, "dataset.source_prompt", "explain: ")
    some.maybe(0.2, "generation", {"prompts": ["def ", "class "], "max_new_tokens": 3})


def _add_images(some: _Some) -> None:
    _add_adapters(some)
    some.maybe(0.3, "packed_sequence.size", 128)


def _add_image_distillation(some: _Some) -> None:
    _add_images(some)
    _add_divergence(some)


KINDS: dict[str, tuple[str, Callable[[_Some], None]]] = {
    "llm_finetune": ("llm_finetune/tiny_llama_python_docs.yaml", _add_texts),
    "pretrain": ("pretrain/tiny_mixture.yaml", _add_pretraining),
    "dpo": ("preference/tiny_dpo.yaml", _add_pairs("dpo")),
    "kto": ("preference/tiny_kto.yaml", _add_pairs("kto")),
    "orpo": ("preference/tiny_orpo.yaml", _add_pairs("orpo")),
    "reward_model": ("preference/tiny_reward.yaml", _add_pairs("reward_model")),
    "distill": ("distill/tiny_distill.yaml", _add_distillation),
    "sequence_classification": ("classification/tiny_topics.yaml", _add_classes),
    "embedding": ("embedding/tiny_pairs.yaml", _add_embeddings),
    "reranker": ("embedding/tiny_pairs.yaml", _add_lists),
    "seq2seq": ("seq2seq/tiny_summaries.yaml", _add_sources_and_targets),
    "vlm_finetune": ("vlm_finetune/tiny_digits.yaml", _add_images),
    "vlm_distill": ("distill/tiny_vlm_distill.yaml", _add_image_distillation),
}
"""The example of each kind of training, and what adds the options that only this kind has."""


# ---------------------------------------------------------------- options of all kinds


def _add_mesh(some: _Some, ranks: int) -> None:
    if ranks == 1:
        return
    meshes = ["auto", "fsdp2", "fsdp2", "ddp"]
    if ranks % 2 == 0:
        meshes += ["tp", "hsdp", "cp"]
        model_type = some.options.get("model", {}).get("from_config", {}).get("model_type")
        meshes += ["pp"] * (model_type not in _WITHOUT_STAGES)
        meshes += ["ep"] * _has_experts(some.options)
    mesh = some.numbers.choice(meshes)
    if mesh in ("fsdp2", "ddp"):
        some.always("distributed.strategy", mesh)
    elif mesh == "hsdp":
        some.always("distributed.strategy", "fsdp2")
        some.always("distributed.dp_replicate_size", 2)
    elif mesh != "auto":
        some.always(f"distributed.{mesh}_size", 2)
    if mesh == "tp":
        some.maybe(0.3, "distributed.sequence_parallel", True)
    if mesh == "pp":
        some.maybe(0.5, "distributed.pp_schedule", "gpipe")
    some.maybe(0.2, "distributed.reshard_after_forward", False)
    some.maybe(0.2, "distributed.defer_gradient_sync", True)
    if mesh in ("ddp", "hsdp"):
        some.maybe(0.3, "checkpoint.verify_replicas", True)


def _has_experts(options: Options) -> bool:
    config = options.get("model", {}).get("from_config", {})
    return "num_experts_per_tok" in config


def _add_model(some: _Some) -> None:
    some.maybe(0.3, "model.dtype", "bfloat16", "float32")
    some.maybe(0.3, "distributed.mixed_precision", "bfloat16")
    some.maybe(0.2, "model.activation_checkpointing", "full", "selective")
    some.maybe(0.15, "model.attn_implementation", "eager", "sdpa")
    some.maybe(0.1, "qat", {"scheme": "W8A8"}, {"scheme": "W8A16", "group_size": 16})
    some.maybe(0.15, "model.freeze", ["*embed*"], ["*layers.0.*"])
    some.maybe(
        0.25, "ema", {"decay": 0.9}, {"decay": 0.5, "start_step": 2, "update_every_steps": 2}
    )
    if "ema" in some.options:
        some.maybe(0.3, "ema.validate", True)
        some.maybe(0.3, "checkpoint.export_ema", True, False)


def _add_checkpoints(some: _Some) -> None:
    some.maybe(0.4, "checkpoint.is_async", True)
    some.maybe(0.3, "checkpoint.model_save_format", "torch_save")
    some.maybe(0.25, "checkpoint.model_layout", "hf", "shards")
    if some.options.get("checkpoint.model_layout") != "hf":
        some.maybe(0.2, "checkpoint.incremental", True, False)
    some.maybe(0.3, "checkpoint.save_consolidated", "every", "final", False)
    some.maybe(0.2, "checkpoint.keep_last", 1, 2)
    some.maybe(0.15, "checkpoint.average_last", 2)
    some.maybe(0.2, "checkpoint.export_best", True)
    some.maybe(0.1, "checkpoint.keep_best", 1)
    some.maybe(0.1, "checkpoint.keep_every_steps", 4)
    some.maybe(0.1, "checkpoint.memory", {}, {"every_steps": 1})
    if some.numbers.random() < 0.2:
        some.always("checkpoint.remote.url", f"file://{STORE}")
        some.maybe(0.3, "checkpoint.remote.keep_last", 1, 2)


_SCHEDULES = (
    {"name": "linear", "warmup_steps": 2},
    {"name": "constant"},
    {"name": "warmup_stable_decay", "warmup_steps": 1, "kwargs": {"num_decay_steps": 2}},
    {"name": "polynomial", "kwargs": {"power": 2.0}},
    {"name": "inverse_sqrt", "warmup_steps": 2},
    {"name": "cosine_with_restarts", "kwargs": {"num_cycles": 2}},
)
_OPTIMIZERS = ("SGD", "Adafactor", "RMSprop", "Adam", "NAdam", "Adagrad")
_ADAMW_8BIT = "automodel_ckpt.optim.adam8bit.AdamW8bit"
_GROUPS = (
    [{"params": ["*layers.0.*"], "lr": 0.0005}],
    [{"params": ["hidden_matrices"], "_target_": "torch.optim.Muon", "lr": 0.02}],
)


def _add_training(some: _Some) -> None:
    some.maybe(0.2, "lr_scheduler", *_SCHEDULES)
    optimizers = [{"_target_": f"torch.optim.{name}", "lr": 0.002} for name in _OPTIMIZERS]
    optimizers.append({"_target_": _ADAMW_8BIT, "lr": 0.002, "min_elements": 64})
    some.maybe(0.25, "optimizer", *optimizers)
    some.maybe(0.1, "optimizer.no_decay", "none", ["*proj*"])
    some.maybe(0.2, "optimizer.groups", *_GROUPS)
    some.maybe(0.15, "clip_grad_norm", None, 0.1)
    some.maybe(0.1, "dataloader.num_workers", 1, 2)
    some.maybe(0.1, "dataloader.padding_free", False)
    some.maybe(0.1, "dataloader.drop_last", True)
    some.maybe(0.1, "deterministic", True)
    some.maybe(0.1, "profile", {"start_step": 3, "num_steps": 1})
    some.maybe(0.1, "seed", 0, 7)
    some.maybe(0.15, "logging.sample_ids", True)
