"""No key of a recipe is accepted and ignored: another value changes what the program does, or it is an error.

``EFFECTS`` has an entry for each key of the schema; a key without one fails a test. An entry is one of these:

* :class:`Observed`: the part of the program that the key belongs to is built and used with two values of the key, and
  what is observed has to differ. A :class:`RecipeError` that names the key is an observation too: its rejection.
* :class:`Proven`: a test elsewhere, by its node id, because the effect takes a training run or several ranks. It has to
  be there and to name the key.
* :class:`OneValue`: the key has no other value yet; any other one has to be rejected.

What a key needs to have an effect is declared in the schema (``conditions``). Where it is missing, the same change of
value has to be rejected.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import LlamaConfig, PreTrainedTokenizerFast

from automodel_ckpt.base.device_copies import Mark
from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint import discover
from automodel_ckpt.cli.checks.rank_counts import mesh_sizes
from automodel_ckpt.cli.launch import launcher
from automodel_ckpt.config.callables.prepare import check_targets, resolve_recipe
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.load import LoadedRecipe, load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import hints_of, unused_without_checkpoints
from automodel_ckpt.config.tree.convert import find, members, section_type
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.loader import GlobalBatch
from automodel_ckpt.data.text_pairs import PairCollator
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.hub.background import Pushes
from automodel_ckpt.models.layers.adapter import add_adapters
from automodel_ckpt.models.layers.fake_quantization import FakeQuantization
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import Sizes, choose_strategy
from automodel_ckpt.parallel.pipeline import Pipeline
from automodel_ckpt.parallel.precision import float32_precision
from automodel_ckpt.recipes.distill import Distill, weights_of
from automodel_ckpt.recipes.embedding import Contrastive, EmbeddingFinetune
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.sequence_classification import SequenceClassification
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.forecast.memory import num_in_progress
from automodel_ckpt.training.kinds.embedding_pairs import PairsOverRanks
from automodel_ckpt.training.kinds.teacher import teacher_model
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.measure.measurements import build_step_scheduler
from automodel_ckpt.training.model.adapters import lora_of, quantization
from automodel_ckpt.training.model.deferred_model import DeferredModel, shard
from automodel_ckpt.training.model.sections import read_model_config, row_multiple
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.sample_preview import built_data
from automodel_ckpt.training.saves.checkpointing import check_export
from automodel_ckpt.training.values.records import Control, StepResult
from automodel_ckpt.training.values.run_log import RunLog, build_profiler
from automodel_ckpt.training.values.step_numbers import LaunchedStep, Readback
from tests.support import ranks
from tests.support.models import tiny
from tests.unit.checkpoint.jobs.test_background import AdapterFiles

ROOT = Path(__file__).parents[2]
TINY = "model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2"
RECIPE = f"""\
model: {{from_config: {{{TINY}, num_key_value_heads: 2, vocab_size: 24, max_position_embeddings: 32}}}}
dataset: {{_target_: {__name__}.samples}}
step_scheduler: {{global_batch_size: 4, local_batch_size: 2, max_steps: 12, ckpt_every_epochs: null}}
"""


# ---------------------------------------------------------------- what the recipes name


class Samples:
    """Seven samples of two to five tokens; the first token says whether a worker process made it."""

    main_process = os.getpid()

    def __init__(self, token: int = 5) -> None:
        self.token = token

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = [1 if os.getpid() == self.main_process else 2, *[self.token] * (1 + index % 4)]
        return {"input_ids": tokens, "labels": tokens}


def samples(token: int = 5) -> Samples:
    return Samples(token)


def some_model() -> nn.Module:
    return nn.Linear(2, 3)


def some_tokenizer() -> str:
    return "a tokenizer"


# ---------------------------------------------------------------- the recipe under observation


@dataclass
class Subject:
    """A loaded recipe and its object, as far as it is before any rank joins."""

    loaded: LoadedRecipe
    recipe: LLMFinetune
    directory: Path

    @property
    def config(self) -> RecipeConfig:
        config: RecipeConfig = self.loaded.config
        return config


def opened(directory: Path, words: Iterable[str]) -> Subject:
    path = directory / "recipe.yaml"
    path.write_text(RECIPE)
    line = parse(list(words))
    loaded = load_recipe(path, line.overrides, problems=line.problems)
    loaded = check_targets(loaded, Trust(["tests"]))
    recipe = LLMFinetune(loaded.config, config_yaml=loaded.to_yaml())
    recipe.layout = RankLayout(0, Sizes(), 0, torch.device("cpu"), None)  # type: ignore[arg-type]
    recipe.tokenizer = recipe.preprocessor = None
    recipe.step_scheduler = StepScheduler(loaded.config.step_scheduler, planned_steps=12)
    return Subject(loaded, recipe, directory)


# ---------------------------------------------------------------- observations


def batches(it: Subject) -> Any:
    """Sample numbers and contents of the global batches of an epoch."""
    loader = it.recipe.build_dataloader(it.config.dataset)
    return [(batch.sample_ids, [flat(part) for part in batch.micro_batches]) for batch in loader]


def flat(batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in batch.items()}


def with_data(it: Subject) -> Any:
    """The recipe with its data."""
    return built_data(LLMFinetune, {"config": it.config, "config_yaml": it.loaded.to_yaml()})


def validation_sets(it: Subject) -> list[str]:
    return list(with_data(it).validation_sets)


def validation(it: Subject) -> bool:
    return with_data(it).validation_batches is not None


def packs(it: Subject) -> int:
    return len(it.recipe.build_dataset(it.config.dataset))


def built(it: Subject) -> nn.Module:
    """The model without the values of its weights, as a dry run builds it."""
    it.recipe.is_dry_run = True
    read_config(it)
    return it.recipe.build_trainable().model


def read_config(it: Subject) -> Any:
    """The configuration of the model, which the recipe gets too."""
    it.recipe.model_config = read_model_config(
        it.config, it.recipe.layout, auto_class=LLMFinetune.auto_class, preprocessor=None
    )
    return it.recipe.model_config


def model(it: Subject) -> Any:
    """Class, shapes, types and switches of the model, and which parameters are trained."""
    made: Any = built(it)
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in made.named_parameters()]
    recomputed = [
        name
        for name, module in made.named_modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    return (
        [type(module) for module in made.modules()],
        parameters,
        recomputed,
        getattr(made, "config", None) and made.config._attn_implementation,
    )


def rows(it: Subject) -> Any:
    """Shapes of the rows that the model sees of three samples."""
    read_config(it)
    it.recipe.trainable = it.recipe.build_trainable()
    micro_batch = it.recipe.build_collate_fn()([samples()[index] for index in (0, 1, 3)])
    it.recipe.loss_fn = it.recipe.build_loss_fn()
    rows_of = it.recipe.build_objective().rows_of
    return {name: tuple(tensor.shape) for name, tensor in rows_of(micro_batch).items()}


def pairs(query_prompt: str = "", document_prompt: str = "") -> list[dict[str, list[int]]]:
    """Four pairs of texts, two of which have the same document; their first tokens tell the lengths of the prompts."""
    query, document = 1 + len(query_prompt), 1 + len(document_prompt)
    made = []
    for number in (5, 7, 9, 9):
        tokens = [query, number, 3, document, 10, number // 9, 4]
        made.append({"input_ids": tokens, "labels": [-100, *tokens[1:3], -100, *tokens[4:]]})
    return made


def contrastive(it: Subject) -> list[float]:
    """The losses of two micro-batches of a global batch of pairs."""
    recipe = EmbeddingFinetune(it.config, config_yaml="")
    recipe.layout, recipe.tokenizer = it.recipe.layout, None
    samples_of_pairs = recipe.build_dataset(it.config.dataset)
    batches_of_pairs = [PairCollator(0)(samples_of_pairs[part : part + 2]) for part in (0, 2)]
    torch.manual_seed(1)
    model = EmbeddingFinetune.auto_class.from_config(read_config(it)).train()
    unused: Any = None
    objective = Contrastive(Trainable(model), recipe.layout, unused)
    objective.section, objective.rng = recipe.section, StatefulRNG(0, 0, (1, 1, 1, 1))
    objective.over_ranks = PairsOverRanks(recipe.layout)
    objective.start_batch(batches_of_pairs)
    return [objective.loss(batch).loss.item() for batch in batches_of_pairs]


def rounding(it: Subject) -> Any:
    """What a quantized layer computes in the second step."""
    section = it.config.qat
    assert section is not None
    torch.manual_seed(1)
    model: Any = LLMFinetune.auto_class.from_config(
        LlamaConfig(hidden_size=256, intermediate_size=256, num_hidden_layers=1, vocab_size=8)
    )
    changed = FakeQuantization(model, section.scheme, section.group_size, section.start_step)
    changed.start(2)
    return model.model.layers[0].self_attn.q_proj(torch.ones(1, 256)).sum().item()


def adapters(it: Subject) -> Any:
    """The layers of an adapted model with their values, what of it is trained, and what its description says."""
    torch.manual_seed(1)
    model_config = read_config(it)
    base = LLMFinetune.auto_class.from_config(model_config).to(model_config.dtype)
    assert it.config.peft is not None
    adapted = add_adapters(base, lora_of(it.config.peft), task_type="CAUSAL_LM", num_base_rows=24)
    values = [
        (name, p.dtype, p.requires_grad, p.double().sum().item())
        for name, p in adapted.model.named_parameters()
    ]
    scales = [
        (name, m.scaling)
        for name, m in adapted.model.named_modules()
        if hasattr(m, "scaling") and "lora" in str(type(m))
    ]
    return repr(adapted.model), values, scales, adapted.peft_config["bias"]


def classes(it: Subject) -> Any:
    """The labels of a classifier in its config, and what computes its loss."""
    recipe = SequenceClassification(it.loaded.config, config_yaml="")
    recipe.layout, recipe.tokenizer, recipe.preprocessor = it.recipe.layout, None, None
    config = recipe.build_model_config()
    assert config is not None
    return config.id2label, config.problem_type, recipe.objective_class


def quantized(it: Subject) -> Any:
    return quantization(it.config, it.recipe.layout)


def updated(it: Subject) -> Any:
    """Weights after two steps of the optimizer with clipped gradients."""
    it.recipe.model = nn.Linear(2, 2)
    for parameter in it.recipe.model.parameters():
        nn.init.ones_(parameter)
    optimizer = it.recipe.optimizer = it.recipe.build_optimizer()
    unused: Any = None
    recipe: Any = it.recipe
    recipe.objective = Objective(Trainable(recipe.model), recipe.layout, unused)
    recipe.config = replace(it.config, generation=None, evaluation=None)
    recipe.checkpointer = recipe.validation_batches = recipe.lr_scheduler = None
    for name in ("stop_request", "dataloader", "rng", "saves", "run_log"):
        setattr(recipe, name, unused)
    loop = TrainingLoop(recipe)
    for size in (3.0, -0.1):
        for parameter in it.recipe.model.parameters():
            parameter.grad = torch.full_like(parameter, size)
        loop.clip_gradients()
        optimizer.step()
    return [parameter.tolist() for parameter in it.recipe.model.parameters()]


def rates(it: Subject) -> list[float]:
    """The learning rates of twelve steps."""
    it.recipe.model = nn.Linear(2, 2)
    it.recipe.optimizer = it.recipe.build_optimizer()
    schedule = it.recipe.build_lr_scheduler()
    seen = []
    for _ in range(12):
        seen.append(it.recipe.optimizer.param_groups[0]["lr"])
        it.recipe.optimizer.step()
        if schedule is not None:
            schedule.step()
    return seen


def distillation(it: Subject) -> Any:
    """The parts of the loss of a distillation, and its teacher."""
    Distill(it.config, config_yaml=it.loaded.to_yaml()).check_sections()
    assert it.config.distill is not None
    return weights_of(it.config.distill), teacher_model(it.config)


def loss(it: Subject) -> float:
    function = it.recipe.build_loss_fn()
    return float(function(torch.tensor([[1.0, 3.0]]), torch.tensor([0])))


def timeline(it: Subject) -> list[Any]:
    """What is due after each step of a run in which a step takes a minute, a save a second, and an epoch is five steps;
    every third validation is the best. The loss falls, the accuracy is always the same, and no step is finite from the
    seventh on."""
    now = [0.0]
    scheduler = build_step_scheduler(it.config, 5, clock=lambda: now[0])
    seen: list[Any] = []
    while not scheduler.is_finished() and scheduler.step < 40:
        scheduler.start_step()
        now[0] += 60
        scheduler.finish_step(
            epoch=scheduler.step // 5,
            epochs_done=(scheduler.step + 1) // 5,
            num_samples=4,
            num_tokens=9,
        )
        due = scheduler.apply_clock(scheduler.read_clock(), stop=False)
        if due.validate:
            scheduler.note_metrics({"val_loss": 1 / scheduler.step, "val_accuracy": 0.5})
        better = due.validate and scheduler.step % 3 == 0 and it.config.step_scheduler.ckpt_on_best
        if due.save or better:
            now[0] += 1
            scheduler.note_save(1.0)
            scheduler.note_published(1.0, 1.0)
        seen.append((due.validate, due.save or better, due.last))
        if scheduler.note_finite(scheduler.step < 7):
            break
    return seen


def stop_signals(it: Subject) -> Any:
    """The signals that the launcher takes for a stop."""
    return launcher.stop_signals(it.loaded)


def parts_of_rows(it: Subject) -> int:
    """Into how many parts a row is cut between two tensor parallel ranks."""
    it.recipe.layout = dataclasses.replace(it.recipe.layout, sizes=Sizes(tp=2))
    return row_multiple(it.config, it.recipe.layout)


def base(it: Subject) -> list[Any]:
    """The files after the base of adapters was made, which a dry run does not do."""
    read_config(it)
    it.recipe.build_trainable()
    return tree(it.directory)


def sizes(it: Subject) -> Any:
    """How four ranks share the work."""
    made = mesh_sizes(it.loaded, 4)
    return made, choose_strategy(it.config.distributed.strategy, made)


def compiled(it: Subject) -> Any:
    """What torch.compile is asked to do with the layers of a model."""
    asked: list[Any] = []

    class Layer(nn.Module):
        def compile(self, **options: Any) -> None:
            asked.append(options)

        def forward(self) -> None:
            raise NotImplementedError

    model = nn.Sequential(nn.ModuleList([Layer()]), nn.Linear(1, 1))
    shard(DeferredModel(model), it.config, it.recipe.layout)
    return asked


def step_line(it: Subject) -> list[str]:
    """The fields of a line of training.jsonl."""
    run_log = RunLog(it.recipe.config.logging, it.recipe.layout)
    try:
        run_log.open(it.directory, lambda: None)
        run_log.measure_device(torch.float32)
        control = Control(1, 1, 1, False, flops=1e9)
        device = torch.device("cpu")
        numbers = Readback({}, device)
        batch = GlobalBatch(0, 0, 0, [1, 2], [], last_of_epoch=True)
        step = LaunchedStep(1, batch, control, 1.0, Mark(device), numbers, [], False)
        run_log.log_step(step, StepResult(1.0, 1.0, 1.0))
        run_log.flush()
    finally:
        run_log.close_files(lease_is_lost=False)
        run_log.close()
    return list(json.loads((it.directory / "training.jsonl").read_text()))


def profiled(it: Subject) -> Any:
    """Which steps this rank traces, how, and where to."""
    profiler = build_profiler(it.config, it.recipe.layout)
    return None if profiler is None else (profiler._settings, profiler._directory)


def followed(it: Subject) -> bool:
    """Whether a process feeds trackers with what the run logs."""
    run_log = RunLog(it.recipe.config.logging, it.recipe.layout)
    try:
        run_log.start_trackers(it.directory, 0)
        return run_log._tracking is not None
    finally:
        run_log.close()


def vocabulary(it: Subject) -> Any:
    """The tokens of the tokenizer."""
    it.recipe.check_sections()
    tokenizer = it.recipe.build_tokenizer()
    return getattr(tokenizer, "vocab_size", tokenizer)


def recipe_class(it: Subject) -> str:
    return resolve_recipe(it.config.recipe, Trust()).__name__


def small_run(**attributes: Any) -> SimpleNamespace:
    """What there is to save of the smallest run."""
    made = nn.Linear(2, 2)
    return SimpleNamespace(model=made, optimizer=torch.optim.AdamW(made.parameters()), **attributes)


def saved(it: Subject, steps: int = 1) -> Any:
    """What is in the run's directory after a few saves, in each of which the training loss grows and the validation
    loss falls."""
    made = small_run()
    checkpointer = it.recipe.build_checkpointer()
    if checkpointer is None:
        return "nothing"
    checkpointer.assets["model"] = AdapterFiles()
    waited = []
    for step in range(1, steps + 1):
        losses = {"step": step, "val_loss": 1 / step, "train_loss": float(step)}
        report = checkpointer.save(
            discover(made),
            step=step,
            epoch=0,
            config_yaml="",
            progress={},
            losses=losses,
            validated=True,
            last=step == steps,
        )
        waited.append(report.published)
    checkpointer.close()
    return waited, tree(it.directory)


def tree(directory: Path) -> list[Any]:
    paths = sorted(directory.rglob("*"))
    links = [(path.name, os.readlink(path)) for path in paths if path.is_symlink()]
    return [
        str(path.relative_to(directory)) for path in paths if "recipe.yaml" not in path.name
    ] + links


def saved_often(it: Subject) -> Any:
    return saved(it, steps=4)


def loaded_again(it: Subject, *, now: SimpleNamespace | None = None, damage: bool = False) -> Any:
    """Which checkpoint a later start loads, of two; with *damage* the newest has a flipped bit."""
    plain = dataclasses.replace(
        it.config.checkpoint, restore_from=None, on_incompatible="error", allow_missing_state=[]
    )
    asked, it.config.checkpoint = it.config.checkpoint, plain
    saved(it, steps=2)
    it.config.checkpoint = asked
    if damage:
        (file,) = it.directory.glob("checkpoints/epoch_0_step_2/model/shard-*")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    checkpointer = it.recipe.build_checkpointer()
    assert checkpointer is not None
    try:
        resumed = checkpointer.load(discover(now or small_run()))
        return resumed and resumed.step
    finally:
        checkpointer.close()


def loaded_damaged(it: Subject) -> Any:
    return loaded_again(it, damage=True)


def loaded_with_more(it: Subject) -> Any:
    return loaded_again(it, now=small_run(counter=tiny.Counter(3)))


def loaded_into_another_model(it: Subject) -> Any:
    other = nn.Linear(3, 3)
    return loaded_again(it, now=SimpleNamespace(model=other))


def run_directory(it: Subject) -> Any:
    return it.recipe.config.checkpoint.checkpoint_dir


REMOTE = "--checkpoint.remote={url: 'file:///tmp/a'}"


MEMORY = "--checkpoint.memory={every_steps: 2}"


def copied_to_memory(it: Subject) -> Any:
    """Where checkpoints in memory are, and the first step that is saved there."""
    it.recipe.layout = it.recipe.join_ranks()
    try:
        it.recipe.checkpointer = it.recipe.build_checkpointer()
        memory = it.recipe.memory
        if memory is None:
            return None
        memory.start(None, 0)
        memory.remove()
        return memory.directory.parent, memory._next_step
    finally:
        it.recipe.close()


SPIKES = "--step_scheduler.on_spike={window: 5}"


def spikes(it: Subject) -> Any:
    """When the run goes back, and how far."""
    return it.recipe.config.step_scheduler.on_spike


def uploads(it: Subject) -> Any:
    """The job of the process that uploads checkpoints, but for the token of this start."""
    it.recipe.layout = it.recipe.join_ranks()
    try:
        checkpointer = it.recipe.build_checkpointer()
        uploads = checkpointer.transfers.uploads
        return uploads and {**uploads.job, "token": ""}
    finally:
        it.recipe.close()


HUB = "--hub.repo=org/name"


def pushes(it: Subject) -> Any:
    """The job of the process that uploads to the Hub."""
    section = it.config.hub
    return section and Pushes(it.directory, section, makes_exports=False).job


def joined(it: Subject) -> Any:
    """What a process is set to once it has joined its ranks."""
    it.recipe.layout = it.recipe.join_ranks()
    log = logging.getLogger("automodel_ckpt")
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2))
    sharded = shard(DeferredModel(model), it.config, it.recipe.layout).model
    groups = [
        m._get_fsdp_state()._fsdp_param_group
        for m in sharded.modules()
        if hasattr(m, "_get_fsdp_state")
    ]
    try:
        return (
            log.getEffectiveLevel(),
            it.recipe.run_log.progress.every_seconds,
            it.recipe.run_log.progress.every_steps,
            torch.are_deterministic_algorithms_enabled(),
            float32_precision(it.config, "cuda"),
            torch.rand(2).tolist(),
            [
                group and (group.post_forward_mesh_info is not None, policy_of(group).param_dtype)
                for group in groups
            ],
        )
    finally:
        it.recipe.close()


def policy_of(group: Any) -> Any:
    """The mixed precision of a group of FSDP2: its own, or since torch 2.15 that of each parameter."""
    return group.mp_policy if hasattr(group, "mp_policy") else group.fsdp_params[0].mp_policy


def pipelined(it: Subject) -> Any:
    """Torch's schedule of a stage, and the micro-batches whose activations are counted there."""
    two, section = Sizes(pp=2), it.config.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        pipeline = Pipeline(
            nn.Linear(2, 2),
            0,
            2,
            dist.group.WORLD,
            torch.empty(0, 2, device="meta"),
            torch.device("cpu"),
            section.pp_schedule,
        )
        schedule = type(pipeline._new_schedule(True, 4)).__name__
        return schedule, num_in_progress(it.config, two)
    finally:
        dist.destroy_process_group()


