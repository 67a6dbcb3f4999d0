"""The uploads of a run to the Hub, seen from rank 0 of the trainer, which starts the process that makes them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.remote.child_process import UploadingProcess
from automodel_ckpt.checkpoint.run.links import TO_HUB, step_of
from automodel_ckpt.config.keys.checkpoint import HubConfig
from automodel_ckpt.errors import RecipeError, SaveFailed
from automodel_ckpt.hub.repository import LOGIN_HINT, has_token

log = logging.getLogger("automodel_ckpt")

LINK = TO_HUB
STATUS = ".hub.json"
LOCK = ".hub.lock"
"""The names in the run directory of links to what is uploaded, of the status, and of the lock of the process."""
_MODULE = "automodel_ckpt.hub.pusher"
_CARD_HINT = "name a README.md, or remove the key: a card is then written from the run"


def check_hub(section: HubConfig) -> None:
    """Raise :class:`RecipeError` if there is no token, or the file of the card cannot be read. Makes no request."""
    if not has_token():
        raise RecipeError(
            "uploads to the Hugging Face Hub need a token",
            "hub.repo",
            section.repo,
            LOGIN_HINT,
        )
    _card(section)


def _card(section: HubConfig) -> str | None:
    if section.card is None:
        return None
    path = Path(section.card).expanduser()
    # A recipe must not upload any other file, also not through a link.
    if path.resolve().suffix.lower() != ".md":
        raise RecipeError(
            "a model card is a Markdown file",
            "hub.card",
            section.card,
            _CARD_HINT,
        )
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            "the model card cannot be read",
            "hub.card",
            f"{section.card} ({error})",
            _CARD_HINT,
        ) from error


class Pushes:
    """Uploads the models of the checkpoints that the run in *root* publishes. Only rank 0 uses it.

    Nothing but :meth:`finish` waits for the network. *makes_exports*: the run exports each checkpoint.
    """

    def __init__(self, root: Path, section: HubConfig, *, makes_exports: bool) -> None:
        self._root, self._section = root, section
        # The newest step that the run has, for a process that is started again.
        self._step = 0
        name = "the process that uploads to the Hub"

        def job() -> ValueDict:
            return {**self.job, "went_back_to": self._step}

        self.process = UploadingProcess(_MODULE, root, LINK, LOCK, STATUS, job, name=name)
        # The text of the card instead of its path.
        fields = {**asdict(section), "card": _card(section)}
        self.job = {"section": fields, "makes_exports": makes_exports}

    def start(self, resumed_step: int | None) -> None:
        """Start the uploading process. The run continues from *resumed_step*. None: it begins.

        Checkpoints after this step that were to be uploaded are not: the run went back to a step before them.
        """
        self._step = resumed_step or 0
        self.process.start(self._step)

    def roll_back(self, step: int) -> None:
        """Continue after *step*, to which the run went back while it trains: later checkpoints are abandoned."""
        if self.process.is_started:
            # It stops when the next one, which waits for its lock, has been started.
            self.close()
            self.start(step)

    def note_saved(self, name: str) -> None:
        """Have a published checkpoint uploaded, if ``hub.push`` asks for it."""
        how = self._section.push
        is_best = how == "best" and commit.pointed(self._root, layout.LOWEST_VAL) == name
        if how == "every" or is_best:
            self._request(name)

    def note_last(self, name: str) -> None:
        """Have the last checkpoint of a run that ended on its own uploaded, unless it was."""
        if self._section.push == "final" and self.process.status.uploaded != name:
            self._request(name)

    def _request(self, name: str) -> None:
        self._step = step_of(name)
        self.process.request(name)

    def finish(self, must_end: Callable[[], bool] = lambda: False) -> None:
        """Wait for the uploads at the end of a run, while they make progress; with ``hub.required`` in any case.

        The wait ends when *must_end* returns true. What was not uploaded is a warning. Raises :class:`SaveFailed`
        instead with ``hub.required``.
        """
        if not self.process.is_started:
            return
        self.process.raise_priority()
        self.process.finish(waits=self._section.required, must_end=must_end)
        missing = self.process.pending
        status = self.process.status
        if not missing and not status.error:
            return
        failure = SaveFailed(
            "a model was not uploaded to the Hub; its checkpoint is complete on the local disk",
            f"hub:{self._section.repo}",
            "; ".join(filter(None, (", ".join(missing), status.error.replace("\n", " ")))),
            f"upload it with `ckpt push {self._root} hub:{self._section.repo}`",
        )
        if self._section.required:
            raise failure
        log.warning("%s", failure)

    def close(self) -> None:
        """Let the process finish what is pending, without waiting for it."""
        self.process.leave()
