"""Train a small LLaVA to read digits, then ask its export about scans it never saw: `make demo-vlm`, a few minutes.

What is asked is the export alone, by plain transformers in a process that cannot import this package. Nothing is
downloaded. What is written stays in runs/demo_vlm (or DEMO_DIRECTORY). Exits with 1 when fewer than 60 % of the answers
(or DEMO_WANTED, a fraction) are right; chance is 10%. Further arguments go to ckpt-train, and have to let it train:

    DEMO_WANTED=0.2 python -m tools.demo_vlm --nproc-per-node=1 --step_scheduler.max_steps 120
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from automodel_ckpt.examples.data import digits
from tools.support import ROOT, parser_of, train_words

RUNS = Path(os.environ.get("DEMO_DIRECTORY", "runs/demo_vlm"))
RECIPE = "examples/vlm_finetune/tiny_digits.yaml"
WANTED = float(os.environ.get("DEMO_WANTED", "0.6"))

ASK_EXPORT = '''\
"""Show images to an exported model with plain transformers; prints what it answers, as JSON."""
import json, sys

sys.modules["automodel_ckpt"] = None  # from here on, any import of the trainer fails
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

logging.disable_progress_bar()
directory, question, *paths = sys.argv[1:]
processor = AutoProcessor.from_pretrained(directory)
model, info = AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
if problems := {name: keys for name, keys in info.items() if keys}:
    sys.exit(f"the weights do not fit the model: {problems}")
model.eval()
content = [{"type": "image"}, {"type": "text", "text": question}]
prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
answers = []
for start in range(0, len(paths), 50):
    images = [[Image.open(path)] for path in paths[start : start + 50]]
    inputs = processor(text=[prompt] * len(images), images=images, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    answers += processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print(json.dumps(answers))
'''


def main(arguments: list[str]) -> None:
    parser = parser_of(__doc__, prog="python -m tools.demo_vlm", allow_abbrev=False)
    _, passed_on = parser.parse_known_args(arguments)
    started = time.monotonic()
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    shutil.rmtree(RUNS, ignore_errors=True)
    train(passed_on)
    export = (RUNS / "checkpoints" / "LATEST").resolve() / "model" / "consolidated"
    paths, expected = write_scans(RUNS / "scans")
    answers = ask(export, paths)
    for path, digit, answer in list(zip(paths, expected, answers, strict=True))[:8]:
        print(f"  {path.name:8} shows a {digit}; {digits.QUESTION} {answer!r}")
    right = sum(answer.strip() == digit for answer, digit in zip(answers, expected, strict=True))
    share = f"{right} of {len(paths)} scans that it never saw are named rightly"
    print(f"{share}, {right / len(paths):.0%}; chance is 10%")
    print(f"done in {time.monotonic() - started:.0f} seconds")
    if right < WANTED * len(paths):
        sys.exit(f"demo failed: fewer than {WANTED:.0%}")


def train(arguments: list[str]) -> None:
    """Train in a new process. Print the command first."""
    options = ["--checkpoint.checkpoint_dir", str(RUNS / "checkpoints"), *arguments]
    if not any("nproc" in argument for argument in arguments):
        options.insert(0, "--nproc-per-node=2")
    print(f"$ ckpt-train {shlex.join([RECIPE, *options])}", flush=True)
    if code := subprocess.run(train_words(RECIPE, *options), check=False).returncode:
        sys.exit(f"demo failed: training ended with exit code {code}")
    if not (RUNS / "checkpoints" / "LATEST").exists():
        sys.exit("demo failed: ckpt-train did not train with these arguments")


def write_scans(directory: Path) -> tuple[list[Path], list[str]]:
    """The scans held out, as PNG files, and the digits that they show."""
    directory.mkdir(parents=True)
    scans = digits.scans(digits.processor(), split="validation")
    paths = [directory / f"{number}.png" for number in range(len(scans))]
    for number, path in enumerate(paths):
        scans.image(number).save(path)
    return paths, [str(digit) for digit in scans.digits]


def ask(export: Path, paths: list[Path]) -> list[str]:
    script = RUNS / "ask_export.py"
    script.write_text(ASK_EXPORT)
    command = [sys.executable, "-I", str(script.resolve()), str(export.resolve()), digits.QUESTION]
    print(f"\n$ python {script} {export} '{digits.QUESTION}' {RUNS}/scans/*.png", flush=True)
    files = [str(path.resolve()) for path in paths]
    done = subprocess.run([*command, *files], cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"demo failed: the export cannot be asked\n{done.stderr}")
    answers: list[str] = json.loads(done.stdout)
    return answers


if __name__ == "__main__":
    main(sys.argv[1:])