def pretrained(directory: Path) -> None:
    """Model directories: two complete ones of different sizes, one that lacks a tensor and one that has one more."""
    for name, width in (("plain", 8), ("other", 16), ("less", 8), ("more", 8)):
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=24,
            max_position_embeddings=32,
        )
        LLMFinetune.auto_class.from_config(config).save_pretrained(directory / name)
    for name, change in (
        ("less", lambda tensors: tensors.pop("model.norm.weight")),
        ("more", lambda tensors: tensors.update(extra=torch.ones(2))),
    ):
        file = directory / name / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def tokenizer(directory: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory / "tokenizer")


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Observed:
    """*observe* differs between the value *before* (None: the default) and *after*, with the overrides *given*.

    *also*: overrides that come with *after* only. *files* are written first.
    """

    observe: Callable[[Subject], Any]
    after: str
    given: tuple[str, ...] = ()
    before: str | None = None
    also: tuple[str, ...] = ()
    files: Callable[[Path], None] | None = None
    default_is_rejected: bool = False


@dataclass(frozen=True)
class Proven:
    """The test at *node* shows the effect; *after* is another value than the default."""

    node: str
    after: str


@dataclass(frozen=True)
class OneValue:
    """There is nothing to choose from."""


PRETRAINED = ("--model.from_config=null",)
VALIDATED = (f"--validation_dataset={{_target_: {__name__}.samples}}",)
VALIDATED_OFTEN = (*VALIDATED, "--step_scheduler.val_every_steps=1")
EARLY = (*VALIDATED_OFTEN, "--step_scheduler.early_stopping={}")
KEEP = ("--checkpoint.keep_last=1", *VALIDATED)
FP8_RUN = (
    "tests/distributed/models/test_fp8.py::test_a_sharded_run_resumes_exactly_and_its_export_loads"
)
QAT = "--qat={}"
PROFILE = "--profile={}"
DISTILLED = ("--recipe=distill", "--distill.teacher.from_pretrained=teacher")
REVISIONS = "tests/unit/training/runs/test_hub_commits.py::test_names_are_read_at_their_revisions"
DISTILLS = "tests/distributed/kinds/test_distill.py::"
COMPLETIONS = (
    "tests/contract/test_completions.py::test_every_key_of_generation_changes_the_completions"
)
KTO_RUN = "tests/distributed/kinds/test_kto.py::test_ten_steps_are_those_of_trl"
KTO_REFERENCE = "tests/distributed/kinds/test_kto.py::test_a_named_reference_is_another_model"
REWARD_RUN = "tests/distributed/kinds/test_reward_model.py::test_ten_steps_are_those_of_trl"
RERANKER_RUN = (
    "tests/unit/training/runs/test_reranker.py::"
    "test_the_loss_is_that_of_choosing_the_first_document_and_exports_have_its_scores"
)
DPO = "tests/distributed/kinds/test_dpo.py::"
DPO_RUN = DPO + "test_losses_and_rewards_are_those_of_trl"
HARNESS = "tests/contract/test_benchmarks.py::"
HARNESS_RUN = HARNESS + "test_they_select_the_best_checkpoint_and_end_the_run"
HARNESS_KEYS = HARNESS + "test_each_key_reaches_the_library"
EMBEDDING = ("--recipe=embedding", f"--dataset={{_target_: {__name__}.pairs}}")
EMA = "tests/distributed/models/test_weight_average.py::"
EMA_STEPS = EMA + "test_it_starts_at_a_step_and_changes_every_few_steps"
EMA_RUN = EMA + "test_ten_steps_and_the_export_are_bit_equal_to_plain_pytorch"
QAT_RUN = (
    "tests/distributed/models/test_qat.py::"
    "test_a_run_is_the_same_on_more_ranks_resumes_exactly_and_begins_to_round_when_asked"
)
ADAPTED = ("--peft={}", "--peft.base_dir=base")
SHARDED = ("--distributed.strategy=fsdp2",)
GROUP = ("--optimizer.groups=[{params: [bias], lr: 0.5}]",)
COMPILED = ("--compile.enabled", "--compile.backend=eager")
SCHEDULE = ("--lr_scheduler={name: cosine}",)
MTP_FILES = (
    "tests/distributed/kinds/test_mtp.py::"
    "test_files_have_the_layers_under_the_familys_names_and_are_read_again_bit_by_bit"
)
MTP_LOSSES = (
    "tests/distributed/kinds/test_mtp.py::"
    "test_losses_and_gradients_are_those_of_plain_pytorch_for_one_sample_after_another"
)
TRAINING = "tests/distributed/kinds/test_training.py::"
START = "tests/distributed/resume/test_init_from.py::"
SOURCES = START + "test_several_sources_fill_their_modules_and_a_later_one_replaces_an_earlier_one"

