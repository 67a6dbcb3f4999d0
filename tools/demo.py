"""Train, kill, resume and export a small Llama, and check every claim on the way: `make demo`, about three minutes.

Two processes train on the Python documentation that ships with CPython. Nothing is downloaded and no GPU is used.
What is written stays in runs/demo (or DEMO_DIRECTORY) for you to look at. Exits with 1 when something is not as it
should be.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path(os.environ.get("DEMO_DIRECTORY", "runs/demo"))
UNDISTURBED, KILLED = RUNS / "undisturbed", RUNS / "killed"
RECIPE = "examples/llm_finetune/tiny_llama_python_docs.yaml"
NUM_STEPS = int(os.environ.get("DEMO_STEPS", "60"))
"""A multiple of 6, at least 30: the run has to be caught between two checkpoints."""
CKPT_EVERY_STEPS = NUM_STEPS // 3
KILL_AT_STEP = NUM_STEPS // 2

COMPARED = ("epoch", "loss", "grad_norm", "lr", "tokens", "label_tokens")
"""Fields of training.jsonl that a resume must reproduce; the others are clock times and memory."""

LOAD_EXPORT = '''\
"""Load an exported model with plain transformers and let it write."""
import sys

sys.modules["automodel_ckpt"] = None  # from here on, any import of the trainer fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

logging.disable_progress_bar()
directory = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(directory)
model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
if problems := {name: keys for name, keys in info.items() if keys}:
    sys.exit(f"the weights do not fit the model: {problems}")
torch.manual_seed(0)
prompt = "The return statement"
(result,) = pipeline("text-generation", model=model, tokenizer=tokenizer)(
    prompt, max_new_tokens=40, do_sample=True, top_k=20
)
written = " ".join(result["generated_text"].split())
if len(written) <= len(prompt):
    sys.exit("nothing was generated")
print(written)
'''


def say(text: str = "") -> None:
    print(text, flush=True)


def heading(text: str, explanation: str = "") -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    say(f"\n{bold}── {text} {'─' * max(0, 96 - len(text))}{plain}")
    if explanation:
        say(explanation)


def fail(text: str) -> NoReturn:
    sys.exit(f"demo failed: {text}")


def claim(text: str) -> None:
    """Print what was just found to be so."""
    say(f"  ✓ {text}")


def check(holds: bool, text: str) -> None:
    """Print a claim that holds, or end the demo."""
    if not holds:
        fail(f"this does not hold: {text}")
    claim(text)


def show(command: list[str]) -> None:
    say(f"$ {shlex.join(command)}")


def run(command: list[str], cwd: Path = ROOT) -> None:
    """Run a command on this terminal, after printing it."""
    show(command)
    code = subprocess.run(command, cwd=cwd, check=False).returncode
    if code != 0:
        fail(f"the command above ended with exit code {code}")


def program(name: str) -> str:
    """A console command of this environment, relative to the repository where it lies inside."""
    path = Path(sys.executable).parent / name
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def train_command(directory: Path) -> list[str]:
    words = [
        program("ckpt-train"),
        "--nproc-per-node=2",
        RECIPE,
        "--checkpoint.checkpoint_dir",
        str(directory),
    ]
    steps = {
        "step_scheduler.max_steps": NUM_STEPS,
        "step_scheduler.ckpt_every_steps": CKPT_EVERY_STEPS,
    }
    shorter = {**steps, "validation_dataset.max_samples": 16} if NUM_STEPS != 60 else {}
    return words + [f"--{key}={value}" for key, value in shorter.items()]


def steps_of(directory: Path) -> dict[int, dict[str, Any]]:
    """The step lines of a run's training.jsonl by step; a last line still being written is left out."""
    path = ROOT / directory / "training.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        if not line.endswith("\n"):
            continue
        record = json.loads(line)
        if "event" in record:
            continue
        if record["step"] in steps:
            fail(f"{path} contains a step twice")
        steps[record["step"]] = record
    return steps


