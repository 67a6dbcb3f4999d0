"""No key of a recipe is accepted and ignored: another value changes what the program does, or it is an error.

Each key of the schema has a line in a table, with another value than its default and other words of the command line
(``NAMES`` has those that several lines share). A "!" before the key: without the value, the command fails.

* ``RUNS``: the value changes what a run leaves in its directory, or is rejected with the key.
* ``DRY_RUNS``: the value changes what ``--dry-run`` prints, or is rejected with the key.
* ``ELSEWHERE``: the effect takes several ranks, a longer run or a server. A test in the file shows it.
"""

import contextlib
import gzip
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import automodel_ckpt
from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import EXIT_STOPPED, EXIT_UNUSABLE, EXIT_USAGE, RecipeError
from tests.support.models.sizes import model_sizes

ROOT = Path(__file__).parents[2]
SIZES = (
    "hidden_size: 8, intermediate_size: 8, num_attention_heads: 2, num_key_value_heads: 2, "
    "max_position_embeddings: 32"
)
TINY = f"model_type: llama, num_hidden_layers: 1, {SIZES}"
RECIPE = f"""\
model: {{from_config: {{{TINY}, vocab_size: 24}}}}
dataset: {{_target_: {__name__}.samples}}
step_scheduler: {{global_batch_size: 4, local_batch_size: 2, max_steps: 3, ckpt_every_epochs: null}}
checkpoint: {{save_consolidated: false}}
"""


class Samples:
    """Seven samples of two to five tokens; the first token says whether a worker process made it."""

    main_process = os.getpid()

    def __init__(self, token: int, interrupts: bool) -> None:
        self.token, self.interrupts = token, interrupts

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if self.interrupts:
            signal.raise_signal(signal.SIGUSR2)
        tokens = [1 if os.getpid() == self.main_process else 2, *[self.token] * (1 + index % 4)]
        return {"input_ids": tokens, "labels": tokens}


def samples(token: int = 5, interrupts: bool = False) -> Samples:
    return Samples(token, interrupts)


def pairs(query_prompt: str = "", document_prompt: str = "") -> list[dict[str, list[int]]]:
    """Four pairs of texts, two of which have the same document; their first tokens tell the lengths of the prompts."""
    query, document = 1 + len(query_prompt), 1 + len(document_prompt)
    made = []
    for number in (5, 7, 9, 9):
        tokens = [query, number, 3, document, 10, number // 9, 4]
        made.append({"input_ids": tokens, "labels": [-100, *tokens[1:3], -100, *tokens[4:]]})
    return made


def shortened(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name][:2] for row in rows]) for name in rows[0]}


