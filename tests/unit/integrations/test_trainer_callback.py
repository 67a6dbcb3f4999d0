"""CheckpointCallback resumes a run of transformers' Trainer with the losses of an uninterrupted run."""

import shutil
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from automodel_ckpt import Checkpointer, CheckpointOptions
from automodel_ckpt.checkpoint import HFAssets
from automodel_ckpt.cli import ckpt
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.integrations.transformers import CheckpointCallback
from tests.support.models.sizes import model_sizes

NUM_SAMPLES = 20
STEPS_PER_EPOCH = 5


class Killed(Exception):
    """Stands for the end of the process."""


class Record(TrainerCallback):
    """Records the losses, and ends the run after a step."""

    def __init__(self, last: int | None) -> None:
        self.last = last
        self.losses: dict[int, float] = {}
        self.evaluations: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]
        if "eval_loss" in logs:
            self.evaluations[state.global_step] = logs["eval_loss"]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.last:
            raise Killed


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 32, (NUM_SAMPLES, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(
    output: Path,
    *callbacks: TrainerCallback,
    last: int | None = None,
    kind: type[Trainer] = Trainer,
    model: Any = None,
    eval_dataset: Any = None,
    compute_metrics: Any = None,
    **settings: Any,
) -> tuple[Trainer, Record]:
    config = LlamaConfig(
        **model_sizes(vocab=32, hidden=16, inner=16, layers=1, heads=2),
        attention_dropout=0.2,
        initializer_range=0.3,
    )
    if model is None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    record = Record(last)
    arguments = {
        "learning_rate": 1e-2,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "metric_for_best_model": "eval_loss",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    made = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    trainer = kind(
        model,
        made(str(output), **(arguments | settings)),
        train_dataset=samples(),
        eval_dataset=eval_dataset or samples()[:4],
        compute_metrics=compute_metrics,
        callbacks=[*callbacks, record],
    )
    return trainer, record


def run(
    directory: Path,
    options: CheckpointOptions | None = None,
    last: int | None = None,
    saved: Collection[str] = (),
    not_saved: Collection[str] = (),
    **settings: Any,
) -> tuple[Trainer, Record]:
    """Train with checkpoints in *directory* until the gradient of the step after *last*."""
    checkpoints = CheckpointCallback(directory, options, saved=saved, not_saved=not_saved)
    stop = EarlyStoppingCallback(100)
    output = directory.with_name("output")
    trainer, record = make_trainer(output, checkpoints, stop, last=last, **settings)
    start = checkpoints.resume(trainer)
    try:
        trainer.train(resume_from_checkpoint=start)
    except Killed:
        checkpoints.close()
    return trainer, record


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Record]:
    output = tmp_path_factory.mktemp("trainer")
    trainer, record = make_trainer(output, EarlyStoppingCallback(100), save_strategy="no")
    trainer.train()
    assert list(record.losses) == list(range(1, 16))
    return trainer, record


@pytest.mark.parametrize(
    ("settings", "last", "restarts_after"),
    [
        ({}, 4, 3),  # within the first epoch
        ({"save_strategy": "epoch"}, 7, 5),  # at the end of an epoch
    ],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    tmp_path: Path,
    uninterrupted: tuple[Trainer, Record],
    settings: dict[str, Any],
    last: int,
    restarts_after: int,
) -> None:
    reference, expected = uninterrupted
    options = CheckpointOptions(is_async=True, best_metric_key="eval_loss")
    _, before = run(tmp_path / "run", options, last=last, **settings)
    trainer, after = run(tmp_path / "run", options, **settings)
    assert list(after.losses) == list(range(restarts_after + 1, 16))
    assert before.losses | after.losses == expected.losses
    assert before.evaluations | after.evaluations == expected.evaluations
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, reference.model.get_parameter(name)), name
    logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == list(range(1, 16))
    assert not (tmp_path / "output").exists() or not list((tmp_path / "output").glob("checkpoint*"))


