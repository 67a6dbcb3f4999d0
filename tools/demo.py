"""Train, kill, resume and export a small Llama, and check every claim on the way: `make demo`, about three minutes.

Two processes train on the Python documentation that ships with CPython. Nothing is downloaded and no GPU is used.
What is written stays in runs/demo (or DEMO_DIRECTORY). Exits with 1 if a claim does not hold.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.support import ROOT, program, step_lines

RUNS = ROOT / os.environ.get("DEMO_DIRECTORY", "runs/demo")
UNDISTURBED, KILLED = RUNS / "undisturbed", RUNS / "killed"
RECIPE = "examples/llm_finetune/tiny_llama_python_docs.yaml"
NUM_STEPS = int(os.environ.get("DEMO_STEPS", "60"))
"""A multiple of 6, at least 30: the run has to be caught between two checkpoints."""
CKPT_EVERY_STEPS = NUM_STEPS // 3
COMPARED = ("epoch", "loss", "grad_norm", "lr", "tokens", "label_tokens")
"""Fields of training.jsonl that a resume must reproduce; the others are clock times and memory."""

LOAD_EXPORT = '''\
"""Load an exported model with plain transformers and let it write."""
import sys

sys.modules["automodel_ckpt"] = None  # from here on, any import of the trainer fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
if problems := {name: keys for name, keys in info.items() if keys}:
    sys.exit(f"the weights do not fit the model: {problems}")
torch.manual_seed(0)
write = pipeline("text-generation", model=model, tokenizer=tokenizer)
(result,) = write("The return statement", max_new_tokens=40, do_sample=True, top_k=20)
print(" ".join(result["generated_text"].split()))
'''


def heading(text: str) -> None:
    print(f"\n── {text} {'─' * max(0, 96 - len(text))}", flush=True)


def check(holds: bool, text: str) -> None:
    if not holds:
        sys.exit(f"demo failed: this does not hold: {text}")
    print(f"  ✓ {text}", flush=True)


def run(*command: str | Path) -> None:
    words = [str(word) for word in command]
    print(f"$ {shlex.join(words)}", flush=True)
    code = subprocess.run(words, cwd=ROOT, check=False).returncode
    check(code == 0, f"exit code {code}")


def train_command(directory: Path) -> list[str]:
    keys = {
        "checkpoint.checkpoint_dir": directory,
        "step_scheduler.max_steps": NUM_STEPS,
        "step_scheduler.ckpt_every_steps": CKPT_EVERY_STEPS,
    }
    if NUM_STEPS != 60:
        keys["validation_dataset.max_samples"] = 16
    overrides = [f"--{key}={value}" for key, value in keys.items()]
    return [program("ckpt-train"), "--nproc-per-node=2", RECIPE, *overrides]


def steps_of(directory: Path) -> dict[int, dict[str, Any]]:
    """The step lines of a run's training.jsonl by step."""
    lines = step_lines(directory / "training.jsonl")
    found = {line["step"]: line for line in lines}
    if len(found) != len(lines):
        sys.exit(f"demo failed: the log of {directory} has a step twice")
    return found


def saved_steps(directory: Path) -> list[int]:
    manifests = directory.glob("epoch_*/MANIFEST.json")
    return sorted(int(path.parent.name.rpartition("_")[2]) for path in manifests)


def weights_of(directory: Path) -> list[bytes]:
    export = directory / "LATEST" / "model" / "consolidated"
    return [file.read_bytes() for file in sorted(export.glob("model-*.safetensors"))]


def train_undisturbed() -> None:
    heading("1  Two processes train a small Llama on the Python documentation")
    run(*train_command(UNDISTURBED))
    losses = [record["loss"] for record in steps_of(UNDISTURBED).values()]
    check(len(losses) == NUM_STEPS, f"{NUM_STEPS} steps are in {UNDISTURBED}/training.jsonl")
    check(losses[-1] < losses[0], f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")
    every = list(range(CKPT_EVERY_STEPS, NUM_STEPS + 1, CKPT_EVERY_STEPS))
    check(
        saved_steps(UNDISTURBED) == every, f"there are complete checkpoints for the steps {every}"
    )
    run(program("ckpt"), "ls", UNDISTURBED)


def train_and_kill() -> float:
    """Start the same job in another directory and kill it between two checkpoints; returns when."""
    heading("2  The same job again, in another directory, killed between two checkpoints")
    process = subprocess.Popen(train_command(KILLED), cwd=ROOT, start_new_session=True)
    try:
        while max(steps_of(KILLED), default=0) < NUM_STEPS // 2:
            if process.poll() is not None:
                sys.exit("demo failed: the run ended before it was killed")
            time.sleep(0.02)
    finally:
        kill_group(process)
    killed_at = time.time()
    print(f"\n$ kill -KILL -- -{process.pid}      # the launcher and both ranks")
    last = max(steps_of(KILLED))
    check(CKPT_EVERY_STEPS < last < 2 * CKPT_EVERY_STEPS, f"the last step before was {last}")
    saved = saved_steps(KILLED)
    check(saved == [CKPT_EVERY_STEPS], f"the only complete checkpoint is of step {saved[0]}")
    return killed_at


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


def resume_and_compare(killed_at: float) -> None:
    heading("3  The same command resumes")
    run(*train_command(KILLED))
    expected, found = steps_of(UNDISTURBED), steps_of(KILLED)
    redone = [step for step, record in found.items() if record["timestamp"] > killed_at]
    check(redone == list(range(CKPT_EVERY_STEPS + 1, NUM_STEPS + 1)), f"it resumed at {redone[0]}")
    check(list(found) == list(expected), "training.jsonl has each step exactly once")
    heading("4  The undisturbed run and the killed and resumed run, side by side")
    unequal = [
        step for step in expected if any(expected[step][k] != found[step][k] for k in COMPARED)
    ]
    for step in range(5, NUM_STEPS + 1, 5):
        print(f"  {step:4}  {expected[step]['loss']!r:20}  {found[step]['loss']!r:22}")
    check(not unequal, f"all {NUM_STEPS} steps agree in {', '.join(COMPARED)}, to the last bit")
    weights = weights_of(UNDISTURBED)
    check(
        bool(weights) and weights == weights_of(KILLED), "the exported weights are the same bytes"
    )


def export_and_generate() -> None:
    heading("5  Export another checkpoint, and generate with plain transformers")
    (older,) = KILLED.glob(f"epoch_*_step_{CKPT_EVERY_STEPS}")
    run("env", "NUM_THREADS=1", "bash", older / "model" / "consolidate.sh")
    script = RUNS / "load_export.py"
    script.write_text(LOAD_EXPORT)
    run(sys.executable, "-I", script, older / "model" / "consolidated")
    check(True, "transformers loaded the export with no missing weights and generated text")


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(UNDISTURBED, ignore_errors=True)
    shutil.rmtree(KILLED, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    train_undisturbed()
    resume_and_compare(train_and_kill())
    export_and_generate()
    heading("Done")
    activate = shlex.quote(str(Path(sys.prefix) / "bin" / "activate"))
    print(f"To use ckpt-train and ckpt in this shell: source {activate}")
    print(
        f"The results are in {RUNS}/. Next, adapt {RECIPE}; see `ckpt-train --help` and README.md."
    )


if __name__ == "__main__":
    main()
