"""Which checkpoints are of the present generation of a run on nodes with separate directories.

A node that was absent for some time may have checkpoints that the run has abandoned meanwhile. Each start begins a new
generation. It has a random name, which the manifests of its checkpoints contain, and a record in the directory of each
node. If records differ, the one of the latest start is valid, by its time: new nodes do not know how many starts there
were.
Imports no torch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.run.notes import Damaged, read_note, write_note

NOTE = "generation"
"""The key in the manifest's ``environment`` with the name of the generation."""


@dataclass(frozen=True)
class Postponed:
    """A later checkpoint, by the *digest* of its manifest, of which absent nodes may have the missing files.

    It continues the logs of the generation with this *number*. Without a digest, there is no such checkpoint.
    """

    digest: str = ""
    number: int = 0


@dataclass(frozen=True)
class RunGeneration:
    """The generation *name* of a run, with its *number* and the digests of the *kept* checkpoints.

    The number is the time in nanoseconds since 1970 at which the generation began, or one more than the number of the
    generation before. The kept checkpoints are the checkpoints of earlier generations that it continues. Without a
    record, a run is in a generation without a name, to which all checkpoints belong. *has_logs* states whether the logs
    of the run are on this node, because rank 0 was there. The run continues from the *postponed* checkpoint if the
    nodes of a start have it completely before the generation publishes a checkpoint. The publication removes what the
    nodes have of it.
    """

    number: int = 0
    name: str = ""
    kept: tuple[str, ...] = ()
    has_logs: bool = False
    postponed: Postponed = field(default_factory=Postponed)

    @classmethod
    def read(cls, run: Path) -> RunGeneration:
        """Read the record in the directory *run*.

        When it is missing or damaged, returns the generation of a run without a record.
        """
        found = read_note(run, layout.GENERATION)
        postponed = found.get("postponed", {"digest": "", "number": 0})
        try:
            return cls(
                int(found["number"]),
                str(found["name"]),
                tuple(str(digest) for digest in found["kept"]),
                bool(found["has_logs"]),
                Postponed(str(postponed["digest"]), int(postponed["number"])),
            )
        except Damaged:
            return cls()

    def write(self, run: Path) -> None:
        """Replace the record in the directory *run*. Raises OSError."""
        write_note(run / layout.GENERATION, asdict(self))

    def is_current(self, summary: Summary) -> bool:
        """Whether the checkpoint with this manifest is of this generation, or of an earlier one that it continues."""
        name = summary.environment.get(NOTE, "")
        continued = (*self.kept, self.postponed.digest)
        return not self.name or name == self.name or summary.digest in continued

    def next(self, kept: Iterable[str], postponed: Postponed | None = None) -> RunGeneration:
        """Return the generation of the next start, which continues the checkpoints with the digests *kept*."""
        # This node's clock may be behind the clock of the start before.
        number = max(self.number + 1, time.time_ns())
        name = uuid.uuid4().hex
        return RunGeneration(number, name, tuple(kept), postponed=postponed or Postponed())
