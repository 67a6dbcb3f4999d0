"""Everything that reads a checkpoint, each as a function from a run directory to an exit code."""

import contextlib
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automodel_ckpt.base.terminal import print_error
from automodel_ckpt.checkpoint import discover
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.memory.nodes import open_memory
from automodel_ckpt.checkpoint.memory.save_files import remove_set_aside, saves_set_aside
from automodel_ckpt.checkpoint.node_directories import RunGeneration
from automodel_ckpt.checkpoint.parts.commit import point
from automodel_ckpt.checkpoint.parts.manifest import Summary
from automodel_ckpt.checkpoint.remote import background
from automodel_ckpt.checkpoint.remote.child_process import Status, only_one
from automodel_ckpt.checkpoint.run import notes
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.run.links import pending
from automodel_ckpt.checkpoint.run.notes import read_note
from automodel_ckpt.checkpoint.run.resume import KeepPolicy
from automodel_ckpt.checkpoint.store.transfer import UploadMemory
from automodel_ckpt.cli import ckpt
from automodel_ckpt.errors import describe
from automodel_ckpt.hub import background as hub
from automodel_ckpt.logs.follow import Follower, upload_lock
from automodel_ckpt.logs.metrics import JsonlLog
from automodel_ckpt.logs.progress import Progress, TextLog, set_up_logging
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.parallel.ranks.hangs import RankState, read_states, write_state
from tests.hostile.harness import victim
from tests.support.models import tiny

_TOOL = Path(__file__).resolve().parents[3] / "tools" / "offline_hf_consolidation.py"


def _resume(run: Path, **options: Any) -> int:
    """What a trainer does with a checkpoint, and how it ends when that fails."""
    set_up_logging(Progress(stream=sys.stderr), "info", 0)
    checkpointer = tiny.checkpointer(run, **options)
    try:
        checkpointer.load(discover(victim.recipe()))
        return 0
    except Exception as error:
        code, message = describe(error)
        print_error(message)
        return code
    finally:
        checkpointer.close()


def _newest(run: Path) -> str:
    return str(run / victim.NAME)


def _tool(run: Path) -> int:
    before = sys.argv
    sys.argv = [
        str(_TOOL),
        "--input-dir",
        str(run / victim.NAME / "model"),
        "--output-dir",
        str(run / "exported"),
    ]
    try:
        runpy.run_path(str(_TOOL), run_name="__main__")
    finally:
        sys.argv = before
    return 0


def _cut_back(run: Path) -> int:
    """What a resumed trainer does with the logs of the run, and how it ends when that fails."""
    set_up_logging(Progress(stream=sys.stderr), "info", 0)
    try:
        for name in (layout.TRAINING_LOG, layout.VALIDATION_LOG):
            log = JsonlLog(run / name)
            log.truncate_after(20)
            log.append({"step": 21, "loss": 1.0})
            log.close()
        return 0
    except Exception as error:
        code, message = describe(error)
        print_error(message)
        return code


def _text_log(run: Path) -> int:
    """What a trainer writes for a person to read; nothing that is in its place may fail the run."""
    log = TextLog()
    log.write("before")
    log.open(run / layout.TEXT_LOG, lambda: None)
    log.write("after")
    log.close()
    return 0


def _follow(run: Path) -> int:
    """What the process beside a trainer does, which feeds trackers; it may fail, and alone."""
    try:
        with upload_lock(run, wait=False):
            Follower(run, {}, 20).close()
        return 0
    except OSError as error:
        print_error(str(error))
        return 4


def _uploads(run: Path) -> int:
    """Read what the process that uploads checkpoints keeps in the run directory."""
    memory = UploadMemory.read(
        run / f"{background.LINK}epoch_0_step_20.json", "xxh3_128:0", "s3://bucket/run"
    )
    Status.read(run, background.STATUS)
    Status.read(run, background.PART_STATUS)
    notes.GoneBack.read(run)
    try:
        pending(run, background.LINK)
        with only_one(run, background.LOCK, "token"):
            memory.note_done("model/file")
        memory.forget()
        notes.note_gone_back(run, 20, "token")
        notes.forget_gone_back(run)
        return 0
    except OSError as error:
        print_error(str(error))
        return 4


