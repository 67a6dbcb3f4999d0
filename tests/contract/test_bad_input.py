"""Bad input ends before torch is imported: one message, all mistakes, where each stands, what to do, exit code 2."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from automodel_ckpt import load_recipe
from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import EXIT_DONE, EXIT_USAGE
from tests.support.measure import seconds_of_children

RECIPE = """\
model:
  from_config: {model_type: llama}
dataset:
  _target_: automodel_ckpt.examples.data.python_docs.language_modeling
  seq_length: 16
"""
QUIET = """\
import sys
from automodel_ckpt.cli.train import main
code = main(sys.argv[1:])
loaded = sorted({"torch", "transformers", "datasets", "peft"} & sys.modules.keys())
print(f"loaded={loaded}", file=sys.stderr)
raise SystemExit(code)
"""


DIRECTORY = Path(__file__).parents[2] / "examples"
EXAMPLES = {
    path.relative_to(DIRECTORY).with_suffix("").as_posix(): path
    for path in DIRECTORY.rglob("*.yaml")
    if path.parts[-2] not in ("kubernetes", "skypilot", "slurm")
}
MISTAKES = ["recipe.yaml", "--seeed=1", "--optimizer={_target_: torch.optim.SGD, lr: x}"]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return Path("recipe.yaml")


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == EXIT_USAGE
    out, error = capsys.readouterr()
    assert out == ""
    assert not re.search(r"\btorch\b", error.partition("hint:")[0])
    return error


TABLE = r"""
optimiser:\n  lr: 1 |  | unknown key optimiser ; recipe.yaml:6 ; did you mean optimizer?
optimizer:\n  lrr: 1 |  | unknown key optimizer.lrr ; recipe.yaml:7 ; did you mean optimizer.lr?
checkpoint:\n  max_steps: 3 |  | unknown key checkpoint.max_steps ; did you mean step_scheduler.max_steps?
 | --seeed ; 1 | unknown key seeed ; where:  --seeed ; did you mean seed?
seed: many |  | seed must be a whole number ; recipe.yaml:6 ; value:  many
seed: -1 |  | seed must be from 0 to 2^63 - 1
deterministic: maybe |  | deterministic must be true or false
optimizer: 5 |  | optimizer must be a section or a section with _target_
init_from: run |  | init_from must be a section ; such as init_from.path
optimizer:\n  lr: -1 |  | optimizer.lr must be 0 or more ; value:  -1
optimizer:\n  betas: [1, 0.9] |  | optimizer.betas must be two numbers from 0 to below 1
step_scheduler:\n  stop_signals: [SIGTERM, SIGKILL] |  |
    step_scheduler.stop_signals must be a list out of SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGXCPU ; :7
recipe: distill\ndistill:\n  kd_ratio: 0.3 |  | distill.teacher.from_pretrained is missing ; recipe.yaml:
 | --model.dtype=fp16 | float64, auto or null ; did you mean float16?
checkpoint: {model_layout: hf} | --checkpoint.export_best |
    save_consolidated and export_best have no effect with model_layout hf
 | --distributed.cp_size=2 ; --nproc-per-node=3 | a multiple of 2 ranks
distributed:\n  ep_size: 2\npeft:\n  target_parameters: [gate_up_proj] |  |
    peft.target_parameters and ep_size cannot be combined
 | --model.freeze=[*.y] | where:  --model.freeze\n  hint:   quote words that begin with *
checkpoint: {checkpoint_dir: $SCRATCH/run} |  |
    checkpoint.checkpoint_dir has a variable of the shell ; write ${oc.env:SCRATCH} ; :6
 | --rdzv-endpoint=localhost:99999 | the rendezvous endpoint is not HOST:PORT