def checkpoints_of(directory: Path) -> list[str]:
    """Names of the complete checkpoints of a run, by step."""
    names = [path.parent.name for path in (ROOT / directory).glob("epoch_*/MANIFEST.json")]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def tree(directory: Path, opened: str, indent: str = "") -> Iterator[str]:
    """The lines of a directory tree; of the checkpoints only the one called *opened* is shown in full."""
    entries = sorted(directory.iterdir(), key=lambda path: path.name)
    for number, path in enumerate(entries):
        branch, deeper = ("└── ", "    ") if number == len(entries) - 1 else ("├── ", "│   ")
        is_folded = path.name.startswith("epoch_") and path.name != opened
        if path.is_symlink():
            yield f"{indent}{branch}{path.name} -> {os.readlink(path)}"
        elif path.is_file():
            yield f"{indent + branch + path.name:64}{path.stat().st_size:>10,} bytes"
        else:
            yield f"{indent}{branch}{path.name}/{' ...' if is_folded else ''}"
            if not is_folded:
                yield from tree(path, opened, indent + deeper)


def wait_for_step(process: subprocess.Popen[bytes], directory: Path, step: int) -> None:
    while max(steps_of(directory), default=0) < step:
        if process.poll() is not None:
            fail(f"the run ended with exit code {process.returncode} before it was killed")
        time.sleep(0.02)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a run's launcher and all its ranks. Return when none is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while True:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    except ProcessLookupError:
        process.wait()