PRETRAIN = "tests/unit/training/parts/test_pretrain_losses.py::test_the_losses_of_ten_steps_are_those_of_a_plain_loop"
CLASSIFIES = (
    "--recipe=sequence_classification",
    "--model.config_overrides={pad_token_id: 0}",
)
HANGS = "tests/unit/training/parts/test_hang_watch.py::test"
STRAGGLERS = "tests/unit/training/runs/test_stragglers.py::test"
EFFECTS: dict[str, Observed | Proven | OneValue] = {
    "recipe": Observed(recipe_class, "vlm_finetune"),
    "seed": Observed(batches, "7"),
    "dropout": Proven(
        "tests/distributed/kinds/test_dpo.py::"
        "test_preferences_are_learned_without_dropout_unless_the_recipe_wants_it",
        "true",
    ),
    "model": Observed(model, f"{{_target_: {__name__}.some_model}}"),
    "model.from_pretrained": Observed(model, "other", PRETRAINED, before="plain", files=pretrained),
    "model.from_config": Observed(model, f"{{{TINY}, vocab_size: 32}}"),
    "model.revision": Observed(
        model, "v2", ("--model.from_pretrained=plain", *PRETRAINED), files=pretrained
    ),
    "model.trust_remote_code": Proven(
        "tests/contract/test_remote_code.py::test_the_recipe_alone_runs_no_code_of_a_repository",
        "true",
    ),
    "model.config_overrides": Observed(model, "{hidden_size: 16}"),
    "model.dtype": Observed(model, "bfloat16"),
    "model.attn_implementation": Observed(model, "eager"),
    "model.fused_layers": Observed(model, "true"),
    "model.freeze": Observed(model, "['*embed_tokens*']"),
    "model.freeze_if_present": Observed(model, "['*embed_tokens*', audio_tower]"),
    "model.activation_checkpointing": Observed(model, "true"),
    "model.vocab_size": Observed(model, "40"),
    "model.neftune_alpha": Proven(
        "tests/distributed/models/test_neftune.py::test_a_killed_run_draws_the_same_noise_and_validation_has_none",
        "5",
    ),
    "model.router_aux_loss": Proven(
        "tests/distributed/parallel/test_router_loss.py::test_it_can_be_left_out_or_computed_for_each_micro_batch_and_no_pipeline_drops_it",
        "micro_batch",
    ),
    "model.mtp": Proven(MTP_FILES, "{}"),
    "model.mtp.loss_scaling_factor": Proven(MTP_LOSSES, "0.3"),
    "model.mtp.num_depths": Proven(MTP_LOSSES, "2"),
    "model.mtp.repeat_layer": Proven(MTP_LOSSES, "true"),
    "model.mtp.weights": Proven(
        "tests/distributed/kinds/test_mtp.py::"
        "test_a_base_without_the_layers_is_an_error_unless_new_ones_are_wanted",
        "new",
    ),
    "model.new_tokens": Proven(
        START + "test_a_larger_tokenizer_gets_room_and_the_export_says_so", "init"
    ),
    "model.allow_missing": Observed(
        model,
        "[model.norm.weight]",
        ("--model.from_pretrained=less", *PRETRAINED),
        files=pretrained,
        default_is_rejected=True,
    ),
    "model.allow_unexpected": Observed(
        model,
        "[extra]",
        ("--model.from_pretrained=more", *PRETRAINED),
        files=pretrained,
        default_is_rejected=True,
    ),
    "init_from": Proven(
        START + "test_every_form_of_a_checkpoint_gives_the_same_weights", "{path: base}"
    ),
    "init_from.path": Proven(
        START + "test_every_form_of_a_checkpoint_gives_the_same_weights", "base"
    ),
    "init_from.revision": Proven(REVISIONS, "v2"),
    "init_from.0.revision": Proven(REVISIONS, "v2"),
    "init_from.allow_missing": Proven(
        START + "test_missing_and_unexpected_weights_stop_the_run_unless_a_pattern_allows_them",
        "['*bias']",
    ),
    "init_from.allow_unexpected": Proven(
        START + "test_missing_and_unexpected_weights_stop_the_run_unless_a_pattern_allows_them",
        "['*bias']",
    ),
    "init_from.0.path": Proven(SOURCES, "base"),
    "init_from.0.allow_missing": Proven(SOURCES, "['*bias']"),
    "init_from.0.allow_unexpected": Proven(SOURCES, "['*bias']"),
    "init_from.0.strip": Proven(SOURCES, "encoder"),
    "init_from.0.into": Proven(SOURCES, "model.layers.0"),
    "tokenizer": Observed(vocabulary, f"{{_target_: {__name__}.some_tokenizer}}"),
    "tokenizer.from_pretrained": Observed(vocabulary, "tokenizer", files=tokenizer),
    "processor": Observed(vocabulary, f"{{_target_: {__name__}.some_tokenizer}}"),
    "tokenizer.revision": Proven(REVISIONS, "v2"),
    "processor.revision": Proven(REVISIONS, "v2"),
    "processor.kwargs": Proven(
        "tests/distributed/kinds/test_vlm.py::test_settings_of_the_processor_are_those_of_the_recipe",
        "{do_convert_rgb: true}",
    ),
    "processor.from_pretrained": Proven(
        "tests/distributed/kinds/test_vlm.py::test_the_vocabulary_of_fresh_weights_is_the_recipes",
        "processor",
    ),
    "kto": Proven(KTO_RUN, "{}"),
    "kto.beta": Proven(KTO_RUN, "0.5"),
    "kto.desirable_weight": Proven(KTO_RUN, "2.0"),
    "kto.undesirable_weight": Proven(KTO_RUN, "1.4"),
    "kto.reference_revision": Proven(REVISIONS, "v2"),
    "kto.reference": Proven(KTO_REFERENCE, "other"),
    "reward_model": Proven(REWARD_RUN, "{}"),
    "reward_model.center_coefficient": Proven(REWARD_RUN, "0.01"),
    "dpo": Proven(DPO_RUN, "{}"),
    "dpo.beta": Proven(DPO_RUN, "0.5"),
    "dpo.loss": Proven(DPO_RUN, "ipo"),
    "dpo.label_smoothing": Proven(DPO_RUN, "0.2"),
    "dpo.reference_revision": Proven(REVISIONS, "v2"),
    "dpo.reference": Proven(DPO + "test_a_named_reference_is_another_model", "other"),
    "dpo.precompute": Proven(
        DPO + "test_precomputed_scores_give_the_losses_of_a_reference_in_memory", "true"
    ),
    "orpo": Proven(DPO_RUN, "{}"),
    "orpo.beta": Proven(DPO_RUN, "0.25"),
    "orpo.learn_prompt": Proven(
        DPO + "test_orpo_learns_the_prompt_unless_learn_prompt_is_false", "false"
    ),
    "reranker": Proven(RERANKER_RUN, "{}"),
    "reranker.template": Proven(RERANKER_RUN, "'{{ query }} {{ document }}'"),
    "reranker.temperature": Proven(RERANKER_RUN, "0.5"),
    "reranker.attention": Proven(RERANKER_RUN, "bidirectional"),
    "embedding": Observed(contrastive, "{temperature: 0.5}", EMBEDDING),
    "embedding.pooling": Observed(contrastive, "last", EMBEDDING),
    "embedding.attention": Proven(
        "tests/unit/training/optim/test_embedding.py::test_recomputed_activations_have_the_same_attention",
        "bidirectional",
    ),
    "embedding.normalize": Observed(contrastive, "false", EMBEDDING),
    "embedding.temperature": Observed(contrastive, "0.5", EMBEDDING),
    "embedding.symmetric": Observed(contrastive, "true", EMBEDDING),
    "embedding.negatives": Observed(contrastive, "micro_batch", EMBEDDING),
    "embedding.hide_equal_texts": Observed(contrastive, "false", EMBEDDING),
    "embedding.query_prompt": Observed(contrastive, "find", EMBEDDING),
    "embedding.document_prompt": Observed(contrastive, "see", EMBEDDING),
    "ema": Proven(EMA_RUN, "{}"),
    "ema.decay": Proven(EMA_STEPS, "0.75"),
    "ema.start_step": Proven(EMA_STEPS, "2"),
    "ema.update_every_steps": Proven(EMA_STEPS, "2"),
    "ema.validate": Proven(EMA_RUN, "true"),
    "checkpoint.export_ema": Proven(EMA_RUN, "true"),
    "evaluation": Proven(
        HARNESS + "test_the_library_must_be_installed_and_task_files_be_trusted",
        "{harness: {tasks: [a]}}",
    ),
    "evaluation.harness": Proven(HARNESS_RUN, "{tasks: [a]}"),
    "evaluation.harness.tasks": Proven(HARNESS_KEYS, "[a]"),
    "evaluation.harness.every_steps": Proven(HARNESS_RUN, "2"),
    "evaluation.harness.limit": Proven(HARNESS_KEYS, "3"),
    "evaluation.harness.num_fewshot": Proven(HARNESS_KEYS, "2"),
    "evaluation.harness.include_path": Proven(HARNESS_KEYS, "tasks"),
    "evaluation.harness.batch_size": Proven(HARNESS_KEYS, "4"),
    "evaluation.harness.chat_template": Proven(HARNESS_KEYS, "true"),
    "generation": Proven(COMPLETIONS, "{prompts: [a]}"),
    "generation.prompts": Proven(COMPLETIONS, "[a]"),
    "generation.system": Proven(COMPLETIONS, "a"),
    "generation.raw": Proven(COMPLETIONS, "true"),
    "generation.max_new_tokens": Proven(COMPLETIONS, "3"),
    "generation.temperature": Proven(COMPLETIONS, "3"),
    "distill": Observed(
        distillation,
        "{teacher: {from_pretrained: teacher}}",
        ("--recipe=distill",),
        default_is_rejected=True,
    ),
    "distill.teacher": Observed(
        distillation,
        "{_target_: automodel_ckpt.examples.data.pair_counts.pair_counts}",
        ("--recipe=distill",),
        before="{from_pretrained: teacher}",
    ),
    "distill.teacher.from_pretrained": Observed(
        distillation, "other", ("--recipe=distill",), before="teacher"
    ),
    "distill.teacher.revision": Observed(distillation, "v2", DISTILLED),
    "distill.teacher.trust_remote_code": Observed(distillation, "true", DISTILLED),
    "distill.teacher.dtype": Observed(distillation, "bfloat16", DISTILLED),
    "distill.teacher.attn_implementation": Observed(distillation, "eager", DISTILLED),
    "distill.divergence": Observed(distillation, "reverse_kl", DISTILLED),
    "distill.reverse_weight": Observed(
        distillation, "0.3", (*DISTILLED, "--distill.divergence=mixed")
    ),
    "distill.kd_ratio": Observed(distillation, "0.7", DISTILLED),
    "distill.temperature": Observed(distillation, "2", DISTILLED),
    "distill.offload_teacher": Proven(
        DISTILLS + "test_an_offloaded_teacher_has_the_same_losses", "true"
    ),
    "distill.top_k": Proven(
        DISTILLS
        + "test_all_tokens_of_a_cache_give_the_same_losses_and_later_starts_need_no_teacher",
        "64",
    ),
    "distill.cache_dir": Proven(
        DISTILLS
        + "test_all_tokens_of_a_cache_give_the_same_losses_and_later_starts_need_no_teacher",
        "logits",
    ),
    "qat": Proven(QAT_RUN, "{scheme: W8A8}"),
    "qat.scheme": Observed(rounding, "W8A8", (QAT,)),
    "qat.group_size": Observed(rounding, "16", (QAT,)),
    "qat.start_step": Observed(rounding, "3", (QAT,)),
    "fp8": Proven(FP8_RUN, "{emulate: true}"),
    "fp8.recipe": Proven(
        "tests/distributed/models/test_fp8.py::"
        "test_a_converted_model_has_the_same_state_and_about_the_same_logits",
        "rowwise",
    ),
    "fp8.exclude": Proven(
        "tests/distributed/models/test_fp8.py::"
        "test_layers_of_the_decoder_with_suitable_widths_are_converted",
        "['*.down_proj']",
    ),
    "fp8.emulate": Proven(
        "tests/distributed/models/test_fp8.py::"
        "test_a_device_without_fp8_is_an_error_unless_it_is_emulated",
        "true",
    ),
    "classification": Observed(classes, "{num_labels: 2}", CLASSIFIES, default_is_rejected=True),
    "classification.labels": Observed(classes, "[a, b]", CLASSIFIES, default_is_rejected=True),
    "classification.num_labels": Observed(classes, "3", CLASSIFIES, default_is_rejected=True),
    "classification.problem": Observed(
        classes, "multi_label", (*CLASSIFIES, "--classification.num_labels=2")
    ),
    "peft": Observed(model, "{base_dir: base}"),
    "peft.method": OneValue(),
    "peft.r": Observed(adapters, "4", ADAPTED),
    "peft.alpha": Observed(adapters, "32", ADAPTED),
    "peft.rank_pattern": Observed(adapters, "{q_proj: 4}", ADAPTED),
    "peft.alpha_pattern": Observed(adapters, "{q_proj: 4}", ADAPTED),
    "peft.dropout": Observed(adapters, "0.1", ADAPTED),
    "peft.target_modules": Observed(adapters, "[q_proj]", ADAPTED),
    "peft.target_parameters": Proven(
        "tests/distributed/parallel/test_expert_adapters.py::test_adapters_on_experts_alone_need_no_layers",
        "['*.experts.*']",
    ),
    "peft.exclude_modules": Observed(adapters, "[q_proj]", ADAPTED),
    "peft.exclude_if_present": Observed(adapters, "[q_proj, vision_tower]", ADAPTED),
    "peft.modules_to_save": Observed(adapters, "[lm_head]", ADAPTED),
    "peft.use_dora": Observed(adapters, "true", ADAPTED),
    "peft.use_rslora": Observed(adapters, "true", ADAPTED),
    "peft.init": Observed(adapters, "gaussian", ADAPTED),
    "peft.bias": Observed(adapters, "all", (*ADAPTED, "--model.from_config.attention_bias")),
    "peft.ensure_weight_tying": Observed(
        adapters,
        "false",
        (
            *ADAPTED,
            "--model.from_config.tie_word_embeddings",
            "--peft.modules_to_save=[embed_tokens]",
        ),
    ),
    "peft.dtype": Observed(adapters, "base", (*ADAPTED, "--model.from_config.dtype=bfloat16")),
    "peft.base_dir": Observed(base, "other", ("--peft={}",), before="base"),
    "peft.quantize_base": Observed(quantized, "nf4", ADAPTED),
    "distributed.strategy": Observed(sizes, "ddp"),
    "distributed.dp_size": Observed(sizes, "2"),
    "distributed.dp_replicate_size": Observed(sizes, "2"),
    "distributed.tp_size": Observed(sizes, "2"),
    "distributed.tp_plan": Proven(
        "tests/distributed/parallel/test_strategies.py::test_a_plan_by_hand_trains_as_no_plan_does",
        f"{{_target_: {__name__}.some_model}}",
    ),
    "distributed.sequence_parallel": Observed(parts_of_rows, "true", ("--distributed.tp_size=2",)),
    "distributed.pp_size": Observed(sizes, "2"),
    "distributed.pp_schedule": Observed(pipelined, "gpipe", ("--distributed.pp_size=2",)),
    "distributed.cp_size": Observed(sizes, "2"),
    "distributed.ep_size": Proven(
        "tests/distributed/parallel/test_expert_parallel.py::"
        "test_a_run_logs_what_one_rank_does_and_resumes_exactly_on_any_ranks",
        "2",
    ),
    "distributed.backend": Proven(
        TRAINING + "test_what_is_wrong_with_the_recipe_is_refused_before_training", "gloo"
    ),
    "distributed.timeout_minutes": Proven(
        "tests/distributed/faults/test_signals.py::"
        "test_a_rank_that_hangs_in_its_data_set_is_named_when_the_others_have_waited_in_vain",
        "5",
    ),
    "distributed.reshard_after_forward": Observed(joined, "false", SHARDED),
    "distributed.cpu_offload": Proven(
        "tests/distributed/parallel/test_strategies.py::"
        "test_what_the_model_or_the_machine_cannot_do_is_refused_before_weights_are_made",
        "true",
    ),
    "distributed.defer_gradient_sync": Proven(
        "tests/distributed/parallel/test_accumulation.py::test_gradients_are_reduced_as_often_as_the_recipe_asks",
        "true",
    ),
    "distributed.mixed_precision": Observed(joined, "bfloat16", SHARDED),
    "dataset": Observed(batches, f"{{_target_: {__name__}.samples, token: 6}}"),
    "validation_dataset": Observed(validation, f"{{_target_: {__name__}.samples}}"),
    "validation_datasets": Observed(validation_sets, f"{{a: {{_target_: {__name__}.samples}}}}"),
    "dataloader.shuffle": Observed(batches, "false"),
    "dataloader.num_workers": Observed(batches, "1"),
    "dataloader.collate_fn": Observed(
        batches, "{_target_: automodel_ckpt.data.collate.PadCollator, pad_token_id: 7}"
    ),
    "dataloader.drop_last": Observed(batches, "true"),
    "dataloader.pad_to_multiple_of": Observed(rows, "16"),
    "dataloader.padding_free": Observed(rows, "false"),
    "packed_sequence": Observed(packs, "{size: 16}"),
    "packed_sequence.size": Observed(packs, "8", ("--packed_sequence={}",)),
    "packed_sequence.strategy": OneValue(),
    "pretrain": Proven(PRETRAIN, "{}"),
    "pretrain.split_documents": Proven(PRETRAIN, "true"),
    "pretrain.attend_across_documents": Proven(PRETRAIN, "true"),
    "pretrain.z_loss": Proven(
        "tests/distributed/kinds/test_pretrain.py::test_the_z_loss_is_a_metric_and_part_of_the_gradient",
        "1e-4",
    ),
    "pretrain.base_width": Proven(
        "tests/distributed/kinds/test_pretrain.py::test_rates_and_initial_values_by_width", "64"
    ),
    "optimizer": Observed(updated, "{_target_: torch.optim.SGD, lr: 0.1}"),
    "optimizer.lr": Observed(updated, "0.1"),
    "optimizer.betas": Observed(updated, "[0.5, 0.5]"),
    "optimizer.eps": Observed(updated, "1"),
    "optimizer.weight_decay": Observed(updated, "0.5"),
    "optimizer.no_decay": Observed(updated, "none", ("--optimizer.weight_decay=0.5",)),
    "optimizer.groups": Observed(updated, "[{params: [bias], lr: 0.5}]"),
    "optimizer.on_resume": Proven(
        "tests/unit/training/parts/test_resume_settings.py::test_a_resume_applies_rejects_or_reports_what_its_recipe_changed",
        "recipe",
    ),
    "optimizer.groups.0.params": Observed(updated, "[weight]", GROUP, before="[bias]"),
    "optimizer.groups.0.lr": Observed(updated, "0.1", GROUP),
    "optimizer.groups.0.betas": Observed(updated, "[0.5, 0.5]", GROUP),
    "optimizer.groups.0.eps": Observed(updated, "1", GROUP),
    "optimizer.groups.0.weight_decay": Observed(updated, "0.25", GROUP),
    "lr_scheduler": Observed(rates, "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}"),
    "lr_scheduler.name": Observed(rates, "linear", SCHEDULE),
    "lr_scheduler.warmup_steps": Observed(rates, "4", SCHEDULE),
    "lr_scheduler.warmup_ratio": Observed(rates, "0.5", SCHEDULE),
    "lr_scheduler.warmup_from": Observed(
        rates, "0.5", (*SCHEDULE, "--lr_scheduler.warmup_steps=4")
    ),
    "lr_scheduler.decay_steps": Observed(rates, "6", SCHEDULE),
    "lr_scheduler.kwargs": Observed(rates, "{num_cycles: 2}", SCHEDULE),
    "loss_fn": Observed(loss, "{_target_: torch.nn.CrossEntropyLoss, label_smoothing: 0.5}"),
    "clip_grad_norm": Observed(
        updated, "0.1", ("--optimizer={_target_: torch.optim.SGD, lr: 0.1}",)
    ),
    "compile.enabled": Observed(compiled, "true", also=("--compile.backend=eager",)),
    "compile.backend": Observed(compiled, "eager", COMPILED, before="aot_eager"),
    "compile.mode": Observed(compiled, "max-autotune", COMPILED),
    "compile.fullgraph": Observed(compiled, "true", COMPILED),
    "compile.dynamic": Observed(compiled, "true", COMPILED),
    "compile.row_widths": Proven(
        "tests/distributed/models/test_compile.py::test_rows_of_few_widths_have_the_same_losses_and_few_graphs",
        "4",
    ),
    "deterministic": Observed(joined, "true"),
    "float32_precision": Observed(joined, "highest"),
    "step_scheduler.global_batch_size": Observed(batches, "6"),
    "step_scheduler.local_batch_size": Observed(batches, "4"),
    "step_scheduler.num_epochs": Observed(timeline, "3", ("--step_scheduler.max_steps=null",)),
    "step_scheduler.max_steps": Observed(timeline, "4"),
    "step_scheduler.max_time": Observed(timeline, "00:05:00"),
    "step_scheduler.ckpt_every_steps": Observed(timeline, "3"),
    "step_scheduler.mtbf_hours": Observed(
        timeline,
        "0.01",
        (
            "--step_scheduler.ckpt_every_steps=auto",
            "--step_scheduler.num_epochs=4",
            "--step_scheduler.max_steps=null",
        ),
    ),
    "step_scheduler.ckpt_every_epochs": Observed(
        timeline, "1", ("--step_scheduler.num_epochs=2",), before="null"
    ),
    "step_scheduler.ckpt_every_minutes": Observed(timeline, "3"),
    "step_scheduler.ckpt_on_best": Observed(
        timeline, "true", (*VALIDATED, "--step_scheduler.val_every_steps=1")
    ),
    "step_scheduler.val_every_steps": Observed(timeline, "2", VALIDATED),
    "step_scheduler.early_stopping": Observed(
        timeline, "{metric: val_accuracy}", VALIDATED_OFTEN, before="null"
    ),
    "step_scheduler.early_stopping.metric": Observed(timeline, "val_accuracy", EARLY),
    "step_scheduler.early_stopping.patience": Observed(
        timeline, "2", (*EARLY, "--step_scheduler.early_stopping.metric=val_accuracy")
    ),
    "step_scheduler.early_stopping.min_delta": Observed(timeline, "0.5", EARLY),
    "step_scheduler.stop_after_nonfinite_steps": Observed(timeline, "2"),
    "step_scheduler.on_spike": Observed(spikes, "{}"),
    "step_scheduler.on_spike.rollback": Observed(spikes, "2", (SPIKES,)),
    "step_scheduler.on_spike.skip": Observed(spikes, "2", (SPIKES,)),
    "step_scheduler.on_spike.loss_factor": Observed(spikes, "3", (SPIKES,)),
    "step_scheduler.on_spike.grad_norm_factor": Observed(spikes, "3", (SPIKES,)),
    "step_scheduler.on_spike.window": Observed(spikes, "7", (SPIKES,)),
    "step_scheduler.on_spike.max_rollbacks": Observed(spikes, "3", (SPIKES,)),
    "step_scheduler.stop_signals": Observed(stop_signals, "[SIGUSR2]"),
    "checkpoint.enabled": Observed(saved, "false"),
    "checkpoint.checkpoint_dir": Observed(saved, "elsewhere"),
    "checkpoint.model_save_format": Observed(saved, "torch_save"),
    "checkpoint.model_layout": Observed(saved, "hf"),
    "checkpoint.save_consolidated": Observed(saved, "false"),
    "checkpoint.is_async": Observed(saved, "true"),
    "checkpoint.incremental": Proven(
        "tests/unit/checkpoint/jobs/test_incremental.py::test_nothing_is_shared_if_that_is_switched_off",
        "false",
    ),
    "checkpoint.export_best": Proven(
        "tests/distributed/saves/test_save_failures.py::"
        "test_export_best_exports_what_lowest_val_points_to_and_a_killed_final_export_is_made_up_for",
        "true",
    ),
    "checkpoint.average_last": Proven(
        "tests/distributed/saves/test_save_failures.py::"
        "test_average_last_averages_the_newest_checkpoints_and_a_finished_run_makes_up_for_it",
        "3",
    ),
    "checkpoint.restore_from": Observed(loaded_again, "epoch_0_step_1"),
    "checkpoint.save_optimizer": Observed(saved, "false"),
    "checkpoint.best_metric_key": Observed(saved_often, "train_loss", VALIDATED),
    "checkpoint.best_mode": Observed(saved_often, "max", VALIDATED),
    "checkpoint.keep_last": Observed(saved_often, "1"),
    "checkpoint.keep_best": Observed(saved_often, "2", KEEP),
    "checkpoint.keep_every_steps": Observed(saved_often, "2", KEEP),
    "checkpoint.keep_steps": Observed(saved_often, "[3]", KEEP),
    "checkpoint.on_save_failure": Proven(
        "tests/distributed/saves/test_save_failures.py::test_with_continue_training_goes_on_and_the_exit_code_tells",
        "continue",
    ),
    "checkpoint.verify": Observed(loaded_damaged, "none"),
    "checkpoint.allow_missing_state": Observed(
        loaded_with_more, "[counter]", default_is_rejected=True
    ),
    "checkpoint.allow_changed_model": Proven(
        "tests/unit/checkpoint/state/test_model_config.py::test_a_resume_with_another_model_of_the_same_shapes_is_rejected_unless_it_is_allowed",
        "true",
    ),
    "hub": Observed(pushes, "{repo: org/name}"),
    "hub.repo": Observed(pushes, "org/other", (HUB,)),
    "hub.push": Observed(pushes, "every", (HUB,)),
    "hub.private": Observed(pushes, "false", (HUB,)),
    "hub.revision": Observed(pushes, "v2", (HUB,)),
    "hub.card": Observed(pushes, str(Path(__file__).parents[2] / "README.md"), (HUB,)),
    "hub.base_model": Observed(pushes, "org/base", (HUB,)),
    "hub.license": Observed(pushes, "mit", (HUB,)),
    "hub.required": Proven(
        "tests/unit/hub/test_pusher.py::test_what_is_not_uploaded_at_the_end_is_a_warning_or_an_error",
        "true",
    ),
    "checkpoint.remote": Observed(uploads, REMOTE.partition("=")[2]),
    "checkpoint.remote.url": Observed(uploads, "file:///tmp/b", (REMOTE,)),
    "checkpoint.remote.options": Observed(uploads, "{anon: true}", (REMOTE,)),
    "checkpoint.remote.required": Proven(
        "tests/unit/checkpoint/remote/test_remote.py::"
        "test_the_end_of_a_run_waits_for_a_store_that_is_required",
        "true",
    ),
    "checkpoint.remote.wait_after_signal_seconds": Proven(
        "tests/unit/checkpoint/remote/test_remote.py::"
        "test_the_time_for_uploads_after_a_signal_begins_with_the_signal",
        "5",
    ),
    "checkpoint.remote.keep_last": Observed(uploads, "2", (REMOTE,)),
    "checkpoint.remote.keep_best": Observed(
        uploads, "2", (REMOTE, "--checkpoint.remote.keep_last=1")
    ),
    "checkpoint.remote.keep_every_steps": Observed(
        uploads, "2", (REMOTE, "--checkpoint.remote.keep_last=1")
    ),
    "checkpoint.remote.keep_steps": Observed(
        uploads, "[3]", (REMOTE, "--checkpoint.remote.keep_last=1")
    ),
    "checkpoint.scratch_dir": Observed(
        run_directory, "/tmp/scratch", ("--checkpoint.checkpoint_dir=file:///tmp/a",)
    ),
    "checkpoint.remote.max_mb_per_second": Observed(uploads, "2", (REMOTE,)),
    "checkpoint.remote.num_threads": Observed(uploads, "2", (REMOTE,)),
    "checkpoint.verify_replicas": Proven(
        "tests/distributed/faults/test_replica_check.py::"
        "test_a_run_ends_before_it_saves_replicas_that_differ",
        "true",
    ),
    "checkpoint.memory": Observed(copied_to_memory, MEMORY.partition("=")[2]),
    "checkpoint.memory.every_steps": Observed(copied_to_memory, "7", (MEMORY,)),
    "checkpoint.memory.directory": Observed(copied_to_memory, "/tmp", (MEMORY,)),
    "checkpoint.memory.replicas": Proven(
        "tests/distributed/resume/test_memory_nodes.py::test_nodes_that_are_lost_absent_or_slow",
        "0",
    ),
    "checkpoint.memory.max_mb_per_second": Proven(
        "tests/distributed/resume/test_memory_nodes.py::test_nodes_that_are_lost_absent_or_slow",
        "50",
    ),
    "checkpoint.on_incompatible": Observed(
        loaded_into_another_model, "sibling", default_is_rejected=True
    ),
    "logging.level": Observed(joined, "warning"),
    "logging.log_every_seconds": Observed(joined, "3"),
    "logging.log_every_steps": Observed(joined, "3"),
    "logging.peak_tflops": Observed(step_line, "0.5"),
    "logging.sample_ids": Observed(step_line, "true"),
    "logging.trackers": Observed(followed, "{tensorboard: {}}"),
    "profile": Observed(profiled, "{}"),
    "profile.start_step": Observed(profiled, "5", (PROFILE,)),
    "profile.num_steps": Observed(profiled, "5", (PROFILE,)),
    "profile.warmup_steps": Observed(profiled, "2", (PROFILE,)),
    "profile.ranks": Observed(profiled, "[1]", (PROFILE,)),
    "profile.record_shapes": Observed(profiled, "true", (PROFILE,)),
    "profile.with_stack": Observed(profiled, "true", (PROFILE,)),
    "profile.memory": Observed(profiled, "true", (PROFILE,)),
    "profile.directory": Observed(profiled, "traces", (PROFILE,)),
    "hangs": Proven(f"{HANGS}_the_section_can_be_disabled", "null"),
    "hangs.min_seconds": Proven(
        f"{HANGS}_only_a_step_far_beyond_the_median_and_the_limit_hangs", "60"
    ),
    "hangs.factor": Proven(f"{HANGS}_only_a_step_far_beyond_the_median_and_the_limit_hangs", "20"),
    "hangs.restart": Proven(f"{HANGS}_a_hang_is_reported_or_the_ranks_are_restarted", "false"),
    "hangs.straggler_share": Proven(f"{STRAGGLERS}_the_section_sets_what_is_slow", "0.9"),
    "hangs.straggler_steps": Proven(f"{STRAGGLERS}_the_section_sets_what_is_slow", "7"),
}