step_scheduler:\n  on_spike: {loss_factor: 1} |  | step_scheduler.on_spike.loss_factor must be more than 1
clip_grad_norm: .inf |  | clip_grad_norm must be more than 0, and finite
 | --dataset={_target_: automodel_ckpt.data.text.prompt_completion, path: x, seq_length: 8, prompt: q} |
    unknown key dataset.prompt ; did you mean dataset.prompt_field?
step_scheduler:\n  ckpt_every_steps: 0 |  | step_scheduler.ckpt_every_steps must be 1 or more ; :7
step_scheduler:\n  max_time: soon |  | step_scheduler.max_time must be a number of seconds
step_scheduler:\n  global_batch_size: 10\n  local_batch_size: 4 |  |
    global_batch_size must be a multiple of local_batch_size ; recipe.yaml:7 ; global_batch_size: 10
step_scheduler:\n  global_batch_size: 8 | --nproc-per-node=3 |
    global_batch_size must be a multiple of local_batch_size x ranks ; recipe.yaml:7 ; ranks: 3
checkpoint:\n  verify_replicas: true | --nproc-per-node=4 ; --distributed.strategy=fsdp2 |
    no replicas to compare ; recipe.yaml:7 ; dp_shard 4
step_scheduler:\n  ckpt_on_best: true |  | need a validation_dataset
checkpoint:\n  save_consolidated: sometimes |  |
    checkpoint.save_consolidated must be final, every, true, false or null ; value:  sometimes
checkpoint:\n  model_layout: hf\n  model_save_format: torch_save |  |
    model_save_format torch_save requires model_layout shards
distributed:\n  strategy: fsdp |  | distributed.strategy must be auto, fsdp2, ddp or single ; fsdp2?
distributed:\n  mixed_precision: float16 |  | float16 needs a loss scaler ; recipe.yaml:7 ; bfloat16
 | --distributed.tp_plan={_target_: transformers.AutoModel} | set tp_size above 1
distributed:\n  cp_size: 2\n  tp_size: 2\n  sequence_parallel: true |  | both shard the sequence
kto:\n  desirable_weight: 0\n  undesirable_weight: 0 | --recipe=kto |
    with both weights 0, the loss is 0 and nothing is trained ; recipe.yaml:7
distributed:\n  cpu_offload: true\n  backend: nccl |  |
    cpu_offload needs a backend that also reduces CPU tensors ; cpu:gloo
distributed:\n  pp_size: 2\n  tp_size: 2\n  sequence_parallel: true |  |
    pp_size and sequence_parallel cannot be combined
distributed:\n  pp_schedule: gpipe |  | set pp_size above 1
distributed:\n  pp_size: 2\n  pp_stages_per_rank: 2 |  | remove it: each rank computes one stage
distributed:\n  ep_size: 2\n  tp_size: 2 |  | ep_size and tp_size cannot be combined
pretrain:\n  z_loss: 1.0 | --recipe=pretrain ; --model.mtp={weights: new} |
    pretrain.z_loss and model.mtp cannot be combined
distributed:\n  ep_size: 2\n  strategy: ddp |  | which only fsdp2 does
distributed:\n  pp_size: 2\n  strategy: ddp | --nproc-per-node=2 | ddp has replicas of the complete model
 | --distributed.dp_size=3 ; --nproc-per-node=2 | the product of the parallel sizes ; remove dp_size
 | --distributed.strategy=single ; --nproc-per-node=2 | one data parallel rank
 | --model.from_pretrained=x | exactly one of from_pretrained and from_config
 | --dataset=null | dataset must be a section with _target_
 | --validation_dataset.path=x | hint:   add validation_dataset._target_, the name
