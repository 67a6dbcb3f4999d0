"""Adapters on a frozen base: what a checkpoint holds of them, that a run resumes exactly, and on which base."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.cli.train import main as ckpt_train
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from tests.distributed.kinds.test_training import lines_of_steps, run
from tests.support import ranks
from tests.support.runs.training import EXPORT, RECIPE, Recipe, build, steps_of, train, write_recipe
from tests.support.runs.training_parts import TOKENS, WithLogits

TEXT = RECIPE.replace("\ntokenizer:", "\npeft:\n  base_dir: BASE\n  dropout: 0.1\ntokenizer:", 1)
SHORT = (
    "--step_scheduler.max_steps=4",
    "--step_scheduler.ckpt_every_steps=2",
    "--lr_scheduler=null",
)
VARIANTS = {
    "lora": (
        "--peft.target_modules=[q_proj,v_proj]",
        "--peft.rank_pattern={v_proj: 4}",
        "--peft.alpha_pattern={'*.1.self_attn.*': 20}",
        "--checkpoint.model_save_format=torch_save",
        "--checkpoint.save_consolidated=final",
    ),
    "dora": (
        "--checkpoint.model_layout=shards",
        "--peft.use_dora",
        "--peft.target_modules=*.self_attn.*",
        "--peft.modules_to_save=[norm]",
        "--checkpoint.is_async",
    ),
    "tied embedding": (
        "--peft.use_rslora",
        "--peft.modules_to_save=[embed_tokens]",
        "--peft.bias=all",
        "--peft.dropout=0",
        "--model.fused_layers",
        "--checkpoint.is_async",
    ),
}


def alone(recipe: Path, *overrides: str) -> BaseException | None:
    """Train in a new process, so that later tests fork from one that has not had a group. Return its error."""
    (outcome,) = ranks.outcomes(
        lambda: train(recipe, *SHORT, *overrides), 1, init=False, timeout=120
    )
    return outcome.error


def recipe_in(directory: Path) -> Path:
    return write_recipe(directory, TEXT.replace("BASE", str(directory / "base")))


GROUPS = [
    pytest.param((1, "single", [*VARIANTS]), id="single", marks=pytest.mark.further),
    pytest.param((2, "fsdp2", ["lora"]), id="fsdp2"),
    pytest.param((2, "ddp", ["dora"]), id="ddp", marks=pytest.mark.further),
]


@pytest.fixture(scope="module", params=GROUPS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Variants trained by one group of ranks: {name: directory}, and pairs of digests by rank."""
    num_ranks, strategy, names = request.param
    root = tmp_path_factory.mktemp(strategy)
    directories = {name: root / name for name in names}
    for directory in directories.values():
        directory.mkdir()
    common = [
        *SHORT,
        f"--distributed.strategy={strategy}",
        "--step_scheduler.local_batch_size=2",
        EXPORT,
    ]
    common += ["--peft.use_rslora"] if strategy == "ddp" else []
    trainings = []
    for name, directory in directories.items():
        recipe = recipe_in(directory)
        saved = f"--checkpoint.restore_from={directory / 'whole' / 'epoch_0_step_2'}"
        for run_name, more, recipe_class in (
            ("whole", (), WithLogits),
            ("resumed", (saved,), Recipe),
        ):
            place = f"--checkpoint.checkpoint_dir={directory / run_name}"
            words = (place, *common, *VARIANTS[name], *more)
            trainings.append(partial(train, recipe, *words, recipe_class=recipe_class))
    digests = ranks.run_each(trainings, num_ranks)
    return directories, list(zip(digests[::2], digests[1::2], strict=True))


def test_a_run_with_adapters_resumes_bit_for_bit(trained: Any) -> None:
    directories, digests = trained
    for whole, resumed in digests:
        assert resumed == whole
    for directory in directories.values():
        assert steps_of(directory / "resumed") == steps_of(directory / "whole")[2:]


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft's call, transformers' warning
def test_the_export_loads_with_peft_without_missing_or_unexpected_keys_and_with_equal_logits(
    trained: Any,
) -> None:
    directories, _ = trained
    for name, directory in directories.items():
        (run,) = (directory / "whole").glob("epoch_*_step_4")
        adapter = run / "model" if name == "tied embedding" else run / "model" / "consolidated"
        logits = torch.load(directory / "whole" / "logits.pt", weights_only=True)
        # Fused layers round in other places.
        assert_loads_with_peft(adapter, logits, 2e-5 if name == "tied embedding" else 0.0)