# ---------------------------------------------------------------- the tests


def keys() -> list[str]:
    """Every key of the schema."""
    return list(_keys(RecipeConfig))


def _keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a section but the names of sections that are always there: those are their keys. The keys of a
    list's sections are those of its first item."""
    for field in dataclasses.fields(schema):
        kinds, key = members(hints_of(schema)[field.name]), prefix + field.name
        section = section_type(kinds)
        is_plug_in = any(isinstance(kind, type) and issubclass(kind, Target) for kind in kinds)
        if section is None or type(None) in kinds or is_plug_in:
            yield key
        if section is not None:
            yield from _keys(section, f"{key}.")
        if (listed := find(kinds, list)) and (
            item := section_type(members(typing.get_args(listed)[0]))
        ):
            yield from _keys(item, f"{key}.0.")


def test_every_key_has_an_entry_and_every_entry_a_key() -> None:
    assert sorted(EFFECTS) == sorted(keys())


def observation(entry: Observed, directory: Path, words: list[str]) -> Any:
    """What is observed, or the message of the rejection."""
    directory.mkdir()
    os.chdir(directory)
    if entry.files is not None:
        entry.files(directory)
    try:
        return entry.observe(opened(directory, words))
    except AutomodelError as error:
        return "rejected", str(error)