recipe: SFT |  | unknown recipe ; did you mean llm_finetune?
seed: 1\nseed: 2 |  | duplicate key 'seed' ; recipe.yaml:6 ; recipe.yaml:7
seed: !!python/object/apply:os.system [x] |  | YAML tags are not allowed
<<: [seed] |  | a merge key (<<) needs a mapping or a list ; recipe.yaml:6
seed: [1 |  | invalid YAML ; recipe.yaml:7
 | --model.freeze ; [x, *y] | undefined alias ; quote words that begin
clip_grad_norm: @x |  | recipe.yaml:6 ; quote words that begin
seed: ${oc.env:CKPT_NOT_SET} |  | environment variable CKPT_NOT_SET is not set ; recipe.yaml:6
 | --nproc-per-nod=2 | unknown option --nproc-per-nod ; did you mean --nproc-per-node?
 | --nproc-per-node=0 | nproc_per_node must be a number from 1, auto, gpu or cpu
 | other.yaml | unexpected argument other.yaml
 | optimizer.lr=3 | unexpected argument optimizer.lr=3 ; did you mean --optimizer.lr=3?
 | --checkpoint.restore_from=runs/$USER | write ${oc.env:USER}
validation_datasets:\n  a: {_target_: automodel_ckpt.data.text.text, path: [a.txt, $D/b.txt]} |  |
    validation_datasets.a.path.1 has a variable of the shell ; write ${oc.env:D}
extends: $BASE/base.yaml |  | the recipe in extends ; write ${oc.env:BASE}
 | train | unexpected argument train ; run ckpt-train
 | -c | -c needs a value
 | --optimizer.lr | --optimizer.lr needs a value
"""
"""Text that is added to the recipe, options, and pieces that the message has, between them " | " and " ; "."""


def mistakes() -> Iterator[tuple[str, list[str], list[str]]]:
    for line in TABLE.replace("\n    ", " ").strip("\n").splitlines():
        text, words, pieces = line.split(" | ")
        text = f"{text}\n".replace("\\n", "\n") if text else ""
        yield text, words.split(" ; ") if words else [], pieces.replace("\\n", "\n").split(" ; ")
    # It must not hang.
    yield f'seed: "${{oc.env:A,{" " * 9999}"\n', [], ["unsupported interpolation"]


@pytest.mark.parametrize(
    ("text", "words", "pieces"), list(mistakes()), ids=lambda value: str(value)[:40]
)
def test_a_mistake_is_named_with_its_place_and_a_hint(
    recipe: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], pieces: list[str]
) -> None:
    recipe.write_text(RECIPE + text)
    error = say(capsys, str(recipe), *words)
    for piece in ["error: ", "where: ", *pieces]:
        assert piece in error


@pytest.mark.parametrize("option", [["-c", "{}"], ["--config", "{}"], ["--config={}"]])
def test_a_recipe_can_follow_an_option_and_keys_can_have_dashes(
    recipe: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    recipe.write_text(RECIPE)
    words = [word.format(recipe) for word in option]
    keys = ["--step-scheduler.max-steps", "3", "--dataset.seq-length=64"]
    mapping = ["--model.config-overrides.a-b=1"]
    assert main([*words, *keys, *mapping, "--print-config"]) == 0
    printed = capsys.readouterr().out
    for line in ("max_steps: 3", "seq_length: 64", "a-b: 1"):
        assert line in printed


def test_all_mistakes_of_file_and_command_line_are_reported_at_once(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE + "seed: x\noptimizer:\n  lrr: 1\nseed: y\nlogging:\n  level: loud\n")
    error = say(capsys, "--nproc-per-nod=2", str(recipe), "--clip_grad_norm=-1", "extra")
    pieces = [
        "seed must",
        "optimizer.lrr",
        "duplicate key",
        "logging.level",
        "nproc-per-nod",
        "clip_grad",
        "extra",
    ]
    assert [piece for piece in pieces if piece not in error] == []
    assert error.count("where: ") == len(pieces)


def test_mistakes_in_the_arguments_of_plug_ins_are_reported_together(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """\
model: {from_config: {model_type: llama}}
dataset:
  _target_: automodel_ckpt.data.text.prompt_completion
  pth: x.jsonl
  seq_length: 1_0
  truncation: rigth
  max_samples: 0
validation_dataset: {_target_: automodel_ckpt.data.chat.messages, path: [%s], seq_length: 1}
optimizer: {_target_: automodel_ckpt.optim.adam8bit.AdamW8bit, lr: fast, no_decay: none}
"""
    recipe.write_text("recipe: llm_finetun\noptimiser: {lr: 1}\nloss_fn: {_target_: os.system}\n")
    with recipe.open("a") as file:
        file.write(text % "no.jsonl")
    error = say(capsys, str(recipe), "--step_scheduler.max_steps=x")
    pieces = [
        "unknown recipe\n  where:  recipe.yaml:1",
        "unknown key optimiser",
        "max_steps must be",
        "loss_fn: os.system is not trusted",
        "validation_dataset.path: a data file cannot be read\n  where:  recipe.yaml:11\n  value:  no.jsonl: ENOENT",
    ]
    assert [piece for piece in pieces if piece not in error] == []
    assert error.count("where: ") == len(pieces)
    Path("yes.jsonl").write_text("{}\n")
    recipe.write_text(text % "yes.jsonl")
    error = say(capsys, str(recipe))
    pieces = [
        "unknown key dataset.pth\n  where:  recipe.yaml:4\n  value:  x.jsonl\n  hint:   did you mean dataset.path?",
        "dataset.seq_length must be a whole number",
        "dataset.truncation must be error, right or skip",
        "max_samples must be 1",
        "dataset.path is missing",
        "validation_dataset.seq_length must be 2 or more",
        "optimizer.lr must be a number",
    ]
    assert [piece for piece in pieces if piece not in error] == []
    assert error.count("where: ") == len(pieces)


def test_a_missing_recipe_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = say(capsys, "recipes.yaml")
    assert "recipe file not found" in error
    assert str(recipe.absolute().with_name("recipes.yaml")) in error
    assert "is a directory" in say(capsys, ".")
    assert "no recipe file given" in say(capsys)


def test_a_recipe_may_come_through_a_pipe(recipe: Path) -> None:
    command = [sys.executable, "-c", QUIET, "--print-config", "-", "--seed", "3"]
    done = subprocess.run(
        command, input=RECIPE + "clip_grad_norm: 2\n", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "loaded=[]\n")
    assert "# standard input:6\n" in done.stdout and "# --seed\n" in done.stdout
    read, write = os.pipe()
    os.write(write, RECIPE.encode())
    os.close(write)
    first = load_recipe(f"/dev/fd/{read}")
    os.close(read)
    assert (first.config, first.directory) == (load_recipe(recipe).config, Path())


def test_a_directory_that_was_removed_is_told(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the current directory was removed" in say(capsys, str(recipe))


@pytest.mark.parametrize(
    "content", [b"", b"- a\n", b"word\n", b"\xff\xfe\x00", b"a: \x07\n", b"{" * 3000]
)
def test_a_file_that_is_no_recipe_ends_with_one_message(
    recipe: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    recipe.write_bytes(content)
    assert "recipe.yaml" in say(capsys, str(recipe))


@pytest.mark.parametrize("words", [["--help"], ["recipe.yaml", "--print-config"], MISTAKES])
def test_help_config_and_mistakes_need_no_torch_and_less_than_a_second(
    recipe: Path, words: list[str]
) -> None:
    start = seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", QUIET, *words], capture_output=True, text=True, check=False
    )
    assert seconds_of_children() - start < 1
    assert "loaded=[]" in done.stderr
    assert done.returncode == (EXIT_USAGE if words == MISTAKES else EXIT_DONE)


@pytest.mark.parametrize(
    "settings", [{"PYTHONUTF8": "0"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}]
)
def test_names_that_an_ascii_locale_does_not_have_can_be_used(
    recipe: Path, settings: dict[str, str]
) -> None:
    Path("Übung").mkdir()
    Path("Übung/wörter.txt").write_text("zwölf\n", "utf-8")
    data = "{_target_: automodel_ckpt.data.text.text, path: Übung/wörter.txt}"
    text = f"model: {{from_config: {{model_type: llama}}}}\ndataset: {data}\n"
    Path("Übung/ä.yaml").write_text(f"{text}checkpoint: {{checkpoint_dir: Übung/läufe}}\n", "utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", **settings}

    def run(command: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).with_name(command), *words],
            capture_output=True,
            encoding="utf-8",
            env=environment,
            check=False,
        )

    done = run("ckpt-train", "Übung/ä.yaml", "--print-config")
    assert done.returncode == 0, done.stderr
    is_ascii = "PYTHONIOENCODING" in settings
    assert ("\\xdcbung/l\\xe4ufe" if is_ascii else "Übung/läufe") in done.stdout
    missing = run("ckpt", "ls", "Übung/nichts")
    assert missing.returncode == 3
    assert ("\\xdcbung/nichts" if is_ascii else "Übung/nichts") in missing.stderr


def test_only_one_rank_of_a_machine_reports(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main([str(recipe), "--seeed=1"]) == EXIT_USAGE
    assert "seeed" in capsys.readouterr().err, (
        "left over in a shell: no other component can report it"
    )
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main([str(recipe), "--seeed=1"]) == EXIT_USAGE
    assert capsys.readouterr().err == ""


# What is asked for instead of training


def test_print_config_shows_every_value_with_its_origin(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--print-config", str(recipe), "--optimizer.lr", "1e-3"]) == EXIT_DONE
    rows = capsys.readouterr().out.splitlines()
    origins = {row.split(":")[0].strip(): row.rpartition("# ")[2] for row in rows if "# " in row}
    assert (origins["lr"], origins["seq_length"], origins["seed"]) == (
        "--optimizer.lr",
        "recipe.yaml:5",
        "default",
    )


def test_a_dry_run_says_what_is_missing_before_anything_is_built(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe), "--dry-run", "--nproc-per-node=2"]) == EXIT_USAGE
    assert "text data requires a tokenizer" in capsys.readouterr().err
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize("command", ["train --help", "ckpt completion bash"])
def test_a_reader_that_has_seen_enough_is_no_error(command: str) -> None:
    line = f'"{sys.executable}" -m automodel_ckpt.cli.{command} | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (EXIT_DONE, "")


DRY_RUNS = ("classification/tiny_topics", "vlm_finetune/tiny_digits")


def test_every_shipped_recipe_can_be_listed_and_copied_and_is_sound(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--list"]) == EXIT_DONE
    listed = [row.split()[0] for row in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(EXAMPLES)
    assert set(DRY_RUNS) < set(listed)
    for name in listed:
        assert main(["--copy", name, "copies"]) == EXIT_DONE
        copy = capsys.readouterr().out.splitlines()[-1]
        # test_examples trains all of them; a dry run of a few shows that copies are complete.
        mode = "--dry-run" if name in DRY_RUNS else "--print-config"
        assert main([copy, mode, "--trust", "copies", "--nproc-per-node=2"]) == EXIT_DONE
    capsys.readouterr()
    assert "File exists" in say(capsys, "--copy", listed[0], "copies")
    assert "unknown example recipe" in say(capsys, "--copy", "../../etc/passwd", "copies")


@pytest.mark.parametrize("task", ["0", "1"])
def test_one_task_of_a_node_prints_what_all_of_srun_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    step = {"PROCID": "1", "LOCALID": task, "NTASKS": "4", "STEP_ID": "0", "JOB_ID": "7"}
    for name, value in (step | {"GPUS_PER_TASK": "1"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    # Each task sees its own GPU alone.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {from_pretrained: some/model}\ndataset: {_target_: tests.missing.rows}\n"
    )
    assert main([str(recipe), "--trust=tests"]) == 2
    assert ("tests.missing not found" in capsys.readouterr().err) is (task == "0")
