"""Random options for the recipes of the examples, as flags of ``ckpt-train``."""

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

from automodel_ckpt.cli.launch.ranks import check_ranks
from automodel_ckpt.config.callables.prepare import resolve_recipe
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.config.recipe_rules import unsupported_keys
from automodel_ckpt.errors import RecipeError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 6
MOST_RANKS = 4
BASE = "BASE"
"""Stands for the directory of the base, which the frozen model of an adapter is read from."""
STORE = "STORE"
"""Stands for the directory of the run's store."""

_MESH = re.compile(r"distributed\.(strategy|.*_size)")
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
            options = {key: value for key, value in options.items() if not _MESH.fullmatch(key)}
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


def draw(seed: int) -> Recipe:
    """Return the recipe of *seed*: the first random one with keys that do not contradict each other."""
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
    example, add_model, fixed = KINDS[kind]
    ranks = numbers.choice((1, 2, 2, 3, MOST_RANKS, MOST_RANKS))
    some = _Some(numbers, {**fixed})
    _add_schedule(some, kind)
    add_model(some)
    _add_adapters(some, kind)
    _add_mesh(some, ranks)
    for probability, kinds, key, *values in OPTIONS:
        if not kinds or kind in kinds.split():
            some.maybe(probability, key, *values)
    _add_dependent_options(some)
    others = [count for count in (1, 2, 3) if count != ranks]
    return Recipe(seed, kind, EXAMPLES / example, ranks, numbers.choice(others), some.options)


@dataclass(frozen=True)
class _Some:
    numbers: random.Random
    options: Options

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


# ---------------------------------------------------------------- models


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_HEADS = {"head_dim": 8}
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


def _add_adapters(some: _Some, kind: str) -> None:
    if kind == "pretrain" or some.numbers.random() >= 0.35:
        return
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


def _perhaps(probability: float, supported: Container[str] | None = None) -> Callable[..., None]:
    """What replaces the model of the example by a decoder with this probability."""

    def add(some: _Some) -> None:
        if some.numbers.random() < probability:
            _add_decoder(some, supported)

    return add


_LISTS = {"recipe": "reranker", "embedding": None, "validation_dataset.num_negatives": 2}
KINDS: dict[str, tuple[str, Callable[[_Some], None], Options]] = {
    "llm_finetune": ("llm_finetune/tiny_llama_python_docs.yaml", _add_decoder, {}),
    "pretrain": ("pretrain/tiny_mixture.yaml", _add_decoder, {}),
    "dpo": ("preference/tiny_dpo.yaml", _add_decoder, {}),
    "kto": ("preference/tiny_kto.yaml", _add_decoder, {}),
    "orpo": ("preference/tiny_orpo.yaml", _add_decoder, {}),
    "reward_model": ("preference/tiny_reward.yaml", _perhaps(1, CLASSIFIERS), {}),
    "distill": ("distill/tiny_distill.yaml", _add_decoder, {}),
    "sequence_classification": ("classification/tiny_topics.yaml", _perhaps(0.5, CLASSIFIERS), {}),
    "embedding": ("embedding/tiny_pairs.yaml", _perhaps(0.3), {}),
    "reranker": ("embedding/tiny_pairs.yaml", _perhaps(0.5, CLASSIFIERS), _LISTS),
    "seq2seq": ("seq2seq/tiny_summaries.yaml", _perhaps(0), {}),
    "vlm_finetune": ("vlm_finetune/tiny_digits.yaml", _perhaps(0), {}),
    "vlm_distill": ("distill/tiny_vlm_distill.yaml", _perhaps(0), {}),
}
"""The example of each kind of training, what draws its model, and what it needs."""


# ---------------------------------------------------------------- options


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


