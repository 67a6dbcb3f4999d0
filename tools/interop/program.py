"""What the checks of a program use: a place to run both programs in, and comparisons of tensors, losses and logits."""

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.checkpoint.tensors.difference import StoredTensors, compare
from automodel_ckpt.cli import ckpt
from automodel_ckpt.convert.open import open_source
from tools.interop.environments import own_variables
from tools.support import ROOT, environment, train_words

SCRIPTS = Path(__file__).with_name("scripts")
_TIMEOUT_SECONDS = 1800
_LOSS_TOLERANCE = 1e-5
LAST_STEP = 10
"""Of the runs that are continued."""


@dataclass(frozen=True)
class Check:
    """A row of the table: what was compared, what was found, and whether that is right."""

    what: str
    found: str
    good: bool


@dataclass(frozen=True)
class Workplace:
    """Where the checks of a program run: *python* is the interpreter of its environment, *directory* is empty.

    The output of the programs goes to the file *log*.
    """

    python: Path
    directory: Path
    log: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, command: Sequence[object], **options: Any) -> None:
        """Run a command in *directory*. Raises subprocess.SubprocessError if it fails or takes half an hour."""
        quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        variables = own_variables() | quiet | self.variables
        options = {"cwd": self.directory, "env": variables, **options}
        words = [str(part) for part in command]
        with open(self.log, "a") as log:
            options |= {"stdout": log, "stderr": subprocess.STDOUT, "timeout": _TIMEOUT_SECONDS}
            subprocess.run(words, check=True, **options)

    def report(self, script: str, *arguments: str | Path) -> Any:
        """Run one of the scripts with the file of its report as the last argument; return the report."""
        report = self.directory / "report.json"
        report.unlink(missing_ok=True)
        self.run([self.python, SCRIPTS / script, *arguments, report])
        return json.loads(report.read_text())

    def made(self, fixture: str, *arguments: str | Path, name: str = "made") -> Path:
        """The directory in which a script of tests/fixtures has had the program write its files."""
        directory = self.directory / name
        if fixture.startswith(("megatron", "nemo", "lightning", "automodel/make_fixture")):
            directory.mkdir()
        self.run([self.python, ROOT / "tests" / "fixtures" / fixture, directory, *arguments])
        return directory

    def ckpt(self, *arguments: str | Path) -> None:
        """Run ``ckpt`` in this process, with its output in the log. Raises RuntimeError if it fails."""
        with open(self.log, "a") as log, contextlib.redirect_stdout(log):
            code = ckpt.main([str(argument) for argument in arguments])
        if code != 0:
            raise RuntimeError(f"ckpt {' '.join(map(str, arguments))} ended with code {code}")

    def train(self, recipe: str, directory: Path, *overrides: str, num_ranks: int) -> None:
        directory.mkdir(exist_ok=True)
        path = directory / "recipe.yaml"
        path.write_text(recipe)
        words = train_words(path, "--trust=tests", f"--nproc-per-node={num_ranks}", *overrides)
        self.run(words, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)))


def losses_check(
    what: str, found: Mapping[int, float], expected: Mapping[int, float], first: int = 6
) -> Check:
    """Compare losses by step, which *found* has from the step *first* on."""
    if list(found) != list(range(first, LAST_STEP + 1)):
        return Check(what, f"losses of steps {list(found)}", False)
    largest = max(abs(loss / expected[step] - 1) for step, loss in found.items())
    text = f"losses of steps {first} to {LAST_STEP} differ by at most {largest:.1e}"
    return Check(what, text, largest <= _LOSS_TOLERANCE)


def recorded_losses(directory: Path, name: str = "", first: int = 1) -> dict[int, float]:
    """The losses that a script of tests/fixtures has recorded, by step."""
    losses = json.loads((directory / "losses.json").read_text())
    return dict(enumerate(losses[name] if name else losses, start=first))


def tensors_check(
    what: str,
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    any_dtype: bool = False,
) -> Check:
    """Compare the *expected* tensors, bit for bit; with *any_dtype* after a conversion to their dtype."""
    num_equal = 0
    for name, tensor in expected.items():
        other = found.get(name)
        if other is not None and (any_dtype or other.dtype == tensor.dtype):
            num_equal += torch.equal(other.to(tensor.dtype), tensor)
    text = f"{num_equal} of {len(expected)} tensors bit-equal"
    return Check(what, text, num_equal == len(expected) > 0)


def files_check(what: str, path: Path, expected: Path, *, tied_twice: bool = False) -> Check:
    """Compare all tensors of two checkpoints, which are read as ``ckpt import`` reads them.

    With *tied_twice*, the first one has tied embeddings twice.
    """
    found, wanted = open_source(path), open_source(expected)
    tensors = dict(found.tensors)
    if tied_twice and "lm_head.weight" not in wanted.tensors:
        del tensors["lm_head.weight"]
    pair = StoredTensors(found.root, tensors), StoredTensors(wanted.root, wanted.tensors)
    num_equal, num_tensors = compare(*pair).num_equal, len(wanted.tensors)
    text = f"{num_equal} of {num_tensors} tensors bit-equal"
    return Check(what, text, num_equal == len(tensors) == num_tensors)


def logits_check(what: str, found: Any, expected: Any, most: float) -> Check:
    """Compare logits, which are tensors or lists."""
    difference = (torch.as_tensor(found) - torch.as_tensor(expected)).abs().max().item()
    return Check(what, f"logits differ by {difference:.1e}", difference < most)


def logits_of(directory: Path, ids: Sequence[int], attention: str = "sdpa") -> torch.Tensor:
    """The logits of transformers' model in float32 for one row of tokens, of shape [tokens, vocabulary]."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(directory, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([list(ids)])).logits[0]
    return logits


def build_model(seed: int, model_type: str, **sizes: Any) -> Any:
    """A model of transformers with random weights."""
    torch.manual_seed(seed)
    build: Any = AutoModelForCausalLM.from_config
    return build(AutoConfig.for_model(model_type, **sizes))