def compare(key: str, entry: Observed, directory: Path) -> str | None:
    """Why the key's two values are not shown to differ; None where they are."""
    first = [f"--{key}={entry.before}"] if entry.before is not None else []
    before = observed_once(entry, directory, (*entry.given, *first))
    if is_rejection(before) != entry.default_is_rejected:
        return f"the value to compare with: {before}"
    after = observation(
        entry, directory / "after", [*entry.given, f"--{key}={entry.after}", *entry.also]
    )
    if is_rejection(after) and key.rpartition(".")[2] not in after[1]:
        return f"the rejection does not name the key: {after[1]}"
    return "nothing changed" if after == before else None


_seen: dict[tuple[Any, tuple[str, ...]], Any] = {}


def observed_once(entry: Observed, directory: Path, words: tuple[str, ...]) -> Any:
    """What is observed with *words*, which many keys are compared with; twice the same, as it has to be."""
    if (entry.observe, words) not in _seen:
        first, again = (
            observation(entry, directory / name, list(words)) for name in ("before", "again")
        )
        assert first == again or is_rejection(first), (
            f"the observation differs without a change: {first} and {again}"
        )
        _seen[entry.observe, words] = first
    return _seen[entry.observe, words]


def is_rejection(seen: Any) -> bool:
    return isinstance(seen, tuple) and seen[0] == "rejected"


