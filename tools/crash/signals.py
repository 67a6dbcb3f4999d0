"""SIGTERM, SIGUSR1, SIGINT and SIGKILL at random instants, to a training on two ranks, and what is left then.

Each start of ``ckpt-train`` gets its signal at an instant drawn within one phase of its work, and has to end with 75 as
the contract says (:func:`judge`). The next start goes on from there with another phase, until the run is done: then it
has to be what a run without signals is. Some starts wait for data until they get their signal. The campaign
``endurance`` kills all processes of each start at any instant instead.
"""

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from tests.support.runs.marked_trainer import Mark, Trainer, kill_session
from tests.support.servers.command_server import CommandServer
from tools.crash import inspect, results
from tools.crash.record import Record
from tools.support import step_lines

PHASES = {
    "step": 0.05,
    "accumulation": 0.05,
    "validation": 0.05,
    "data": 0.05,
    "save": 0.1,
    "export": 0.1,
    "upload": 0.2,
    "start": 1.5,
}
"""Each phase, and the seconds after its beginning within which it gets its signal: about its length."""
KILL = {"kill": 1.0}
"""The phase of ``endurance``: the whole run, in lengths of an undisturbed one."""
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TARGETS = ("launcher", "rank0", "rank1")
STEPS, SAVE_EVERY, VALIDATE_EVERY = 36, 4, 3
STARTED_SECONDS, ENDED_SECONDS, WAITING_SECONDS = 60.0, 40.0, 5.0
BETWEEN = {
    "agree": "step",
    "finish": "step",
    "saved": "step",
    "published": "step",
    "exported": "step",
    "batch": "validation",
    "hang": "data",
}
"""Marks that begin no phase, and what they belong to; only waits for data hang."""

RECIPE = """
recipe: tests.support.runs.marked_recipe.Marked
seed: 5
model:
  from_config: {model_type: llama, vocab_size: 128, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 32, attention_dropout: 0.1}
distributed: {backend: gloo}
dataset: {_target_: tests.support.runs.marks.Samples}
validation_dataset: {_target_: tests.support.runs.marks.Samples, trains: false}
optimizer: {lr: 1e-2}
lr_scheduler: {name: cosine}
step_scheduler: {global_batch_size: 8, local_batch_size: 2, num_epochs: 100, ckpt_every_epochs: null}
logging: {sample_ids: true}
"""


@dataclass(frozen=True)
class Point:
    """One start and its signal: *seconds* after the *occurrence*-th beginning of the phase."""

    phase: str
    target: str
    number: signal.Signals
    occurrence: int = 1
    seconds: float = 0.0
    hangs: bool = False
    """Whether the start waits for data until it gets its signal."""

    def __str__(self) -> str:
        place = " hanging in data" if self.hangs else ""
        when = f"{self.phase}/{self.occurrence}+{self.seconds:.3f}"
        return f"{when}/{self.target}/{self.number.name}{place}"


def random_points(
    seed: int, met: Mapping[str, int], phases: Mapping[str, float]
) -> Iterator[Point]:
    """Points without end, each of the phase that signals have *met* least."""
    chance = random.Random(seed)
    while True:
        phase = min(chance.sample(list(phases), len(phases)), key=lambda one: met.get(one, 0))
        target, number = chance.choice(TARGETS), chance.choice(NUMBERS)
        if phase == "kill":
            target, number = "all", signal.SIGKILL
        hangs = phase == "data" and chance.random() < 0.5
        seconds = chance.uniform(0, phases[phase])
        yield Point(phase, target, number, chance.choice((1, 1, 2)), seconds, hangs)


class Chain:
    """A run in its *directory*, from start to start."""

    def __init__(self, base: Path, name: str, commands: CommandServer) -> None:
        self.base, self.root, self.commands = base, base / name, commands
        self.recipe = base / "recipe.yaml"
        self.recipe.write_text(RECIPE)
        self.starts = 0

    def start(self, **settings: Any) -> Trainer:
        """The next start; *settings*: ``is_async``, ``save_consolidated``, ``hang``, ``steps``, ``max_restarts``, and
        ``keys`` of the recipe."""
        self.starts += 1
        keys = {
            "checkpoint.checkpoint_dir": self.root,
            "checkpoint.is_async": settings.get("is_async", "false"),
            "checkpoint.save_consolidated": settings.get("save_consolidated", "false"),
            "step_scheduler.max_steps": settings.get("steps", STEPS),
            "step_scheduler.ckpt_every_steps": SAVE_EVERY,
            "step_scheduler.val_every_steps": VALIDATE_EVERY,
        } | settings.get("keys", {})
        restarts = f"--max-restarts={settings.get('max_restarts', 0)}"
        words = ["--nproc-per-node=2", "--trust=tests", restarts, str(self.recipe)]
        words += [f"--{key}={value}" for key, value in keys.items()]
        hang = {"CRASH_HANG": settings["hang"]} if settings.get("hang") else {}
        directory = self.base / f"{self.root.name}-start-{self.starts}"
        return Trainer(self.commands, words, directory, hang)

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        return next((name.step for name in inspect.checkpoints(self.root)), 0)

    def differences(self, undisturbed: "Chain") -> list[str]:
        """What is not as in an undisturbed run, and what is wrong with the checkpoints."""
        found = list(results.differences(undisturbed.root, self.root))
        return found + inspect.damage(self.root) + inspect.wrong_pointers(self.root)