def _memory(run: Path) -> int:
    """Open the memory checkpoints of the run."""
    parent = run / "memory"
    parent.mkdir(exist_ok=True)
    try:
        open_memory(run, parent)
        return 0
    except OSError as error:
        print_error(str(error))
        return 4
    finally:
        shutil.rmtree(parent)


def _generation(run: Path) -> int:
    """Begin the generation of a start on nodes without shared storage, after the one that is recorded."""
    generation = RunGeneration.read(run).next(["xxh3_128:0"])
    summary = Summary.read(run / "epoch_0_step_20")
    generation.is_current(summary)
    try:
        generation.write(run)
        saves_set_aside(run)
        remove_set_aside(run)
    except OSError as error:
        print_error(str(error))
        return 4
    assert RunGeneration.read(run) == generation
    return 0


def _pushes(run: Path) -> int:
    """Read what the process that uploads to the Hub keeps in the run directory."""
    Status.read(run, hub.STATUS)
    try:
        pending(run, hub.LINK)
        with only_one(run, hub.LOCK, "token"):
            return 0
    except OSError as error:
        print_error(str(error))
        return 4


def _merge(run: Path) -> int:
    before = tempfile.tempdir, os.environ.get("AUTOMODEL_CKPT_CACHE")
    tempfile.tempdir = os.environ["AUTOMODEL_CKPT_CACHE"] = str(run)
    try:
        return ckpt.main(["export", _newest(run), "--merge", "--output", str(run / "whole")])
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("AUTOMODEL_CKPT_CACHE") if before[1] is None else os.environ.update(
            AUTOMODEL_CKPT_CACHE=before[1]
        )


def _exported(run: Path) -> str:
    return os.path.join(_newest(run), "model", "consolidated")


def _drop_optimizer(run: Path) -> int:
    return ckpt.main(["prune", str(run), "--keep-last", "1", "--drop-optimizer"])


def _timeline(run: Path) -> int:
    """What a start writes about its time, beside that of the start before it."""
    timeline = Timeline()
    timeline.open(run, lambda: None, step=20, resumed_from=None, world_size=1)
    timeline.seconds_of_step(21)
    timeline.close()
    return 0


def _hangs(run: Path) -> int:
    """What a rank does when a step hangs; a state that it cannot write or read may not fail the run."""
    directory = run / layout.HANGS / "step_21"
    with contextlib.suppress(OSError):
        state = RankState(0, 1.0, 20, "steps", 1.0, {}, "")
        write_state(directory, state)
        read_states(directory, 0.0)
    return 0


def _save_request(run: Path) -> int:
    """What a start does with a request that was left, and ``ckpt save`` with the answer."""
    directory = RunDirectory(run, KeepPolicy(), "val_loss")
    directory.remove_leftover_request()
    bool(directory.save_is_requested)
    read_note(run, layout.SAVE_ANSWER)
    return 0