IN_A_GROUP = (joined, pipelined)
JOINED = [
    key
    for key, entry in EFFECTS.items()
    if isinstance(entry, Observed) and entry.observe in IN_A_GROUP
]
HERE = [
    key
    for key, entry in EFFECTS.items()
    if isinstance(entry, Observed) and entry.observe not in IN_A_GROUP
]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("key", HERE)
def test_another_value_changes_what_happens_or_is_rejected(directory: Path, key: str) -> None:
    entry = EFFECTS[key]
    assert isinstance(entry, Observed)
    assert compare(key, entry, directory) is None


def test_another_value_changes_what_a_process_is_set_to(directory: Path) -> None:
    def in_a_process_of_its_own() -> dict[str, str | None]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        outcomes = {}
        for key in JOINED:
            entry = EFFECTS[key]
            assert isinstance(entry, Observed)
            (directory / key).mkdir()
            outcomes[key] = compare(key, entry, directory / key)
        return outcomes

    (outcomes,) = ranks.run(in_a_process_of_its_own, 1, init=False)
    assert outcomes == dict.fromkeys(JOINED)


@pytest.mark.parametrize(
    "key", [key for key, entry in EFFECTS.items() if isinstance(entry, Proven)]
)
def test_the_test_that_proves_an_effect_is_there_and_names_the_key(key: str) -> None:
    entry = EFFECTS[key]
    assert isinstance(entry, Proven)
    file, _, name = entry.node.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    found = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1, f"{entry.node} is not there"
    first = min([found[0].lineno, *(decorator.lineno for decorator in found[0].decorator_list)])
    text = "\n".join(source.splitlines()[first - 1 : found[0].end_lineno])
    assert re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", text), (
        f"{entry.node} does not name {key}"
    )


