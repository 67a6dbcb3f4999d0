"""Upload the models of a run to the Hub while it trains.

What has to be uploaded are the checkpoints with a link ``.hub-NAME`` in the run directory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.remote.child_process import UploadLoop, print_line, serve
from automodel_ckpt.checkpoint.run.links import pending, step_of, unlink
from automodel_ckpt.config.keys.checkpoint import HubConfig
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.hub.background import LINK, LOCK, STATUS
from automodel_ckpt.hub.bundle import opened
from automodel_ckpt.hub.card import card_files
from automodel_ckpt.hub.push import content_bytes, push
from automodel_ckpt.hub.repository import HubAddress, HubError, client, reporting, web_page

_MIB = 1 << 20
# How often a rejected upload is tried after the run has ended: another attempt would be rejected, too.
_ATTEMPTS_AT_END = 3
# How long an export that the run itself makes is waited for, before another one is made.
_EXPORT_SECONDS = 60.0


class Pusher(UploadLoop):
    """Uploads the models of the pending checkpoints of the run in *root*."""

    def __init__(
        self, root: Path, section: HubConfig, *, went_back_to: int = 0, makes_exports: bool = False
    ) -> None:
        """*section* has the text of the card instead of its path, and *went_back_to* is the step that the run resumed
        from."""
        super().__init__(root, LINK, STATUS)
        self._section = section
        self._makes_exports = makes_exports
        self._address = HubAddress(section.repo, section.revision)
        self._has_begun = False
        self._attempts_at_end = 0
        self._first_sent = _sent_bytes()
        self._total_bytes = 0
        uploaded = self.status.uploaded
        if uploaded is not None and step_of(uploaded) > went_back_to:
            # The run went back: what it uploads next is newer.
            uploaded = None
        self.note(uploaded=uploaded, error="", failures=0, is_over=False)

    @property
    def sent_bytes(self) -> int:
        """The bytes that this machine has sent: the library's uploads do not show their progress."""
        return _sent_bytes() - self._first_sent

    @property
    def total_bytes(self) -> int:
        """The bytes that were sent when the upload in progress is complete."""
        return self._total_bytes

    def stop(self) -> None:
        """End the process: a commit is made completely or not at all, and contents are not transferred again."""
        os._exit(0)

    def catch_up(self) -> None:
        """Upload all pending models, the newest first. Raises :class:`HubError`."""
        try:
            if not self._has_begun:
                # A rejected token is reported at the start, not after the first checkpoint.
                with reporting(self._address, "creating the repository"):
                    repo, private = self._section.repo, self._section.private
                    client().create_repo(repo, private=private, exist_ok=True)
                self._has_begun = True
            while names := pending(self.root, LINK):
                # A newer one replaces those that were not uploaded yet.
                for name in names[1:] if self._section.push != "every" else ():
                    unlink(self.root, LINK, name)
                self._push(names[0])
        except HubError as error:
            self._attempts_at_end += self.finishing.is_set() and not error.is_temporary
            if self._attempts_at_end >= _ATTEMPTS_AT_END:
                self.note(error=str(error), is_over=True)
                self.stopping.set()
                return
            raise

    def _push(self, name: str) -> None:
        section = self._section
        # The run may make this export in the background.
        export = self.root / name / "model" / layout.CONSOLIDATED
        deadline = time.monotonic() + _EXPORT_SECONDS
        while self._makes_exports and not export.is_dir() and time.monotonic() < deadline:
            if self.finishing.wait(0.5):
                break
        started = time.monotonic()
        error = ""
        try:
            with opened(self.root / name, print_line, base_model=section.base_model) as bundle:
                for address in self._targets(name):
                    card = card_files(
                        bundle,
                        address,
                        base_model=section.base_model,
                        license_name=section.license,
                        readme=section.card,
                        is_online=True,
                    )
                    files = {**bundle.files, **card}
                    self._total_bytes = self.sent_bytes + sum(map(content_bytes, files.values()))
                    push(files, address, message=f"Upload {name}", private=section.private)
        except (CheckpointUnusable, RecipeError) as found:
            # Repeating cannot help: the checkpoint is damaged, or the repository is public.
            error = str(found)
        unlink(self.root, LINK, name)
        if error:
            print_line(f"warning: {name} is not uploaded: {error}")
            self.note(error=error)
            return
        newest = self.status.uploaded
        if newest is None or step_of(newest) < step_of(name):
            newest = name
        self.note(uploaded=newest, failures=0, error="")
        seconds = time.monotonic() - started
        print_line(f"uploaded {name} to {web_page(self._address)} in {seconds:.1f} s")

    def _targets(self, name: str) -> list[HubAddress]:
        """The branches that get the model of a checkpoint."""
        if self._section.push != "every":
            return [self._address]
        targets = [HubAddress(self._section.repo, f"step-{step_of(name)}")]
        best = commit.pointed(self.root, layout.LOWEST_VAL)
        newest = self.status.uploaded
        is_newest = newest is None or step_of(name) > step_of(newest)
        if name == best or (best is None and is_newest):
            targets.append(self._address)
        return targets


def _sent_bytes() -> int:
    """The bytes that the network interfaces have sent (Linux), in whole MiB: keep-alive messages are no progress.

    Elsewhere the time, which always advances.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
        # The ninth number of an interface: proc_pid_net(5).
        sent = sum(int(line.partition(":")[2].split()[8]) for line in lines)
    except (OSError, ValueError, IndexError):
        return int(time.monotonic())
    return sent // _MIB * _MIB


def main(arguments: list[str]) -> int:
    """Upload until the trainer asks to finish, or for some time after it has ended otherwise."""
    from huggingface_hub import utils

    library: Any = utils
    library.disable_progress_bars()
    root = Path(arguments[0])

    def pusher(job: Values) -> Pusher:
        return Pusher(root, **{**job, "section": HubConfig(**job["section"])})

    return serve(root, LOCK, pusher)