def train_undisturbed() -> None:
    heading(
        "1  Two processes train a small Llama on the Python documentation",
        "Each process holds half of the model.",
    )
    run(train_command(UNDISTURBED))
    losses = [record["loss"] for record in steps_of(UNDISTURBED).values()]
    check(len(losses) == NUM_STEPS, f"{NUM_STEPS} steps are in {UNDISTURBED}/training.jsonl")
    check(losses[-1] < losses[0], f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")


def show_tree() -> None:
    heading(
        "2  What is on disk now",
        "A checkpoint is published when all its files are written. It never changes after that.",
    )
    say(f"{UNDISTURBED}/")
    newest = (ROOT / UNDISTURBED / "LATEST").resolve().name
    for line in tree(ROOT / UNDISTURBED, opened=newest):
        say(line)
    steps = [int(name.rpartition("_")[2]) for name in checkpoints_of(UNDISTURBED)]
    every = list(range(CKPT_EVERY_STEPS, NUM_STEPS + 1, CKPT_EVERY_STEPS))
    check(steps == every, f"there are complete checkpoints for the steps {every}")
    run([program("ckpt"), "ls", str(UNDISTURBED)])


def train_and_kill() -> float:
    """Start the same job in another directory and kill it between two checkpoints; returns when."""
    heading("3  The same job again, killed between two checkpoints", "It uses another directory.")
    command = train_command(KILLED)
    show(command)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        wait_for_step(process, KILLED, KILL_AT_STEP)
    finally:
        kill_group(process)
    killed_at = time.time()
    say(f"\n$ kill -KILL -- -{process.pid}      # the launcher and both ranks")
    last = max(steps_of(KILLED))
    check(
        CKPT_EVERY_STEPS < last < 2 * CKPT_EVERY_STEPS, f"the last step before the kill was {last}"
    )
    complete = checkpoints_of(KILLED)
    check(
        len(complete) == 1,
        f"the only complete checkpoint is {complete[0]}; the steps after it are lost",
    )
    return killed_at


def resume(killed_at: float) -> None:
    heading(
        "4  The same command resumes",
        "Model, optimizer, data order, random numbers and logs go back to the checkpoint.",
    )
    run(train_command(KILLED))
    steps = steps_of(KILLED)
    redone = [step for step, record in steps.items() if record["timestamp"] > killed_at]
    check(
        redone == list(range(CKPT_EVERY_STEPS + 1, NUM_STEPS + 1)),
        f"it resumed at step {CKPT_EVERY_STEPS + 1}; training.jsonl has each step exactly once",
    )


def compare() -> None:
    heading("5  The undisturbed run and the killed and resumed run, side by side")
    expected, found = steps_of(UNDISTURBED), steps_of(KILLED)
    check(
        list(expected) == list(found) == list(range(1, NUM_STEPS + 1)),
        f"both runs have steps 1 to {NUM_STEPS}",
    )
    say(f"\n  {'step':>4}  {'loss, undisturbed':20}  {'loss, killed + resumed':22}")
    unequal = {
        step for step in expected for name in COMPARED if expected[step][name] != found[step][name]
    }
    for step in sorted(unequal.union(range(5, NUM_STEPS + 1, 5))):
        mark = "DIFFERENT" if step in unequal else "==" + remark(step)
        say(f"  {step:4}  {expected[step]['loss']!r:20}  {found[step]['loss']!r:22}  {mark}")
    say()
    check(not unequal, f"all {NUM_STEPS} steps agree in {', '.join(COMPARED)}, to the last bit")
    digests = [digest_of(export_of(directory)) for directory in (UNDISTURBED, KILLED)]
    check(
        digests[0] == digests[1],
        f"the exported weights are the same bytes (sha256 {digests[0][:16]}...)",
    )


def remark(step: int) -> str:
    return "   <- checkpoint" if step % CKPT_EVERY_STEPS == 0 else ""


def export_of(directory: Path) -> Path:
    return (ROOT / directory / "LATEST").resolve() / "model" / "consolidated"


def digest_of(export: Path) -> str:
    """One sha256 over an export's weight files."""
    digest = hashlib.sha256()
    files = sorted(export.glob("model-*.safetensors"))
    if not files:
        fail(f"there are no weights in {export}")
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def export_and_generate() -> None:
    heading("6  Export, and generate with plain transformers")
    say(
        "The last checkpoint was exported when the run ended. Other checkpoints can be exported later:"
    )
    older = ROOT / KILLED / checkpoints_of(KILLED)[0] / "model"
    run(["env", "NUM_THREADS=1", "bash", os.path.relpath(older / "consolidate.sh")])
    check(
        (older / "consolidated" / "model.safetensors.index.json").is_file(),
        "the older checkpoint has an export too",
    )
    script = RUNS / "load_export.py"
    (ROOT / script).write_text(LOAD_EXPORT)
    say(f"\nIn a process that cannot import automodel_ckpt ({script}):")
    run([sys.executable, "-I", str(ROOT / script), str(export_of(KILLED))], cwd=Path("/"))
    say()
    claim("transformers loaded the export with no missing weights and generated text")
    say(
        f"    (After {NUM_STEPS} steps the model imitates the look of the documentation, but not yet its meaning.)"
    )


def prepare() -> None:
    """Fresh run directories, and an environment in which nothing is downloaded and no GPU is seen."""
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    RUNS.mkdir(parents=True, exist_ok=True)
    for directory in (UNDISTURBED, KILLED):
        shutil.rmtree(directory, ignore_errors=True)


def activation() -> str:
    """The script that activates this environment, quoted for a shell; relative if it is below the current directory."""
    script = Path(sys.prefix) / "bin" / "activate"
    with contextlib.suppress(ValueError):
        script = script.relative_to(Path.cwd())
    return shlex.quote(str(script))


def main(arguments: list[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("demo.py", description=__doc__, formatter_class=raw)
    parser.parse_args(arguments)
    start = time.monotonic()
    say(f"You can run every line that starts with $ yourself, in {ROOT}.")
    prepare()
    train_undisturbed()
    show_tree()
    killed_at = train_and_kill()
    resume(killed_at)
    compare()
    export_and_generate()
    heading(f"Done in {time.monotonic() - start:.0f} seconds")
    say("The killed and resumed run gave the same losses and weights as the undisturbed run.")
    say(f"To use ckpt-train and ckpt in this shell: source {activation()}")
    say(f"The results are in {RUNS}/. Next, adapt {RECIPE}; see `ckpt-train --help` and README.md.")


if __name__ == "__main__":
    main(sys.argv[1:])