def assert_loads_with_peft(directory: Path, logits: torch.Tensor, tolerance: float) -> None:
    from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict

    model = AutoPeftModelForCausalLM.from_pretrained(directory)
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[key], stored[key]) for key in held)
    with torch.no_grad():
        found = model.eval()(input_ids=TOKENS).logits
    torch.testing.assert_close(found, logits, rtol=tolerance, atol=tolerance)


def test_base_and_adapter_are_merged_into_a_model_that_transformers_alone_loads(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMODEL_CKPT_CACHE", str(tmp_path / "cache"))
    directories, _ = trained
    for name, directory in directories.items():
        output = tmp_path / name
        assert main(["export", "--merge", str(directory / "whole"), "--output", str(output)]) == 0
        assert_is_whole(output, torch.load(directory / "whole" / "logits.pt", weights_only=True))
        for file in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (output / file).read_bytes() == (directory / "base" / file).read_bytes(), file


def assert_is_whole(directory: Path, logits: torch.Tensor) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-4
        )


def test_a_checkpoint_holds_only_what_trains(trained: Any) -> None:
    directories, _ = trained
    for directory in directories.values():
        (run,) = (directory / "whole").glob("epoch_*_step_4")
        manifest = Manifest.read(run)
        model, optimizer = manifest.trees["model"].tensors, manifest.trees["optimizer"].tensors
        assert sum(tensor.nbytes for tensor in model.values()) < 120_000
        assert all(
            "lora_" in key or "norm" in key or "embed" in key or "lm_head" in key for key in model
        )
        # The tied embedding stands twice in the adapter's file, as peft writes it, and is one parameter.
        trained_elements = sum(t.nbytes for t in model.values() if "lm_head" not in t.fqn)
        moments = sum(t.nbytes for key, t in optimizer.items() if key.endswith(".exp_avg"))
        assert moments == trained_elements


def test_another_base_of_the_same_shapes_is_refused_and_a_moved_one_is_not(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    run = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    assert alone(recipe, run, "--step_scheduler.max_steps=2") is None
    shutil.copytree(tmp_path / "base", tmp_path / "moved")
    moved = (
        f"--model.from_pretrained={tmp_path / 'moved'}",
        "--model.from_config=null",
        "--peft.base_dir=null",
    )
    assert alone(recipe, run, *moved, "--step_scheduler.max_steps=3") is None
    weights = tmp_path / "moved" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    error = alone(recipe, run, *moved)
    assert isinstance(error, CheckpointUnusable)
    assert "another base model" in str(error)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--peft.alpha=32",), "alpha: saved 16, here 32"),
        (("--peft.target_modules=q_proj",), "targets: saved"),
    ],
)
def test_other_adapters_than_those_saved_are_refused(
    saved_run: Path, overrides: tuple[str, ...], said: str
) -> None:
    run = f"--checkpoint.checkpoint_dir={saved_run / 'run'}"
    error = alone(saved_run / "recipe.yaml", run, *overrides)
    assert isinstance(error, CheckpointUnusable) and said in str(error)


@pytest.mark.parametrize(
    ("starts", "value", "hint"),
    [
        (
            ("", "--peft=null"),
            "it has adapters (peft)",
            r"ckpt export \S+_2 --merge.*init_from\.path",
        ),
        (
            ("--peft=null", ""),
            "it has the whole",
            r"ckpt consolidate \S+_2.*model\.from_pretrained",
        ),
    ],
    ids=["full into lora", "lora into full"],
)
def test_a_run_in_the_directory_of_another_kind_of_run_is_told_what_to_do(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    starts: tuple[str, str],
    value: str,
    hint: str,
) -> None:
    recipe, run = recipe_in(tmp_path), f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    common = [str(recipe), run, "--checkpoint.save_consolidated=false"]
    first, second = ([each] if each else [] for each in starts)
    assert ckpt_train([*common, *first, "--step_scheduler.max_steps=2"]) == 0
    capfd.readouterr()
    # The rate is an override that a resume would refuse for another reason.
    assert ckpt_train([*common, *second, "--optimizer.lr=0.5"]) == 3
    text = capfd.readouterr().err
    assert "belong to another kind of run" in text and value in text
    assert "another checkpoint.checkpoint_dir" in text and re.search(hint, text)
    assert "allow_missing_state" not in text


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run = f"--checkpoint.checkpoint_dir={root / 'run'}"
    assert alone(recipe_in(root), run, "--step_scheduler.max_steps=2") is None
    return root