def some_model() -> nn.Module:
    return nn.Linear(2, 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models: two complete ones of different sizes, one that lacks a tensor, one that has one more."""
    place = tmp_path_factory.mktemp("keys")
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    fast: Any = PreTrainedTokenizerFast
    for name, width in (("plain", 8), ("other", 16), ("less", 8), ("more", 8)):
        config = LlamaConfig(
            **model_sizes(
                hidden=width, inner=8, layers=1, heads=2, kv_heads=2, vocab=24, positions=32
            )
        )
        LlamaForCausalLM(config).save_pretrained(place / name)
        fast(tokenizer_object=words).save_pretrained(place / name)
    for name, changes in (("less", {}), ("more", {"extra": torch.ones(2)})):
        file = place / name / "model.safetensors"
        tensors = load_file(file) | changes
        if name == "less":
            del tensors["model.norm.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
    return place


# ---------------------------------------------------------------- the tables

VALIDATED = f"validation_dataset={{_target_: {__name__}.samples}}"
OFTEN = f"{VALIDATED}; step_scheduler.val_every_steps=1"
NAMES = {
    "ADAPTED": "peft={base_dir: base}",
    "CLASSIFIES": "recipe=sequence_classification; model.config_overrides={pad_token_id: 0}",
    "DISTILLED": "recipe=distill; distill={teacher: {from_pretrained: ../plain}}; WORDS",
    "EMBEDDING": f"recipe=embedding; dataset={{_target_: {__name__}.pairs}}",
    "FOUR_RANKS": "nproc-per-node=4; step_scheduler.global_batch_size=8",
    "GROUP": "optimizer.groups=[{params: ['*norm*'], lr: 0.5}]",
    "KEEP": f"{OFTEN}; step_scheduler.ckpt_every_steps=1; checkpoint.keep_last=1",
    "MEMORY": "checkpoint.memory={every_steps: 2}",
    "OFTEN": OFTEN,
    "PROFILED": "profile={start_step: 2, num_steps: 1}",
    "PLAIN": "model.from_config=null; model.from_pretrained=../plain",
    "QAT": "qat={group_size: 4}",
    "SAVED": f"{OFTEN}; step_scheduler.ckpt_every_steps=1",
    "SCHEDULE": "lr_scheduler={name: cosine}",
    "SGD": "optimizer={_target_: torch.optim.SGD, lr: 0.1}",
    "SHARDED": "nproc-per-node=2; distributed.strategy=fsdp2",
    "VALIDATED": VALIDATED,
    "WORDS": "tokenizer={from_pretrained: ../plain}",
}
RUNS = """
seed | 7
model.from_config | {model_type: llama, SIZES, num_hidden_layers: 2, vocab_size: 24}
model.from_pretrained | ../other | PLAIN
model.revision | v2 | PLAIN
model.config_overrides | {hidden_size: 16}
model.dtype | bfloat16
model.freeze | ['*embed_tokens*']
model.freeze_if_present | ['*embed_tokens*', audio_tower]
model.vocab_size | 40
!model.allow_missing | [model.norm.weight] | model.from_config=null; model.from_pretrained=../less
!model.allow_unexpected | [extra] | model.from_config=null; model.from_pretrained=../more
tokenizer.from_pretrained | ../plain
processor | {from_pretrained: ../plain}
embedding | {temperature: 0.5} | EMBEDDING
embedding.pooling | last | EMBEDDING
embedding.normalize | false | EMBEDDING
embedding.temperature | 0.5 | EMBEDDING
embedding.symmetric | true | EMBEDDING
embedding.negatives | micro_batch | EMBEDDING
embedding.hide_equal_texts | false | EMBEDDING
embedding.query_prompt | find | EMBEDDING
embedding.document_prompt | see | EMBEDDING
distill.teacher.from_pretrained | ../other | DISTILLED
distill.teacher.revision | v2 | DISTILLED
distill.teacher.trust_remote_code | true | DISTILLED
distill.teacher.dtype | bfloat16 | DISTILLED
distill.teacher.attn_implementation | nonexistent | DISTILLED
distill.divergence | reverse_kl | DISTILLED
distill.reverse_weight | 0.3 | DISTILLED; distill.divergence=mixed
distill.kd_ratio | 0.7 | DISTILLED
distill.temperature | 2 | DISTILLED
qat | {group_size: 4}
qat.scheme | W8A8 | QAT
qat.group_size | 2 | QAT
qat.start_step | 3 | QAT
peft | {base_dir: base}
peft.r | 4 | ADAPTED
peft.alpha | 32 | ADAPTED
peft.rank_pattern | {q_proj: 4} | ADAPTED
peft.alpha_pattern | {q_proj: 4} | ADAPTED
peft.dropout | 0.1 | ADAPTED
peft.target_modules | [q_proj] | ADAPTED
peft.exclude_modules | [q_proj] | ADAPTED
peft.exclude_if_present | [q_proj, vision_tower] | ADAPTED
peft.modules_to_save | [lm_head] | ADAPTED
peft.use_dora | true | ADAPTED
peft.use_rslora | true | ADAPTED
peft.init | gaussian | ADAPTED
peft.bias | all | ADAPTED; model.from_config.attention_bias
peft.ensure_weight_tying | false | ADAPTED; model.from_config.tie_word_embeddings; peft.modules_to_save=[embed_tokens]
peft.dtype | base | ADAPTED; model.dtype=bfloat16
peft.base_dir | other | ADAPTED
peft.quantize_base | nf4 | ADAPTED
!distill.teacher | {from_pretrained: ../plain} | recipe=distill; distill={teacher: {from_pretrained: none}}; WORDS
dataset | {_target_: SELF.samples, token: 6}
validation_dataset | {_target_: SELF.samples}
validation_datasets | {a: {_target_: SELF.samples}}
dataloader.shuffle | false
dataloader.num_workers | 1
dataloader.collate_fn | {_target_: SELF.shortened}
dataloader.padding_free | false
dataloader.drop_last | true
packed_sequence | {size: 16}
packed_sequence.size | 8 | packed_sequence={}
optimizer | {_target_: torch.optim.SGD, lr: 0.1}
optimizer.lr | 0.1
optimizer.betas | [0.5, 0.5]
optimizer.eps | 1
optimizer.weight_decay | 0.5
optimizer.no_decay | none | optimizer.weight_decay=0.5
optimizer.groups | [{params: ['*norm*'], lr: 0.5}]
optimizer.groups.0.params | ['*proj*'] | GROUP
optimizer.groups.0.lr | 0.1 | GROUP
optimizer.groups.0.betas | [0.5, 0.5] | GROUP
optimizer.groups.0.eps | 1 | GROUP
optimizer.groups.0.weight_decay | 0.25 | GROUP
lr_scheduler | {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}
lr_scheduler.name | linear | SCHEDULE
lr_scheduler.warmup_steps | 2 | SCHEDULE
lr_scheduler.warmup_ratio | 0.9 | SCHEDULE
lr_scheduler.warmup_from | 0.5 | SCHEDULE; lr_scheduler.warmup_steps=2
lr_scheduler.decay_steps | 6 | SCHEDULE
lr_scheduler.kwargs | {num_cycles: 2} | SCHEDULE
loss_fn | {_target_: torch.nn.CrossEntropyLoss, label_smoothing: 0.5}
clip_grad_norm | 0.1 | SGD
step_scheduler.global_batch_size | 6
step_scheduler.max_steps | 2
step_scheduler.ckpt_every_steps | 2
step_scheduler.ckpt_every_epochs | 1
step_scheduler.ckpt_every_minutes | 0.00001
step_scheduler.ckpt_on_best | true | OFTEN
step_scheduler.val_every_steps | 1 | VALIDATED
step_scheduler.early_stopping | {patience: 1, min_delta: 9} | OFTEN
step_scheduler.early_stopping.metric | val_accuracy | OFTEN; step_scheduler.early_stopping={patience: 1}
step_scheduler.early_stopping.patience | 1 | OFTEN; step_scheduler.early_stopping={min_delta: 9}
step_scheduler.early_stopping.min_delta | 9 | OFTEN; step_scheduler.early_stopping={patience: 1}
checkpoint.enabled | false
checkpoint.checkpoint_dir | elsewhere
checkpoint.model_save_format | torch_save
checkpoint.model_layout | hf
checkpoint.save_consolidated | final
checkpoint.save_optimizer | false
checkpoint.best_metric_key | train_loss | SAVED
checkpoint.best_mode | max | SAVED
checkpoint.keep_last | 1 | SAVED
checkpoint.keep_best | 2 | KEEP
checkpoint.keep_every_steps | 2 | KEEP
checkpoint.keep_steps | [1] | KEEP
profile | {start_step: 2, num_steps: 1}
profile.start_step | 3 | PROFILED
profile.num_steps | 2 | PROFILED
profile.ranks | [1] | PROFILED
profile.record_shapes | true | PROFILED
profile.with_stack | true | PROFILED
profile.memory | true | PROFILED
profile.directory | traces | PROFILED
logging.level | warning
logging.log_every_seconds | 600
logging.log_every_steps | 2
logging.peak_tflops | 0.5
logging.sample_ids | true
logging.trackers | {tensorboard: {}}
"""
DRY_RUNS = """
recipe | pretrain
model | {_target_: SELF.some_model}
model.attn_implementation | eager
model.fused_layers | true
model.activation_checkpointing | true
tokenizer | {from_pretrained: ../plain}
!distill | {teacher: {from_pretrained: ../plain}} | recipe=distill; WORDS
!classification | {num_labels: 2} | CLASSIFIES
!classification.labels | [a, b] | CLASSIFIES
!classification.num_labels | 3 | CLASSIFIES
dataloader.pad_to_multiple_of | 16
distributed.strategy | ddp | FOUR_RANKS
distributed.dp_size | 2 | FOUR_RANKS
distributed.dp_replicate_size | 2 | FOUR_RANKS
distributed.tp_size | 2 | FOUR_RANKS
distributed.pp_size | 2 | FOUR_RANKS; model.from_config.num_hidden_layers=2
distributed.cp_size | 2 | FOUR_RANKS
distributed.sequence_parallel | true | FOUR_RANKS; distributed.tp_size=2
distributed.pp_schedule | gpipe | FOUR_RANKS; distributed.pp_size=2; model.from_config.num_hidden_layers=2
distributed.reshard_after_forward | false | SHARDED
distributed.mixed_precision | bfloat16 | SHARDED
step_scheduler.local_batch_size | 4
step_scheduler.num_epochs | 3 | step_scheduler.max_steps=null
step_scheduler.max_time | 00:05:00
checkpoint.remote | {url: 'file:///tmp/a'}
checkpoint.remote.url | file:///tmp/b | checkpoint.remote={url: 'file:///tmp/a'}
checkpoint.scratch_dir | /tmp/scratch | checkpoint.checkpoint_dir=file:///tmp/a
checkpoint.memory | {every_steps: 2}
checkpoint.memory.directory | /tmp | MEMORY
"""
ELSEWHERE = """
tests/contract/test_benchmarks.py: evaluation evaluation.harness evaluation.harness.tasks evaluation.harness.every_steps
tests/contract/test_benchmarks.py: evaluation.harness.limit evaluation.harness.num_fewshot
tests/contract/test_benchmarks.py: evaluation.harness.include_path evaluation.harness.batch_size
tests/contract/test_benchmarks.py: evaluation.harness.chat_template
tests/contract/test_completions.py: generation generation.prompts generation.system generation.raw
tests/contract/test_completions.py: generation.max_new_tokens generation.temperature
tests/contract/test_dry_run.py: checkpoint.allow_missing_state
tests/contract/test_every_key.py: step_scheduler.stop_signals peft.method packed_sequence.strategy
tests/contract/test_hub.py: hub hub.repo hub.push hub.private hub.revision hub.card hub.base_model hub.license
tests/contract/repository/test_passed_settings.py: compile.enabled compile.backend compile.mode
tests/contract/repository/test_passed_settings.py: compile.fullgraph compile.dynamic
tests/contract/repository/test_passed_settings.py: checkpoint.remote.options checkpoint.remote.keep_last
tests/contract/repository/test_passed_settings.py: checkpoint.remote.keep_best checkpoint.remote.keep_every_steps
tests/contract/repository/test_passed_settings.py: checkpoint.remote.keep_steps checkpoint.remote.max_mb_per_second
tests/contract/repository/test_passed_settings.py: checkpoint.remote.num_threads
tests/contract/test_remote_code.py: model.trust_remote_code
tests/distributed/faults/test_replica_check.py: checkpoint.verify_replicas
tests/distributed/faults/test_signals.py: distributed.timeout_minutes
tests/distributed/kinds/test_distill.py: distill.offload_teacher distill.top_k distill.cache_dir
tests/distributed/kinds/test_dpo.py: dropout dpo dpo.beta dpo.loss dpo.label_smoothing dpo.reference dpo.precompute
tests/distributed/kinds/test_dpo.py: orpo orpo.beta orpo.learn_prompt
tests/distributed/kinds/test_early_stopping.py: step_scheduler.stop_after_nonfinite_steps
tests/distributed/kinds/test_kto.py: kto kto.beta kto.desirable_weight kto.undesirable_weight kto.reference
tests/distributed/kinds/test_mtp.py: model.mtp model.mtp.loss_scaling_factor model.mtp.num_depths model.mtp.repeat_layer
tests/distributed/kinds/test_mtp.py: model.mtp.weights
tests/distributed/kinds/test_pretrain.py: pretrain.z_loss pretrain.base_width
tests/distributed/kinds/test_reward_model.py: reward_model reward_model.center_coefficient
tests/distributed/kinds/test_sequence_classification.py: classification.problem
tests/distributed/kinds/test_training.py: distributed.backend
tests/distributed/kinds/test_vlm.py: processor.kwargs processor.from_pretrained
tests/distributed/models/test_compile.py: compile.row_widths
tests/distributed/models/test_fp8.py: fp8 fp8.recipe fp8.exclude fp8.emulate
tests/distributed/models/test_neftune.py: model.neftune_alpha
tests/distributed/models/test_profile.py: profile.warmup_steps
tests/distributed/models/test_weight_average.py: ema ema.decay ema.start_step ema.update_every_steps ema.validate
tests/distributed/models/test_weight_average.py: checkpoint.export_ema
tests/distributed/parallel/test_unused_gradients.py: distributed.defer_gradient_sync
tests/distributed/parallel/test_expert_adapters.py: peft.target_parameters
tests/distributed/parallel/test_expert_parallel.py: distributed.ep_size
tests/distributed/parallel/test_router_loss.py: model.router_aux_loss
tests/distributed/parallel/test_strategies.py: distributed.tp_plan distributed.cpu_offload
tests/distributed/resume/test_init_from.py: model.new_tokens init_from init_from.path init_from.allow_missing
tests/distributed/resume/test_init_from.py: init_from.allow_unexpected init_from.0.path init_from.0.allow_missing
tests/distributed/resume/test_init_from.py: init_from.0.allow_unexpected init_from.0.strip init_from.0.into
tests/distributed/resume/test_memory_nodes.py: checkpoint.memory.replicas checkpoint.memory.max_mb_per_second
tests/distributed/resume/test_memory_without_launcher.py: checkpoint.memory.every_steps
tests/distributed/saves/test_save_failures.py: checkpoint.export_best checkpoint.average_last checkpoint.on_save_failure
tests/distributed/saves/test_sibling.py: checkpoint.on_incompatible
tests/unit/checkpoint/jobs/test_background.py: checkpoint.is_async
tests/unit/checkpoint/jobs/test_incremental.py: checkpoint.incremental
tests/unit/checkpoint/remote/test_remote.py: checkpoint.remote.required checkpoint.remote.wait_after_signal_seconds
tests/unit/checkpoint/state/test_checkpointer.py: checkpoint.verify checkpoint.restore_from
tests/unit/checkpoint/state/test_model_config.py: checkpoint.allow_changed_model
tests/unit/hub/test_pusher.py: hub.required
tests/unit/training/optim/test_embedding.py: embedding.attention
tests/unit/training/parts/test_hang_watch.py: hangs hangs.min_seconds hangs.factor hangs.restart
tests/unit/training/parts/test_precision.py: deterministic float32_precision
tests/unit/training/parts/test_pretrain_losses.py: pretrain pretrain.split_documents pretrain.attend_across_documents
tests/unit/training/parts/test_resume_settings.py: optimizer.on_resume
tests/unit/training/parts/test_save_interval.py: step_scheduler.mtbf_hours
tests/unit/training/parts/test_spikes.py: step_scheduler.on_spike.rollback step_scheduler.on_spike.skip
tests/unit/training/parts/test_spikes.py: step_scheduler.on_spike.loss_factor step_scheduler.on_spike.grad_norm_factor
tests/unit/training/parts/test_spikes.py: step_scheduler.on_spike.window step_scheduler.on_spike.max_rollbacks
tests/distributed/faults/test_spikes.py: step_scheduler.on_spike
tests/unit/training/runs/test_hub_commits.py: init_from.revision init_from.0.revision tokenizer.revision
tests/unit/training/runs/test_hub_commits.py: processor.revision kto.reference_revision dpo.reference_revision
tests/unit/training/runs/test_reranker.py: reranker reranker.template reranker.temperature reranker.attention
tests/unit/training/runs/test_stragglers.py: hangs.straggler_share hangs.straggler_steps
"""
NO_EFFECT = """
checkpoint.best_metric_key | train_loss
checkpoint.best_mode | max
checkpoint.export_best | true
checkpoint.export_ema | true
checkpoint.keep_best | 2
checkpoint.keep_best | 2 | VALIDATED
checkpoint.keep_every_steps | 2
checkpoint.keep_steps | [3]
checkpoint.on_incompatible | sibling | checkpoint.restore_from=LATEST
checkpoint.remote.keep_best | 2
checkpoint.remote.keep_every_steps | 2
checkpoint.remote.keep_steps | [3]
checkpoint.scratch_dir | /tmp/scratch
compile.backend | eager
compile.dynamic | true
compile.fullgraph | true
compile.mode | max-autotune
compile.row_widths | 4
dataloader.pad_to_multiple_of | 16 | dataloader.collate_fn={_target_: SELF.shortened}; dataloader.padding_free=false
dataloader.padding_free | false | packed_sequence={}
distill.cache_dir | logits
distill.reverse_weight | 0.3
distributed.defer_gradient_sync | true | distributed.strategy=ddp
distributed.reshard_after_forward | false | distributed.strategy=ddp
dpo.label_smoothing | 0.2 | recipe=dpo; dpo={loss: ipo}
dpo.reference_revision | v2
ema.validate | true | ema={}
generation.system | a | VALIDATED; generation={prompts: [a], raw: true}
kto.reference_revision | v2
model.allow_missing | [model.norm.weight]
model.allow_unexpected | [extra]
model.new_tokens | init
model.revision | v2
model.trust_remote_code | true
pretrain.attend_across_documents | true | recipe=pretrain
pretrain.split_documents | true | recipe=pretrain
processor.revision | v2
step_scheduler.early_stopping | {metric: val_accuracy}
step_scheduler.mtbf_hours | 0.01
step_scheduler.on_spike | {} | checkpoint.enabled=false
tokenizer.revision | v2
"""
"""Keys whose condition does not hold with these words."""


# ---------------------------------------------------------------- one command


def left_in(directory: Path) -> dict[str, Any]:
    """The files of a run, with what does not depend on the clock."""
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        content: Any = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.suffix == ".jsonl" and path.name != "timeline.jsonl":
            content = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == "MANIFEST.json":
            trees = json.loads(path.read_text())["trees"]
            content = {name: tree["tensors"] for name, tree in trees.items()}
        elif path.suffix in (".gz", ".txt") and path.parent.name == "profile":
            trace = path.read_bytes()
            trace = gzip.decompress(trace) if path.suffix == ".gz" else trace
            content = [word in trace for word in (b"Input Dims", b"CPU Mem", b".py(")]
            content.append(trace.count(b"ProfilerStep#"))
        found[str(path.relative_to(directory))] = content
    return found


def without_times(record: dict[str, Any]) -> Any:
    times = {"timestamp", "tps", "tps_per_gpu", "mem", "mfu", "seconds"}
    if "event" in record:
        return record["event"]
    return {key: None if key in times else value for key, value in record.items()}


def outcome(directory: Path, words: list[str], key: str = "") -> Any:
    """What a command leaves or prints; its message if it is rejected."""
    directory.mkdir()
    os.chdir(directory)
    Path("recipe.yaml").write_text(RECIPE)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(["recipe.yaml", "--trust=tests", *(f"--{word}" for word in words)])
    text = errors.getvalue()
    if code in (EXIT_USAGE, EXIT_UNUSABLE):
        return text
    assert code != 1, text
    if "dry-run" in words:
        measured = rf"about [\d.]+ \w+ per rank|process [\d.]+ \w+|[\d.]+ \w+ free|{directory}"
        return [re.sub(measured, "", output.getvalue())]
    printed = re.findall(r"step +\d+/|done", text) if "logging." in key else None
    return code, left_in(directory), printed


# ---------------------------------------------------------------- the tests


def lines(table: str) -> Iterator[tuple[str, str, list[str]]]:
    """The key, the value and the other words of each line."""
    for name, meaning in {**NAMES, "SELF": __name__, "SIZES": SIZES}.items():
        table = re.sub(rf"\b{name}\b", meaning, table)
    for line in table.strip().splitlines():
        key, value, words, *_ = [*line.split(" | "), ""]
        yield key, value, words.split("; ") if words else []


CASES = [
    *lines(RUNS),
    *((key, value, [*words, "dry-run"]) for key, value, words in lines(DRY_RUNS)),
]
FURTHER = (
    *("checkpoint.keep_", "distill.", "distributed.", "embedding.", "lr_scheduler.", "optimizer."),
    *("peft.", "profile.", "qat.", "step_scheduler.early_stopping."),
)
"""Sections that tests of their kinds also use: their keys are left to `make test-all`."""
NAMED = {
    key: ROOT / file
    for line in ELSEWHERE.strip().splitlines()
    for file, _, keys in [line.partition(": ")]
    for key in keys.split()
}
_seen: dict[str, Any] = {}
"""The outcomes that several keys are compared with."""


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        pytest.param(
            *case, id=case[0], marks=pytest.mark.further if case[0].startswith(FURTHER) else ()
        )
        for case in CASES
    ],
)
def test_another_value_changes_what_happens_or_is_rejected(
    place: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, words: list[str]
) -> None:
    monkeypatch.chdir(place)
    name, given = key.removeprefix("!"), str(words)
    if "logging." in name:
        given += name
    if given not in _seen:
        _seen[given] = outcome(place / f"before-{name}", words, name)
    before, after = _seen[given], outcome(place / name, [*words, f"{name}={value}"], name)
    assert isinstance(before, str) == key.startswith("!"), before
    assert after != before
    assert not isinstance(after, str) or name.rpartition(".")[2] in after


def test_a_signal_of_the_recipe_stops_a_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = signal.getsignal(signal.SIGUSR2)
    words = [f"dataset={{_target_: {__name__}.samples, interrupts: true}}"]
    try:
        code = outcome(place / "stopped", [*words, "step_scheduler.stop_signals=[SIGUSR2]"])[0]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert code == EXIT_STOPPED


@pytest.mark.parametrize("key", NAMED)
def test_the_file_with_the_test_of_an_effect_names_the_key(key: str) -> None:
    assert re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", NAMED[key].read_text())


def test_every_key_is_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)

    def keys(node: Any, key: str) -> Iterator[str]:
        """The keys below a node of the schema. Sections that are always there have no line of their own."""
        if isinstance(node, list):
            for each in node:
                yield from keys(each, key)
        if not isinstance(node, dict):
            return
        if "$ref" in node:
            yield from keys(schema["definitions"][node["$ref"].rpartition("/")[2]], key)
        for name, below in node.get("properties", {}).items():
            yield f"{key}{name}"
            yield from keys(below, f"{key}{name}.")
        yield from keys([node.get(name) for name in ("allOf", "anyOf", "then", "else")], key)
        yield from keys(node.get("items"), f"{key}0.")

    always = {
        "checkpoint",
        "compile",
        "dataloader",
        "distributed",
        "extends",
        "logging",
        "step_scheduler",
    }
    found = {key for key in keys(schema, "") if "_target_" not in key}
    assert found - always == NAMED.keys() | {key.removeprefix("!") for key, _, _ in CASES}


@pytest.mark.parametrize("key", ["peft.method", "packed_sequence.strategy"])
def test_a_key_with_one_value_rejects_any_other(place: Path, key: str) -> None:
    section, _, _ = key.rpartition(".")
    message = outcome(place / key, [f"{section}={{}}", f"{key}=another", "peft.base_dir=base"])
    assert isinstance(message, str)
    assert key in message


@pytest.mark.parametrize(("key", "value", "words"), list(lines(NO_EFFECT)), ids=str)
def test_where_its_condition_is_not_met_a_changed_key_is_rejected_with_its_place(
    place: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, words: list[str]
) -> None:
    monkeypatch.chdir(place)
    (place / "recipe.yaml").write_text(RECIPE)
    given = {
        name: yaml.safe_load(text) for name, _, text in (word.partition("=") for word in words)
    }
    with pytest.raises(RecipeError) as caught:
        automodel_ckpt.load_recipe("recipe.yaml", {**given, key: yaml.safe_load(value)})
    assert f"{key} has no effect: " in str(caught.value)
    automodel_ckpt.load_recipe("recipe.yaml", given)  # with its default it is accepted


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint.save_consolidated=true"],
        ["checkpoint.export_best=true", *NAMES["VALIDATED"].split("; ")],
    ],
)
def test_an_export_of_a_model_that_has_none_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    message = outcome(tmp_path / "run", [f"model={{_target_: {__name__}.some_model}}", *words])
    assert "there is nothing to export" in message
    assert words[0].partition("=")[0] in message


def test_a_loss_of_the_router_for_a_model_without_one_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model.router_aux_loss=micro_batch", "dry-run"]
    assert "no router logits" in outcome(tmp_path / "run", words)


def test_a_run_without_checkpoints_names_the_keys_that_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["checkpoint.keep_last=2", "step_scheduler.ckpt_every_steps=3", "logging.sample_ids"]
    (text,) = outcome(tmp_path / "run", [*words, "seed=1", "checkpoint.enabled=false", "dry-run"])
    named = {
        *(word.partition("=")[0] for word in words),
        "step_scheduler.ckpt_every_epochs",
        "checkpoint.save_consolidated",
    }
    assert set(re.findall(r"[a-z_]+\.[a-z_]+", text.partition("no effect: ")[2])) == named