def settings_of(point: Point, newest: int) -> dict[str, Any]:
    """How the start differs from the others: what the phase needs."""
    rank = point.target[-1] if point.target != "launcher" else "1"
    second = point.occurrence == 2
    is_async = point.phase == "upload" or (point.phase in ("export", "kill") and second)
    exports = point.phase in ("export", "save", "kill")
    return {
        "is_async": str(is_async).lower(),
        "save_consolidated": "every" if exports else "false",
        "hang": f"data {newest + 1 + point.occurrence} {rank}" if point.hangs else "",
    }


class Campaign:
    """Runs points along chains; their ends are compared with the *undisturbed* run, if there is one."""

    def __init__(
        self, base: Path, commands: CommandServer, record: Record, *, compares: bool
    ) -> None:
        self.base, self.commands, self.record = base, commands, record
        self.number = 0
        self.chain: Chain | None = None
        self.undisturbed: Chain | None = None
        self.run_seconds = 0.0
        if compares:
            self.undisturbed = Chain(base, "undisturbed", commands)
            started = time.monotonic()
            with self.undisturbed.start() as trainer:
                if not trainer.wait(180) or trainer.code != 0:
                    raise RuntimeError(f"an undisturbed run: {trainer.code}\n{trainer.log[-3000:]}")
            self.run_seconds = time.monotonic() - started

    def run(self, point: Point | None) -> None:
        """One start and its signal; without a point to the end of the run."""
        if self.chain is None:
            self.number += 1
            self.chain = Chain(self.base, f"run-{self.number}", self.commands)
        chain, before = self.chain, self.chain.newest()
        with chain.start(**settings_of(point, before) if point else {}) as trainer:
            sent = self._signal(point, trainer) if point is not None else None
            met, wrong = "unfinished", ["it does not end"]
            if trainer.wait(ENDED_SECONDS if point else 180):
                met, wrong = judge(point, trainer, chain, before, sent)
        if trainer.code == 0 and self.undisturbed is not None:
            met = "finished as if undisturbed" if point is None or met == "ended before" else met
            wrong += chain.differences(self.undisturbed)
        log = trainer.log[-3000:] if wrong else ""
        place = {"point": str(point), "chain": chain.root.name, "start": chain.starts}
        self.record.add(met, wrong, **place, log=log)
        if trainer.code == 0 or wrong:
            self.chain = None

    def _signal(self, point: Point, trainer: Trainer) -> float | None:
        """Wait for the instant, send, and return when. Returns None when no process was there to get it."""
        if point.phase == "kill":
            if trainer.wait(point.seconds * self.run_seconds):
                return None
            kill_session(trainer.pid)
            return time.monotonic()
        if not _await(trainer, point):
            return None
        time.sleep(point.seconds)
        try:
            return trainer.send(point.target, point.number)
        except ProcessLookupError:
            return None


def _await(trainer: Trainer, point: Point) -> bool:
    """Whether the phase begins as often as the point says before the command ends."""
    name = "hang" if point.hangs else point.phase
    rank = int(point.target[-1]) if point.target != "launcher" else 0
    ranks = (0, 1) if name in ("hang", "export") else (rank,)
    times = 1 if point.hangs else point.occurrence
    end = time.monotonic() + STARTED_SECONDS
    while time.monotonic() < end:
        begun = max(sum(mark.name == name for mark in trainer.marks(rank)) for rank in ranks)
        if begun >= times or (name == "start" and trainer.listens(point.target)):
            return True
        if trainer.wait(0.002):
            return False
    return False