def test_a_checkpoint_is_verified_ranked_and_exported(tmp_path: Path) -> None:
    options = CheckpointOptions(keep_last=1, keep_best=1, best_metric_key="eval_loss")
    trainer, record = run(tmp_path / "run", options)
    best = min(record.evaluations, key=lambda step: record.evaluations[step])
    kept = {path.name for path in (tmp_path / "run").glob("epoch_*")}
    epoch = (best - 1) // STEPS_PER_EPOCH
    assert kept == {f"epoch_{epoch}_step_{best}", "epoch_2_step_15"}
    assert (tmp_path / "run/LOWEST_VAL").resolve().name == f"epoch_{epoch}_step_{best}"
    assert ckpt.main(["verify", str(tmp_path / "run")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/LATEST/model/consolidated")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, exported.get_parameter(name)), name


def test_settings_that_are_not_supported_are_errors(tmp_path: Path) -> None:
    checkpoints = CheckpointCallback(tmp_path / "run")
    trainer, _ = make_trainer(tmp_path, checkpoints)
    with pytest.raises(RecipeError, match="does not know its trainer"):
        trainer.train()
    trainer, _ = make_trainer(tmp_path, checkpoints, save_strategy="best")
    with pytest.raises(RecipeError, match="LOWEST_VAL is the best checkpoint"):
        checkpoints.resume(trainer)


def test_the_arguments_of_the_trainer_decide_what_is_kept(tmp_path: Path) -> None:
    trainer, record = run(tmp_path / "run", save_total_limit=2, load_best_model_at_end=True)
    best = min(record.evaluations, key=lambda step: record.evaluations[step])
    steps = {int(path.name.rpartition("_")[2]) for path in (tmp_path / "run").glob("epoch_*")}
    assert steps == {best, 12, 15}
    exported = tmp_path / "best"
    assert ckpt.main(["export", str(tmp_path / "run/LOWEST_VAL"), "-o", str(exported)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


class Order(Sampler[int]):
    """An order of its generator in each epoch, as TRL's RepeatSampler has."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(NUM_SAMPLES, generator=self.generator).tolist()

    def __len__(self) -> int:
        return NUM_SAMPLES


class Buffered(Trainer):
    """Trains several times on what it has drawn, as trainers of reinforcement learning do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_calls = 0
        self.noise: list[torch.Tensor] = []
        self.recent: deque[float] = deque(maxlen=2)

    def _get_train_sampler(self, *_: Any) -> Order:
        return Order()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        if self.num_calls % 8 == 0:
            self.noise = [torch.rand(()) for _ in range(2)]
        scale = self.noise[self.num_calls % 2]
        self.num_calls += 1
        loss = super().compute_loss(model, inputs, *args, **kwargs) * scale
        self.recent.append(loss.item())
        return loss * (1 + sum(self.recent))


NAMES = ("noise", "num_calls", "recent")


def test_a_subclass_with_state_is_resumed_if_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"kind": Buffered}
    _, whole = run(tmp_path / "whole", saved=NAMES, **made)
    _, before = run(tmp_path / "run", last=8, **made)
    with pytest.raises(RecipeError, match="noise, num_calls, recent") as caught:
        run(tmp_path / "run", **made)
    assert "not_saved=" in str(caught.value)
    shutil.copytree(tmp_path / "run", tmp_path / "without")
    _, after = run(tmp_path / "run", saved=NAMES, **made)
    assert before.losses | after.losses == whole.losses
    _, without = run(tmp_path / "without", not_saved=NAMES, **made)
    assert before.losses | without.losses != whole.losses


class Averaged(Trainer):
    """Has a second model, an average."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ema = torch.nn.Linear(2, 2)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            self.ema.weight.add_(1)
        return super().training_step(*args, **kwargs)


def test_a_module_is_restored_whenever_it_is_named(tmp_path: Path) -> None:
    made: dict[str, Any] = {"kind": Averaged, "load_best_model_at_end": True}
    whole, _ = run(tmp_path / "whole", saved=("ema",), **made)
    run(tmp_path / "run", last=8, **made)
    with pytest.raises(RecipeError, match="ema"):
        run(tmp_path / "run", **made)
    # Here it is among the attributes; from the next checkpoint on, it has a directory.
    named = ("ema",)
    run(tmp_path / "run", last=11, saved=named, **made)
    shutil.copytree(tmp_path / "run", tmp_path / "without", symlinks=True)
    resumed, _ = run(tmp_path / "run", saved=named, **made)
    assert torch.equal(resumed.ema.weight, whole.ema.weight)
    without, _ = run(tmp_path / "without", not_saved=named, **made)
    assert without.state.global_step == 15
    assert not torch.equal(without.ema.weight, whole.ema.weight)


def test_the_best_model_is_chosen_by_the_arguments_of_the_trainer(tmp_path: Path) -> None:
    seen: list[int] = []

    def rises(_: Any) -> dict[str, float]:
        seen.append(1)
        return {"accuracy": len(seen) / 100}

    settings: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_first_accuracy",
        "eval_dataset": {"first": samples()[:4], "second": samples()[4:8]},
        "compute_metrics": rises,
    }
    run(tmp_path / "run", CheckpointOptions(keep_last=1), **settings)
    assert (tmp_path / "run/LOWEST_VAL").resolve().name == "epoch_2_step_15"
    # Without an evaluation there is none; a limit of 0 removes none.
    run(tmp_path / "none", load_best_model_at_end=True, eval_delay=99, save_total_limit=0)
    assert len(list((tmp_path / "none").glob("epoch_*"))) == 5


class Ask(TrainerCallback):
    """Asks for a save of step 4, and can end the run in the evaluation of step 6."""

    is_killed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = control.should_save or state.global_step == 4
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.is_killed and state.global_step == 6:
            raise Killed


def test_other_callbacks_and_a_second_start_in_the_process(tmp_path: Path) -> None:
    checkpoints, ask = CheckpointCallback(tmp_path / "run"), Ask()
    for is_killed in (True, False):
        ask.is_killed = is_killed
        trainer, _ = make_trainer(tmp_path / "output", checkpoints, ask)
        start = checkpoints.resume(trainer)
        try:
            trainer.train(resume_from_checkpoint=start)
        except Killed:
            # A save of step 6 is due, but the next start continues after step 4.
            continue
    steps = {int(path.name.rpartition("_")[2]) for path in (tmp_path / "run").glob("epoch_*")}
    assert steps == {3, 4, 6, 9, 12, 15}
    assert not list((tmp_path / "output").glob("checkpoint*"))


def test_early_stopping_continues_and_a_run_that_is_over_makes_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(name: str, last: int | None = None, **settings: Any) -> dict[int, float]:
        checkpoints, stop = CheckpointCallback(tmp_path / name), EarlyStoppingCallback(3)
        output = tmp_path / "output"
        trainer, record = make_trainer(output, checkpoints, stop, last=last, **settings)
        try:
            trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))
        except Killed:
            checkpoints.close()
        return record.losses

    # The loss falls, and this takes it for worse.
    rises = {"greater_is_better": True, "load_best_model_at_end": True}
    whole = start("whole", **rises)
    assert list(whole) == list(range(1, 13))
    assert start("run", last=7, **rises) | start("run", **rises) == whole
    assert start("run", **rises) == {}

    # Within an epoch, the Trainer would make one more step.
    assert list(start("short", max_steps=7)) == list(range(1, 8))
    assert start("short", max_steps=7) == {}
    assert list(start("short", max_steps=8)) == [8]
    assert "callbacks changed: Record.losses, Record.evaluations. If" in caplog.text


def test_generation_in_evaluations_is_no_state(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    for last in (8, None):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)
        )
        trainer, _ = run(tmp_path / "run", last=last, kind=Seq2SeqTrainer, model=model)
    assert trainer.state.global_step == 15


def test_an_average_of_several_losses_continues(tmp_path: Path) -> None:
    _, whole = run(tmp_path / "whole", logging_steps=5)
    _, before = run(tmp_path / "run", last=8, logging_steps=5)
    _, after = run(tmp_path / "run", logging_steps=5)
    assert before.losses | after.losses == whole.losses


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_saved_as_a_recipe_saves_them(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted() -> Any:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))

    made, _ = make_trainer(tmp_path / "output")
    made.model.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    trainer, _ = run(tmp_path / "run", model=adapted(), save_steps=5)
    saved = tmp_path / "run/LATEST"
    assert ckpt.main(["export", "--merge", str(saved), "-o", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, saved / "model").merge_and_unload()
    expected = trainer.model.merge_and_unload()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
        assert torch.allclose(parameter, merged.get_parameter(name), atol=1e-6), name

    # A loop without a trainer writes the same, and resumes it.
    torch.manual_seed(1)
    bare = adapted()
    Checkpointer(tmp_path / "bare").save({"model": bare}, step=1, epoch=0)
    assert (tmp_path / "bare/LATEST/model/adapter_config.json").exists()
    torch.manual_seed(2)
    resumed = adapted()
    Checkpointer(tmp_path / "bare").load({"model": resumed})
    for name, parameter in bare.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_with_new_tokens_or_a_reference_or_a_base_of_another_class(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"])
    make_trainer(tmp_path / "output")[0].model.save_pretrained(tmp_path / "base")

    def adapted(seed: int) -> Any:
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        base.resize_token_embeddings(40)  # the new rows are random
        model = get_peft_model(base, config)
        model.add_adapter("ref", config)  # as TRL does; it does not train
        return model

    def small(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4))
        return get_peft_model(layers, LoraConfig(r=2, target_modules=["0"]))

    for number, make in enumerate((adapted, small)):
        saved, resumed = make(1), make(2)
        Checkpointer(tmp_path / str(number)).save({"model": saved}, step=1, epoch=0)
        Checkpointer(tmp_path / str(number)).load({"model": resumed})
        names = ("embed_tokens", "lm_head", "lora_A.default", "lora_B.default")
        for name, parameter in saved.named_parameters():
            if any(part in name for part in names):
                assert torch.equal(parameter, resumed.get_parameter(name)), name
    merged = tmp_path / "merged"
    assert ckpt.main(["export", "--merge", str(tmp_path / "0/LATEST"), "-o", str(merged)]) == 0
    embeddings = AutoModelForCausalLM.from_pretrained(merged).get_input_embeddings().weight
    assert embeddings.shape[0] == 40

    # Each of several that train would need its own files.
    both = adapted(1)
    for parameter in both.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(RecipeError, match="freeze all but one"):
        HFAssets.from_model(both)


@pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_that_nothing_could_load_is_an_error(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"])
    made, _ = make_trainer(tmp_path / "output")
    inside = make_trainer(tmp_path / "output")[0].model
    inside.add_adapter(config)
    with pytest.raises(RecipeError, match="get_peft_model"):
        HFAssets.from_model(inside)
    with pytest.raises(RecipeError, match="save the base with save_pretrained"):
        Checkpointer(tmp_path / "run").save(
            {"model": get_peft_model(made.model, config)}, step=1, epoch=0
        )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_adapters_that_version_0_1_0_saved_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    make_trainer(tmp_path / "output")[0].model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    with monkeypatch.context() as patch:
        # It wrote no files of peft.
        patch.setattr("automodel_ckpt.checkpoint.checkpointer.is_exportable", lambda _: False)
        Checkpointer(tmp_path / "run").save({"model": model}, step=1, epoch=0)
    saved = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.requires_grad)
    Checkpointer(tmp_path / "run").load({"model": model})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["reference", "own", "before"])
def test_adapters_of_other_kinds_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from peft import LoraConfig, get_peft_model

    make_trainer(tmp_path / "output")[0].model.save_pretrained(tmp_path / "base")

    def adapted() -> Any:
        if kind == "own":
            module = torch.nn.Sequential(torch.nn.Linear(4, 4))
            return get_peft_model(module, LoraConfig(r=2, target_modules=["0"]))
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
        if kind == "reference":
            # As TRL does for a PeftModel that it is given.
            model.add_adapter("ref", model.peft_config["default"])
        return model

    saved, loaded = adapted(), adapted()
    with monkeypatch.context() as patch:
        if kind == "before":
            # Version 0.1.0 wrote no files of peft.
            patch.setattr("automodel_ckpt.checkpoint.checkpointer.is_exportable", lambda _: False)
        Checkpointer(tmp_path / "run").save({"model": saved}, step=1, epoch=0)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(parameter.requires_grad)
    Checkpointer(tmp_path / "run").load({"model": loaded})
    for name, parameter in saved.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, loaded.get_parameter(name)), name


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_second_adapter_that_trains_is_an_error(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"])
    make_trainer(tmp_path / "output")[0].model.save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    model.add_adapter("other", config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    with pytest.raises(RecipeError, match="several of its adapters train"):
        Checkpointer(tmp_path / "run").save({"model": model}, step=1, epoch=0)