def test_the_base_directory_is_made_once_and_another_model_in_its_place_is_refused(
    saved_run: Path,
) -> None:
    base = saved_run / "base"
    before = {path: path.stat().st_mtime_ns for path in base.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in before}
    recipe, fresh = saved_run / "recipe.yaml", f"--checkpoint.checkpoint_dir={saved_run / 'fresh'}"
    assert alone(recipe, fresh, "--step_scheduler.max_steps=1") is None
    assert {path: path.stat().st_mtime_ns for path in base.iterdir()} == before
    error = alone(recipe, fresh, "--model.from_config.hidden_size=48")
    assert isinstance(
        error, RecipeError
    ) and "the directory of the base contains another model" in str(error)
    assert "hidden_size" in str(error)
    error = alone(recipe, fresh, "--peft.quantize_base=int8")
    assert isinstance(error, RecipeError) and "8 bits need a CUDA device; this is a" in str(error)


def test_the_side_files_say_where_the_base_is_from_the_run_too(saved_run: Path) -> None:
    (run,) = (saved_run / "run").glob("epoch_*_step_2")
    side = run / "model"
    ours = json.loads((side / "automodel_peft_config.json").read_text())
    assert json.loads((side / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        saved_run / "base"
    )
    assert (ours["base"]["name"], ours["base"]["relative_to_run"]) == (
        str(saved_run / "base"),
        "../base",
    )
    assert ours["adapter"]["targets"][0] == "model.layers.0.self_attn.q_proj"


@pytest.mark.further
def test_adapters_on_tensor_parallel_ranks_continue_on_one_rank_and_back_as_if_they_had_stayed(
    tmp_path: Path,
) -> None:
    base = f"{{base_dir: {tmp_path / 'base'}, target_modules: [all-linear, lm_head, embed_tokens], init: gaussian}}"
    common = (
        f"--peft={base}",
        "--lr_scheduler=null",
        "--optimizer.lr=1e-3",
        "--step_scheduler.ckpt_every_steps=2",
        "--model.from_config.attention_dropout=0",
        "--model.from_config.tie_word_embeddings=false",
    )
    split = ("--distributed.tp_size=2", "--distributed.sequence_parallel=true")

    def trained(name: str, last: int, *overrides: str) -> Path:
        steps = f"--step_scheduler.max_steps={last}"
        run(
            tmp_path,
            *common,
            steps,
            *overrides,
            name=name,
            num_ranks=2 if split[0] in overrides else 1,
        )
        return tmp_path / name / f"epoch_0_step_{last}"

    whole = trained("whole", 4, *split)
    on_one = trained("on one", 3, f"--checkpoint.restore_from={whole.with_name('epoch_0_step_2')}")
    back = trained("back", 4, *split, f"--checkpoint.restore_from={on_one}")
    expected_records, *others = (
        lines_of_steps(tmp_path / n / "training.jsonl") for n in ("whole", "on one", "back")
    )
    for records in others:
        for record in records:
            expected = expected_records[record["step"] - 1]
            assert record["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    one, other = (load_file(path / "model" / "adapter_model.safetensors") for path in (whole, back))
    assert one.keys() == other.keys() and len(one) == 2 * 16
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)


def test_dora_on_tensor_parallel_ranks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"DoRA needs the norms of unsharded weights(.|\n)*use_dora"
    ):
        build(recipe_in(tmp_path), "--peft.use_dora", "--distributed.tp_size=2")