_SCHEDULES = (
    {"name": "linear", "warmup_steps": 2},
    {"name": "constant"},
    {"name": "warmup_stable_decay", "warmup_steps": 1, "kwargs": {"num_decay_steps": 2}},
    {"name": "polynomial", "kwargs": {"power": 2.0}},
    {"name": "inverse_sqrt", "warmup_steps": 2},
    {"name": "cosine_with_restarts", "kwargs": {"num_cycles": 2}},
)
_TORCH_OPTIMIZERS = ("SGD", "Adafactor", "RMSprop", "Adam", "NAdam", "Adagrad")
_OPTIMIZERS = [{"_target_": f"torch.optim.{name}", "lr": 0.002} for name in _TORCH_OPTIMIZERS]
_ADAMW_8BIT = "automodel_ckpt.optim.adam8bit.AdamW8bit"
_GROUPS = (
    [{"params": ["*layers.0.*"], "lr": 0.0005}],
    [{"params": ["hidden_matrices"], "_target_": "torch.optim.Muon", "lr": 0.02}],
)
_SPIKES = {"rollback": 1, "window": 2, "loss_factor": 1.02}
_TEXTS = "automodel_ckpt.examples.data.python_docs.language_modeling"
_SHORT = {"_target_": _TEXTS, "split": "validation", "seq_length": 16, "max_samples": 5}
_PACKED = "llm_finetune distill vlm_finetune vlm_distill"
OPTIONS: tuple[tuple[Any, ...], ...] = (
    (1, "llm_finetune seq2seq", "dataset.seq_length", 32, 64),
    (1, "llm_finetune", "validation_dataset.seq_length", 32),
    (0.15, "llm_finetune", "validation_datasets.short", _SHORT),
    (0.3, _PACKED, "packed_sequence.size", 128),
    (0.2, "llm_finetune", "model.neftune_alpha", 5),
    (0.15, "llm_finetune", "model.mtp", {"num_depths": 1}, {"num_depths": 2, "repeat_layer": True}),
    (0.2, "llm_finetune seq2seq", "generation", {"prompts": ["def ", "The "], "max_new_tokens": 3}),
    (1, "pretrain", "packed_sequence.size", 64, 128),
    (0.5, "pretrain", "pretrain.base_width", None),
    (0.3, "pretrain", "pretrain.split_documents", False),
    (0.2, "pretrain", "pretrain.attend_across_documents", True),
    (0.3, "pretrain", "pretrain.z_loss", 1e-4),
    (0.3, "dpo", "dpo.beta", 0.5),
    (0.4, "dpo", "dpo.precompute", True),
    (0.3, "dpo", "dpo.loss", "ipo", "hinge", "robust"),
    (0.2, "dpo", "dpo.label_smoothing", 0.1),
    (0.3, "kto", "kto.beta", 0.5),
    (0.3, "orpo", "orpo.learn_prompt", True),
    (0.3, "reward_model", "reward_model.center_coefficient", 0.01),
    (0.4, "distill vlm_distill", "distill.top_k", 16),
    (0.4, "distill vlm_distill", "distill.divergence", "reverse_kl", "mixed"),
    (0.3, "distill vlm_distill", "distill.temperature", 2.0),
    (0.3, "distill vlm_distill", "distill.kd_ratio", 0.5),
    (0.3, "embedding", "embedding.symmetric", True),
    (0.3, "embedding", "embedding.negatives", "micro_batch", "global_batch"),
    (0.3, "embedding", "embedding.pooling", "cls", "last"),
    (1, "reranker", "reranker.template", "{{ query }} => {{ document }}"),
    (0.3, "reranker", "reranker.temperature", 0.5),
    (1, "reranker", "dataset.num_negatives", 1, 3),
    (0.5, "seq2seq", "dataset.target_length", 16),
    (0.2, "seq2seq", "dataset.source_prompt", "explain: "),
    (0.3, "", "model.dtype", "bfloat16", "float32"),
    (0.3, "", "distributed.mixed_precision", "bfloat16"),
    (0.2, "", "model.activation_checkpointing", "full", "selective"),
    (0.15, "", "model.attn_implementation", "eager", "sdpa"),
    (0.1, "", "qat", {"scheme": "W8A8"}, {"scheme": "W8A16", "group_size": 16}),
    (0.15, "", "model.freeze", ["*embed*"], ["*layers.0.*"]),
    (0.15, "", "ema", {"decay": 0.9}),
    (0.1, "", "ema", {"decay": 0.5, "start_step": 2, "update_every_steps": 2}),
    (0.3, "", "step_scheduler.val_every_steps", 1, 3),
    (0.1, "", "step_scheduler.on_spike", _SPIKES),
    (0.4, "", "checkpoint.is_async", True),
    (0.3, "", "checkpoint.model_save_format", "torch_save"),
    (0.25, "", "checkpoint.model_layout", "hf", "shards"),
    (0.3, "", "checkpoint.save_consolidated", "every", "final", False),
    (0.2, "", "checkpoint.keep_last", 1, 2),
    (0.15, "", "checkpoint.average_last", 2),
    (0.2, "", "checkpoint.export_best", True),
    (0.1, "", "checkpoint.keep_best", 1),
    (0.1, "", "checkpoint.keep_every_steps", 4),
    (0.1, "", "checkpoint.memory", {}, {"every_steps": 1}),
    (0.2, "", "checkpoint.remote.url", f"file://{STORE}"),
    (0.2, "", "lr_scheduler", *_SCHEDULES),
    (0.22, "", "optimizer", *_OPTIMIZERS),
    (0.04, "", "optimizer", {"_target_": _ADAMW_8BIT, "lr": 0.002, "min_elements": 64}),
    (0.1, "", "optimizer.no_decay", "none", ["*proj*"]),
    (0.2, "", "optimizer.groups", *_GROUPS),
    (0.15, "", "clip_grad_norm", None, 0.1),
    (0.1, "", "dataloader.num_workers", 1, 2),
    (0.1, "", "dataloader.padding_free", False),
    (0.1, "", "dataloader.drop_last", True),
    (0.1, "", "deterministic", True),
    (0.1, "", "profile", {"start_step": 3, "num_steps": 1}),
    (0.1, "", "seed", 0, 7),
    (0.15, "", "logging.sample_ids", True),
)
"""(probability, the kinds of training or an empty text for all, key, values)."""


def _add_dependent_options(some: _Some) -> None:
    """Options that need others."""
    if "ema" in some.options:
        some.maybe(0.3, "ema.validate", True)
        some.maybe(0.3, "checkpoint.export_ema", True, False)
    if some.options.get("checkpoint.model_layout") != "hf":
        some.maybe(0.2, "checkpoint.incremental", True, False)
    if "checkpoint.remote.url" in some.options:
        some.maybe(0.3, "checkpoint.remote.keep_last", 1, 2)
    if some.options.get("recipe") == "reranker" and "model" in some.options:
        some.maybe(0.3, "reranker.attention", "bidirectional")
