"""Train on 4 nodes of 4 ranks, lose a node, and continue on 3 nodes of 2 ranks and on the same 16 ranks.

    python -m tools.nodes [--keep DIR]

The nodes are network namespaces of this machine (root and iproute2), each with its own launcher. One process
imports torch for all of them. Runs: (1) undisturbed, with 16 ranks; (2) the same, until a node loses its
processes; (3) the rest of (2) on 3 nodes of 2 ranks; (4) the rest of (2) on the same 16 ranks. Run (4) must equal
run (1) bit by bit: losses, gradient norms, samples and files of weights. Run (3) must train on the same samples, with
losses equal up to the order of additions. Takes about 2 GB of memory and five minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import tiny_llama
from tests.support.servers.command_server import CommandServer
from tests.support.servers.networks import nodes_at, processes_of

ROOT = Path(__file__).parents[2]
NUM_NODES, RANKS_PER_NODE = 4, 4
LOST_NODE = NUM_NODES - 1
NUM_STEPS, SAVE_EVERY, LOST_AFTER = 12, 4, 6
PORT = 29400
SECONDS = 900
"""How long a run may take, on a busy machine too."""
RELATIVE = 2e-6
"""How far a loss may be off on another number of ranks: float32 sums in another order, over eight steps."""
RECIPE = f"""
seed: 7
{tiny_llama(tie_word_embeddings=True)}tokenizer:
  _target_: automodel_ckpt.examples.data.python_docs.train_tokenizer
  vocab_size: 300
dataset:
  _target_: automodel_ckpt.examples.data.python_docs.language_modeling
  seq_length: 16
optimizer:
  lr: 1e-2
step_scheduler:
  global_batch_size: 48
  local_batch_size: 1
  max_steps: {NUM_STEPS}
  ckpt_every_steps: {SAVE_EVERY}
checkpoint:
  save_consolidated: false
logging:
  sample_ids: true
