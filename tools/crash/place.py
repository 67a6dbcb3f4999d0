"""A run directory in memory, what a run starts from, and the two ranks that start on it anew."""

import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tools.crash import jobs
from tools.crash.jobs import Run
from tools.crash.pair import Outcome, Pair
from tools.crash.subjects import Options, Subject

NEXT_STEP = 900


@dataclass(frozen=True)
class Scenario:
    """What is there before (*prepared* steps), and what the disturbed run does: load, then save *step* (None: no
    save). *resumes*: the step that a start finds where the save did not come about."""

    name: str
    prepared: tuple[int, ...]
    step: int | None
    options: Options = field(default_factory=Options)
    resumes: int | None = None
    litter: bool = False

    @property
    def final(self) -> str:
        return f"epoch_0_step_{self.step}"


class Place:
    """A directory for runs, and one pair of ranks that starts anew again and again."""

    def __init__(self, seed: int) -> None:
        jobs.warm_up()
        self.random = random.Random(seed)
        self.directory = Path(tempfile.mkdtemp(prefix="crash-", dir="/dev/shm"))
        self.root = self.directory / "run"
        self._templates: dict[tuple[str, str], Path] = {}
        self._pair: Pair | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.replace_pair()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def pair(self) -> Pair:
        """The ranks that start anew; a new pair when one of the last has died."""
        if self._pair is not None and not self._pair.alive:
            self.replace_pair()
        self._pair = self._pair or Pair()
        return self._pair

    def replace_pair(self) -> None:
        """After a start that failed, perhaps on one rank only: its group may be out of step."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def start(self, subject: Subject, options: Options | None = None) -> list[Outcome]:
        """What each rank resumes from. Its session stays open, unless a rank failed."""
        outcomes = self.pair.run(jobs.begin, Run(subject, self.root, (), options or Options()))
        if not all(outcome.ok for outcome in outcomes):
            self.replace_pair()
        return outcomes

    def prepare(self, subject: Subject, root: Path, steps: tuple[int, ...]) -> None:
        checked(self.pair.run(jobs.whole, Run(subject, root, steps)))

    def lay_out(self, subject: Subject, scenario: Scenario) -> None:
        """Put what the scenario starts from in the place of the run directory."""
        key = (subject.name, scenario.name)
        template = self.directory / f"template-{len(self._templates)}"
        if key not in self._templates:
            self._templates[key] = template
            if scenario.prepared:
                self.prepare(subject, template, scenario.prepared)
            if scenario.litter:
                _litter(template)
        shutil.rmtree(self.root, ignore_errors=True)
        if self._templates[key].exists():
            shutil.copytree(self._templates[key], self.root, symlinks=True)


def checked(outcomes: list[Outcome]) -> list[Outcome]:
    """Raise what failed on a rank."""
    for outcome in outcomes:
        if outcome.kind:
            raise RuntimeError(outcome.traceback)
    return outcomes


def _litter(root: Path) -> None:
    """What killed saves and removals leave: staging directories torn and sealed, trash, links half swapped."""
    newest = root / "epoch_0_step_20"
    shutil.copytree(newest, root / f".epoch_0_step_30.staging-{'a' * 32}")
    torn = root / f".epoch_0_step_40.staging-{'b' * 32}"
    shutil.copytree(newest, torn)
    (torn / "MANIFEST.json").unlink()
    (torn / ".parts").mkdir()
    (torn / ".parts" / "rank_00000").write_text("{")
    trash = root / f".trash-{'c' * 32}"
    shutil.copytree(root / "epoch_0_step_10", trash)
    (trash / "config.yaml").unlink()
    (root / f".LATEST.{'d' * 32}").symlink_to("epoch_0_step_20")
    for pointer in ("LATEST", "LOWEST_VAL"):
        (root / pointer).unlink()
        (root / pointer).symlink_to("epoch_0_step_10")