READERS: dict[str, Callable[[Path], int]] = {
    "resume": _resume,
    "resume_unverified": lambda run: _resume(run, verify="none"),
    "restore_from_path": lambda run: _resume(run, restore_from=_newest(run)),
    "restore_from_LATEST": lambda run: _resume(run, restore_from="LATEST"),
    "verify": lambda run: ckpt.main(["verify", _newest(run)]),
    "verify_deep": lambda run: ckpt.main(["verify", "--deep", str(run)]),
    "ls": lambda run: ckpt.main(["ls", str(run)]),
    "ls_json": lambda run: ckpt.main(["ls", "--json", str(run)]),
    "show": lambda run: ckpt.main(["show", _newest(run)]),
    "show_json": lambda run: ckpt.main(["show", "--json", _newest(run)]),
    "show_stats": lambda run: ckpt.main(["show", "--stats", _newest(run)]),
    "diff": lambda run: ckpt.main(["diff", _newest(run), str(run / OTHER)]),
    "import": lambda run: ckpt.main(["import", _newest(run), str(run / "imported")]),
    "show_export": lambda run: ckpt.main(["show", "--stats", _exported(run)]),
    "import_export": lambda run: ckpt.main(["import", _exported(run), str(run / "imported")]),
    "show_LATEST": lambda run: ckpt.main(["show", str(run / "LATEST")]),
    "consolidate": lambda run: ckpt.main(["consolidate", _newest(run)]),
    "tool": _tool,
    "gguf": lambda run: ckpt.main(
        ["export", _newest(run), "--to", "gguf", "-o", str(run / "model.gguf")]
    ),
    "prune": lambda run: ckpt.main(
        ["prune", str(run), "--keep-last", "1", "--keep-best", "1", "--dry-run"]
    ),
    "drop_optimizer": _drop_optimizer,
    "merge": _merge,
    "plot": lambda run: ckpt.main(["plot", str(run), "--output", str(run / "curves.html")]),
    "cut_back": _cut_back,
    "text_log": _text_log,
    "follow": _follow,
    "uploads": _uploads,
    "pushes": _pushes,
    "memory": _memory,
    "generation": _generation,
    "goodput": lambda run: ckpt.main(["goodput", str(run)]),
    "timeline": _timeline,
    "hangs": _hangs,
    "save_request": _save_request,
}

# Readers of what a checkpoint's files hold, beside those that read its manifest only.
RESUMES = frozenset({"resume", "resume_unverified", "restore_from_path", "restore_from_LATEST"})
CHECKS = frozenset({"verify", "verify_deep"})
EXPORTS = frozenset({"consolidate", "tool"})
LISTS = frozenset({"ls", "ls_json", "show", "show_json", "show_LATEST"})
PRUNES = frozenset({"prune", "drop_optimizer"})
# It takes what other programs wrote: attacks on a manifest do not concern it.
IMPORTS = frozenset({"import"})
# They read what the newest checkpoint was exported to.
OF_EXPORTS = frozenset({"show_export", "import_export"})
# They read tensors, recipes and small state, beside the manifest that `show` reads.
VALUES = frozenset({"show_stats", "diff"})
# They read the logs of a run, and what trackers have got of them.
LOGS = frozenset({"plot", "cut_back", "follow"})
# One only writes.
NOTES = frozenset(
    {
        "text_log",
        "uploads",
        "pushes",
        "memory",
        "generation",
        "goodput",
        "timeline",
        "hangs",
        "save_request",
    }
)
# It needs a Llama with a tokenizer.
GGUF = frozenset({"gguf"})
# It needs an adapter and its base.
MERGES = frozenset({"merge"})
ALL = frozenset(READERS) - IMPORTS - OF_EXPORTS - VALUES - LOGS - MERGES - GGUF - NOTES
OTHER = "other"


def form_for(name: str) -> str:
    """The form of an untouched checkpoint that a reader takes."""
    if name in GGUF:
        return "llama"
    return "adapter" if name in MERGES else "shards"


def prepare(name: str, run: Path) -> None:
    """What a reader needs beside the hostile checkpoint: pruning needs a newer one, so that the hostile one may go;
    a comparison another one; an import one without a manifest."""
    if name == "diff":
        shutil.copytree(victim.pristine(), run / OTHER)
    has_timeline = any(os.path.lexists(run / file) for file in ("timeline.jsonl", ".timeline.json"))
    if name == "goodput" and not has_timeline:
        _timeline(run)
    if name in IMPORTS:
        (run / victim.NAME / "MANIFEST.json").unlink(missing_ok=True)
    if name in PRUNES:
        newer = run / "epoch_0_step_30"
        shutil.copytree(victim.pristine(), newer)
        if not (run / "LATEST").is_dir() and not (run / "LATEST").exists():
            return
        if (run / "LATEST").is_symlink():
            point(run, "LATEST", newer.name)