"""

Records = dict[int, dict[str, Any]]
"""The lines of training.jsonl, by step."""


@dataclass
class Run:
    """The launchers of a run, one per node, and their outputs."""

    launchers: list[subprocess.Popen[str]]
    outputs: list[Path]

    def ended(self) -> list[int]:
        """The exit codes of the launchers, once all have ended."""
        end = time.monotonic() + SECONDS
        return [each.wait(max(0.1, end - time.monotonic())) for each in self.launchers]

    def text(self) -> str:
        """What the launchers printed."""
        texts = []
        for number, output in enumerate(self.outputs):
            texts.append(f"--- node {number}\n{output.read_text()}")
        return "\n".join(texts)


class Campaign:
    """The runs of one invocation, in *root*."""

    def __init__(self, root: Path, commands: CommandServer, hosts: Sequence[str]) -> None:
        self.root, self.commands, self.hosts = root, commands, hosts
        self.recipe = root / "recipe.yaml"
        self.recipe.write_text(RECIPE)
        self.num_runs = 0

    def start(self, directory: Path, num_nodes: int, per_node: int) -> Run:
        """Start a launcher on each of the first nodes; all write to *directory*."""
        self.num_runs += 1
        words = [
            f"--nnodes={num_nodes}",
            f"--nproc-per-node={per_node}",
            f"--rdzv-endpoint={address_of(0)}:{PORT + self.num_runs}",
            f"--rdzv-id=run{self.num_runs}",
            f"--checkpoint.checkpoint_dir={directory}",
            str(self.recipe),
        ]
        launchers, outputs = [], []
        for number in range(num_nodes):
            output = self.root / f"run{self.num_runs}-node{number}.txt"
            with output.open("w") as file:
                launcher = self.commands.popen(
                    "python",
                    "-m",
                    "tools.nodes.command",
                    self.hosts[number],
                    *words,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            launchers.append(launcher)
            outputs.append(output)
        return Run(launchers, outputs)

    def train(self, directory: Path, num_nodes: int, per_node: int) -> Records:
        """Train to the end; the log of all steps."""
        run = self.start(directory, num_nodes, per_node)
        codes = run.ended()
        if any(codes):
            raise SystemExit(f"exit codes {codes}\n{run.text()}")
        return records_of(directory)

    def train_until_a_node_is_lost(self, directory: Path) -> None:
        """Train on all nodes until one loses its processes; the others must end and report it."""
        run = self.start(directory, NUM_NODES, RANKS_PER_NODE)
        end = time.monotonic() + SECONDS
        while max(records_of(directory), default=0) < LOST_AFTER:
            if time.monotonic() > end or any(each.poll() is not None for each in run.launchers):
                raise SystemExit(f"no step {LOST_AFTER}\n{run.text()}")
            time.sleep(0.05)
        print(f"  {memory_text(self.hosts)}")
        for process_id in processes_of(self.hosts[LOST_NODE]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        started = time.monotonic()
        codes = run.ended()
        seconds = time.monotonic() - started
        survivors = [code for number, code in enumerate(codes) if number != LOST_NODE]
        if survivors != [1] * (NUM_NODES - 1):
            raise SystemExit(f"exit codes {codes} after the loss of a node\n{run.text()}")
        report = " broke"
        for number, output in enumerate(run.outputs):
            if number != LOST_NODE and report not in output.read_text():
                raise SystemExit(f"node {number} does not print {report!r}\n{run.text()}")
        print(f"  the other nodes reported the loss, and ended {seconds:.0f} s after it")


def address_of(number: int) -> str:
    """The address of a node."""
    return f"10.77.42.{number + 1}"


def records_of(directory: Path) -> Records:
    """The steps in the log of a run. Each step must be there once."""
    path = directory / "training.jsonl"
    records: Records = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            record = json.loads(line)
            if "event" in record:
                continue
            if record["step"] in records:
                raise SystemExit(f"{path}: step {record['step']} twice")
            records[record["step"]] = record
    return records


def memory_text(hosts: Sequence[str]) -> str:
    """The memory of all processes on the nodes; shared pages count once."""
    kilobytes = count = 0
    for host in hosts:
        for process_id in processes_of(host):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        kilobytes += int(line.split()[1])
                        count += 1
    return f"{count} processes take {kilobytes / 1e6:.1f} GB"


def compare(straight: Records, other: Records, *, exactly: bool) -> None:
    """Raise unless *other* has all steps, with the same samples and losses."""
    if sorted(other) != list(range(1, NUM_STEPS + 1)) or sorted(straight) != sorted(other):
        raise SystemExit(f"steps {sorted(other)}")
    largest = 0.0
    for step, expected in straight.items():
        found = other[step]
        for name in ("samples", "label_tokens", "lr"):
            if found[name] != expected[name]:
                raise SystemExit(f"step {step}: {name} {found[name]}, expected {expected[name]}")
        for name in ("loss", "grad_norm"):
            if exactly and found[name] != expected[name]:
                raise SystemExit(f"step {step}: {name} {found[name]}, expected {expected[name]}")
        largest = max(largest, abs(found["loss"] / expected["loss"] - 1))
    if largest > RELATIVE or math.isnan(largest):
        raise SystemExit(f"losses differ by {largest:.1e}")
    text = "bit by bit" if exactly else f"up to {largest:.1e} of each loss"
    print(f"  all {NUM_STEPS} steps equal those of the undisturbed run {text}")


def digests(directory: Path) -> dict[str, str]:
    """The digests of the files of weights of the last checkpoint."""
    found = {}
    for path in sorted((directory / "LATEST" / "model").glob("*.safetensors")):
        found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def run_all(campaign: Campaign) -> None:
    """All runs and comparisons."""
    root = campaign.root

    def begin(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    begin(f"undisturbed, {NUM_NODES} nodes of {RANKS_PER_NODE} ranks")
    straight = campaign.train(root / "straight", NUM_NODES, RANKS_PER_NODE)
    begin(f"the same, until a node is lost after step {LOST_AFTER}")
    campaign.train_until_a_node_is_lost(root / "lost")
    shutil.copytree(root / "lost", root / "again", symlinks=True)
    begin("continued on 3 nodes of 2 ranks")
    compare(straight, campaign.train(root / "lost", 3, 2), exactly=False)
    begin(f"continued on {NUM_NODES} nodes of {RANKS_PER_NODE} ranks")
    same = campaign.train(root / "again", NUM_NODES, RANKS_PER_NODE)
    compare(straight, same, exactly=True)
    if digests(root / "straight") != digests(root / "again"):
        raise SystemExit("the weights differ")
    begin("done: weights are equal, too")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs and outputs there")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-nodes-"))
        root = given.keep.resolve() if given.keep is not None else Path(temporary) / "runs"
        root.mkdir(parents=True)
        hosts = stack.enter_context(nodes_at([address_of(n) for n in range(NUM_NODES)]))
        commands = CommandServer(Path(temporary))
        stack.callback(commands.end)
        run_all(Campaign(root, commands.begin(), hosts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