def judge(
    point: Point | None, trainer: Trainer, chain: Chain, before: int, sent: float | None
) -> tuple[str, list[str]]:
    """What the start came to, and which promises it broke; *before* is the newest checkpoint's step before it."""
    wrong = [f"process {pid} is left" for pid in trainer.orphans()]
    wrong += inspect.damage(chain.root)
    if sent is not None and point is not None and point.phase == "kill":
        return "killed", wrong
    wrong += [f"left over: {path.name}" for path in (trainer.directory / "tmp").iterdir()]
    if sent is None or point is None:
        if trainer.code != 0:
            wrong.append(f"exit code {trainer.code}")
        return "ended before", wrong
    leftovers = inspect.leftovers(chain.root, running=False)
    wrong += [text for text in leftovers if not text.endswith(".jsonl")]
    if trainer.code == 0 and chain.newest() == STEPS:
        return "after the last step", wrong
    marks = [trainer.marks(rank) for rank in (0, 1)]
    target_rank = 1 if point.target == "rank1" else 0
    met = phase_at(marks[target_rank], marks[0], sent)
    return met, wrong + stopped_wrongly(met, trainer, chain, before, marks, sent)


def phase_at(marks: list[Mark], leader: list[Mark], instant: float) -> str:
    """What a rank was doing; what the leader does in the background comes first."""
    for name, end in (("export", "exported"), ("upload", "published")):
        last = {mark.name: mark.seconds for mark in leader if mark.seconds <= instant}
        if last.get(name, 0.0) > last.get(end, 0.0):
            return name
    now = next((mark.name for mark in reversed(marks) if mark.seconds <= instant), "start")
    return BETWEEN.get(now, now)


def stopped_wrongly(
    met: str, trainer: Trainer, chain: Chain, before: int, marks: list[list[Mark]], sent: float
) -> list[str]:
    """What is not as a stop has to be."""
    wrong = [] if trainer.code == 75 else [f"exit code {trainer.code}, not 75"]
    stops = [[mark for mark in one if mark.name == "stop"] for one in marks]
    if not all(stops):
        return wrong if met == "start" else [*wrong, "a rank did not stop in order"]
    steps = {stop[0].step for stop in stops}
    if len(steps) > 1:
        wrong.append(f"the ranks stopped at steps {sorted(steps)}")
    step = max(steps)
    wrong += _wrong_saves(chain, step, before, marks[0])
    steps_begun = [m for one in marks for m in one if m.name in ("accumulation", "step")]
    begun = {mark.step for mark in steps_begun if mark.seconds <= sent}
    late = {mark.step for mark in steps_begun} - begun
    if len(late) > 1:
        wrong.append(f"steps after {sorted(late)} were begun after the signal")
    for one in marks:
        batches = [m for m in one if m.name == "validation" and m.seconds > sent]
        if met == "validation" and len(batches) > 1:
            wrong.append(f"{len(batches)} batches of validation were begun after the signal")
    if met == "data" and stops[0][0].seconds - sent > WAITING_SECONDS:
        wrong.append(f"it stopped {stops[0][0].seconds - sent:.1f} s after the signal")
    return wrong


def _wrong_saves(chain: Chain, step: int, before: int, leader: list[Mark]) -> list[str]:
    """Whether the step where it stopped is the newest checkpoint, saved once, and exported only if it was before."""
    wrong = []
    if chain.newest() != step:
        wrong.append(f"stopped at step {step}, saved is step {chain.newest()}")
    saves = Counter(mark.step for mark in leader if mark.name == "save")
    wrong += [f"step {at} was saved {count} times" for at, count in saves.items() if count > 1]
    lines = [line["step"] for line in step_lines(chain.root / "training.jsonl")] if step else []
    if lines != list(range(1, step + 1)):
        wrong.append(f"training.jsonl ends with steps {lines[-3:]}, the checkpoint is of {step}")
    for name in inspect.checkpoints(chain.root)[:1]:
        exported = (chain.root / str(name) / "model" / layout.CONSOLIDATED).exists()
        if exported and step > before and step % SAVE_EVERY:
            wrong.append("the signal made an export")
    return wrong


def run(
    commands: CommandServer,
    phases: Mapping[str, float] = PHASES,
    *,
    points: int,
    seed: int,
    seconds: float,
    compares: bool = True,
) -> Record:
    """The campaign; the outcomes of its record are the phases that signals met. Each gets its share. The last run is
    trained to its end, if its result is compared."""
    name = "endurance" if phases == KILL else "signals"
    record = Record(name, {"points": points, "seed": seed, "seconds": seconds})
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="signals-", ignore_cleanup_errors=True) as base:
        campaign = Campaign(Path(base), commands, record, compares=compares)
        for point in random_points(seed, record.outcomes, phases):
            campaign.run(point)
            num_met = record.outcomes["killed"] if phases == KILL else record.points
            if num_met >= points or time.monotonic() > end:
                break
        if compares and campaign.chain is not None:
            campaign.run(None)
    return record