@pytest.mark.parametrize(
    "key", [key for key, entry in EFFECTS.items() if isinstance(entry, OneValue)]
)
def test_a_key_with_one_value_rejects_any_other(directory: Path, key: str) -> None:
    section, _, _ = key.rpartition(".")
    with pytest.raises(RecipeError, match=re.escape(key)):
        opened(directory, [f"--{section}={{}}", f"--{key}=another", "--peft.base_dir=base"])


def conditions(schema: type[Any] = RecipeConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, condition) of each key that the schema says needs something else to have an effect."""
    for condition in getattr(schema, "conditions", ()):
        yield from ((prefix + key, condition) for key in condition.keys)
    for name, hint in hints_of(schema).items():
        if section := section_type(members(hint)):
            yield from conditions(section, f"{prefix}{name}.")


UNMET: dict[str, tuple[str, ...]] = {
    "step_scheduler.on_spike": ("--checkpoint.enabled=false",),
    "distributed.reshard_after_forward": ("--distributed.strategy=ddp",),
    "distributed.defer_gradient_sync": ("--distributed.strategy=ddp",),
    "dataloader.pad_to_multiple_of": (
        f"--dataloader.collate_fn={{_target_: {__name__}.samples}}",
        "--dataloader.padding_free=false",
    ),
    "dataloader.padding_free": ("--packed_sequence={}",),
    "checkpoint.on_incompatible": ("--checkpoint.restore_from=LATEST",),
    "checkpoint.keep_best": VALIDATED,
    "dpo.label_smoothing": ("--recipe=dpo", "--dpo={loss: ipo}"),
    "ema.validate": ("--ema={}",),
    "generation.system": (*VALIDATED, "--generation={prompts: [a], raw: true}"),
    "pretrain.split_documents": ("--recipe=pretrain",),
    "pretrain.attend_across_documents": ("--recipe=pretrain",),
}
"""Overrides without which a key's condition would hold; the others are not met by the defaults."""


