"""Uploads of models to the Hugging Face Hub while training (section ``hub``)."""

from __future__ import annotations

from collections.abc import Callable

from automodel_ckpt.checkpoint.checkpointer import Checkpointer
from automodel_ckpt.config.keys.checkpoint import HubConfig
from automodel_ckpt.errors import SaveFailed
from automodel_ckpt.hub.background import Pushes

STARTING = "starting the uploads to the Hugging Face Hub"


class HubUploads:
    """The uploads of a run, which a process of rank 0 makes.

    All methods are collective, except :meth:`note_saved`, :attr:`uploading` and :meth:`close`.
    """

    def __init__(self, section: HubConfig, checkpointer: Checkpointer) -> None:
        self._section = section
        self._checkpointer = checkpointer
        self._pushes: Pushes | None = None

    def start(self, resumed_step: int | None) -> None:
        """Start the uploading process. The run continues from *resumed_step*, which is None for a new run.

        Raises :class:`SaveFailed` on all ranks if it cannot be started.
        """
        checkpointer = self._checkpointer

        def start() -> None:
            makes_exports = checkpointer.exports.of_each_checkpoint
            self._pushes = Pushes(
                checkpointer.directory, self._section, makes_exports=makes_exports
            )
            self._pushes.start(resumed_step)

        checkpointer.call_on_rank0(STARTING, start)

    def roll_back(self, step: int) -> None:
        """Continue after *step*, to which the run went back."""

        def roll_back() -> None:
            if self._pushes is not None:
                self._pushes.roll_back(step)

        self._checkpointer.call_on_rank0(STARTING, roll_back)

    def note_saved(self, name: str) -> None:
        """Have the checkpoint *name* uploaded if the section asks for it. Called by rank 0, in any thread."""
        if self._pushes is not None:
            self._pushes.note_saved(name)

    def finish(self, name: str, must_end: Callable[[], bool]) -> None:
        """Upload the last model, from the checkpoint *name*, and wait until *must_end* returns true at the latest.

        Raises :class:`SaveFailed` with ``hub.required``.
        """

        def finish() -> None:
            if self._pushes is not None:
                self._pushes.note_last(name)
                self._pushes.finish(must_end)

        doing = "uploading to the Hugging Face Hub (the checkpoints are safe)"
        self._checkpointer.exports.run_on_rank0(doing, finish, SaveFailed)

    @property
    def uploading(self) -> str:
        """How far the uploads are that :meth:`finish` waits for. Not collective."""
        return "" if self._pushes is None else self._pushes.process.uploading

    def close(self) -> None:
        """Let uploads continue for a while without this process."""
        if self._pushes is not None:
            self._pushes.close()