@pytest.mark.parametrize(("key", "condition"), list(conditions()), ids=str)
def test_where_its_condition_is_not_met_a_changed_key_is_rejected_with_its_place(
    directory: Path, key: str, condition: Any
) -> None:
    entry = EFFECTS[key]
    assert not isinstance(entry, OneValue)
    words = [*UNMET.get(key, ()), f"--{key}={entry.after}"]
    with pytest.raises(RecipeError) as caught:
        opened(directory, words)
    assert f"{key} has no effect: " in str(caught.value)
    assert f"where:  --{key}" in str(caught.value)
    opened(directory, UNMET.get(key, ()))  # with its default it is accepted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.save_consolidated", "true"),
        ("checkpoint.export_best", "true"),
        ("hub", "{repo: org/name}"),
    ],
)
def test_an_export_of_a_model_that_has_none_is_rejected(
    directory: Path, key: str, value: str
) -> None:
    it = opened(
        directory,
        [f"--model={{_target_: {__name__}.some_model}}", f"--{key}={value}", *VALIDATED],
    )
    it.recipe.trainable = Trainable(built(it))
    with pytest.raises(RecipeError, match=f"there is nothing to export[\\s\\S]*{key}"):
        check_export(it.config, it.recipe.build_assets())


def test_a_loss_of_the_router_for_a_model_without_one_is_rejected(directory: Path) -> None:
    with pytest.raises(RecipeError, match="no router logits"):
        built(opened(directory, ["--model.router_aux_loss=micro_batch"]))


def test_a_run_without_checkpoints_names_the_keys_that_have_no_effect(directory: Path) -> None:
    words = [
        "--checkpoint.keep_last=2",
        "--step_scheduler.ckpt_every_steps=3",
        "--logging.sample_ids",
        "--seed=1",
    ]
    named = [
        "checkpoint.keep_last",
        "logging.sample_ids",
        "step_scheduler.ckpt_every_epochs",
        "step_scheduler.ckpt_every_steps",
    ]
    assert unused_without_checkpoints(opened(directory, words).config) == []
    assert (
        sorted(
            unused_without_checkpoints(
                opened(directory, [*words, "--checkpoint.enabled=false"]).config
            )
        )
        == named
    )
