"""What every rank does, however it was started: build the recipe, run it, and end so that its peers end too.

How a rank ends, under the launcher of this package:

* Done, or with a code that a restart cannot better (2, 3, 4, 75): it *returns* the code. The elastic agent takes a
  returned value, whatever it is, for success: it neither restarts nor signals anybody.
* With anything else (code 1): it leaves with exit status 1, so that the agent restarts the ranks or ends them.

When only one rank fails, its peers wait for it in a collective. They learn of it in three ways, the first that applies:

1. It writes its failure record, *then* leaves its process groups. With gloo that breaks the peers' connections and
   raises in their collectives. A rank that fails so finds the record there, and returns its code if that is final.
2. Every rank has a thread that looks for records of other ranks and for ranks that died without one. It ends its own
   rank when that has not ended by itself after PEER_GRACE_SECONDS: a backend may not notice (NCCL), or the rank may be
   busy elsewhere. After a second signal to one rank it waits for nothing.
3. The agent sends SIGTERM when a rank died, and SIGKILL later.

Ranks of other nodes are notified by :class:`~automodel_ckpt.cli.launch.failure_channel.FailureChannel`, which stores
the failure in the failure directory of their node.

A rank whose connections broke waits ECHO_SECONDS before it leaves, so that the agent meets the one that died first.
A rank restarted although the verdict is final (way 2 exits with 1) returns that verdict at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, NoReturn, Protocol

from automodel_ckpt.checkpoint.run.lease import release_all
from automodel_ckpt.cli.launch.failure_channel import FailureChannel
from automodel_ckpt.cli.launch.failures import (
    FINAL_CODES,
    STOPPED_AT_ONCE,
    FailureDirectory,
    FailureRecord,
    is_gone,
    is_stopped,
    lost_node,
    record_of,
    stopped_at_once,
    stopped_early,
    text_of,
    verdict,
)
from automodel_ckpt.distributed.keepalive import hold, hold_all, listen
from automodel_ckpt.distributed.network import let_gloo_be_found
from automodel_ckpt.distributed.stop import StoppedWaiting, StopRequest, stop_request
from automodel_ckpt.errors import (
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_STOPPED,
    AutomodelError,
    RecipeError,
    Stopped,
)
from automodel_ckpt.training.progress import Progress
from automodel_ckpt.user_code import reporting_user_failures

PEER_GRACE_SECONDS = 10.0
ECHO_SECONDS = 1.0
CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.5
WIRE_POLLS = 4
"""So many of these pass between two questions to another machine."""
FAREWELL_SECONDS = 4.0
NOTICE_SECONDS = 3.0
STOPPED_POLLS = 20
"""So often in a row a stopped peer is seen before that is said. Not seconds: a whole job may be suspended."""
PR_SET_PDEATHSIG = 1


class Recipe(Protocol):
    """What the launcher asks of a recipe; its class is called as ``cls(config, config_yaml=text)``.

    Then two attributes are set: ``origins``, where each value of the recipe comes from, by dotted key, and
    ``overridden``, the keys that the command line gives.
    """

    origins: Mapping[str, str]
    overridden: Collection[str]

    def setup(self) -> None: ...
    def run(self) -> None: ...
    def close(self) -> None: ...


RecipeClass = Callable[..., Recipe]


class Loaded(Protocol):
    """What the launcher needs of a loaded recipe file."""

    @property
    def config(self) -> Any: ...
    def to_yaml(self) -> str: ...


def run_rank(
    loaded: Loaded,
    recipe_class: RecipeClass,
    on_failure: Callable[[FailureRecord], None],
    exit_stopped: int = EXIT_STOPPED,
) -> int:
    """Run the recipe in this process, as the rank that RANK says (0 without it), and leave its process groups.

    ``on_failure`` gets the record of what ended the run, before anything is closed. Returns the exit code; raises
    nothing. In this process afterwards no thread of a process group is left, unless closing took CLOSE_SECONDS.
    A signal before training may end the process, with ``exit_stopped``.
    """
    recipe: Recipe | None = None
    stop, begun = stop_request(), False
    stop.exit_code = exit_stopped

    def leave(number: int) -> None:
        on_failure(stopped_early(this_rank(), number))
        _in_time(release_all)
        exit_now(exit_stopped)

    try:
        let_gloo_be_found(os.environ)
        with stop.before_training(leave), reporting_user_failures(RecipeError):
            recipe = recipe_class(loaded.config, config_yaml=loaded.to_yaml())
            recipe.origins = getattr(loaded, "origins", {})
            recipe.overridden = frozenset(
                override.key for override in getattr(loaded, "overrides", ())
            )
            recipe.setup()
        begun = True
        with reporting_user_failures(AutomodelError):
            recipe.run()
            recipe.close()
        _leave_process_groups()
        stop.finished = True
        return EXIT_DONE
    except BaseException as error:
        # A second signal must not change the exit code of a rank that has saved: srun sends one to all tasks as soon
        # as the first has ended with 75, where Slurm's KillOnBadExit is set.
        stop.finished = isinstance(error, Stopped)
        record = record_of(error, this_rank())
        if not begun and _was_stopped(stop, error, record):
            record = stopped_early(this_rank(), stop.requested)
            stop.finished = True
        _end_line(recipe)
        on_failure(record)
        _close_quietly(recipe)
        if not begun:
            _in_time(release_all)
        return record.code


def _was_stopped(stop: StopRequest, error: BaseException, record: FailureRecord) -> bool:
    """Whether this rank was told to stop, and *error* follows from that, or from another rank's having obeyed first."""
    return stop.wanted and (
        stop.interrupted or isinstance(error, StoppedWaiting) or not record.primary
    )


def _end_line(recipe: Recipe | None) -> None:
    """What is said of the failure must not stand in the middle of a line of progress."""
    progress = getattr(getattr(recipe, "run_log", None), "progress", None)
    if isinstance(progress, Progress):
        with contextlib.suppress(Exception):
            progress.break_off()


def launched_rank(
    loaded: Loaded, recipe_class: RecipeClass, failure_dir: FailureDirectory, launcher: int
) -> int:
    """A rank forked by our launcher (process id ``launcher``). Returns its code, or does not return: see above."""
    _die_with(launcher)
    attempt, rank, wire = failure_dir.attempt, this_rank(), FailureChannel.of_this_rank(os.environ)
    made_room = failure_dir.has_joining_nodes(attempt - 1)
    earlier = verdict(failure_dir.records(attempt - 1)) if attempt and not made_room else None
    if attempt and (failure_dir.stop_signals() or (earlier and earlier.code in FINAL_CODES)):
        return earlier.code if earlier else EXIT_INTERNAL
    _sign_in(failure_dir, attempt, rank)
    if attempt and os.environ.get("LOCAL_RANK") == "0":
        _announce_restart(earlier, made_room=made_room)
    done = threading.Event()
    threading.Thread(
        target=_watch_peers, args=(failure_dir, attempt, rank, done, wire), daemon=True
    ).start()
    if wire is not None and os.environ.get("LOCAL_RANK") == "0":
        threading.Thread(
            target=_hold_keepalive, args=(failure_dir, attempt, rank), daemon=True
        ).start()
    kept: list[Any] = []
    failures: list[FailureRecord] = []

    def on_failure(record: FailureRecord) -> None:
        late = stop_request().interrupted and not record.primary and not record.timed_out
        failures.append(replace(record, absent=late))
        failure_dir.write(attempt, failures[-1])
        if wire is not None and (record.code != EXIT_STOPPED or not record.begun):
            kept.append(_the_ranks_store())
            if failures[-1].primary:
                wire.tell(failures[-1])

    code = run_rank(loaded, recipe_class, on_failure)
    done.set()
    failure_dir.note_done(attempt, rank)
    if kept and rank == 0:
        time.sleep(FAREWELL_SECONDS)  # the other machines ask its store why their connections broke
    return _ending(failure_dir, attempt, code, failures, wire)


def joined_rank(
    loaded: Loaded, recipe_class: RecipeClass, claim: Callable[[], bool], exit_stopped: int
) -> int:
    """Run a rank that torchrun or srun started, and return its exit code.

    A rank prints its own failure if ``claim`` returns True. All ranks of a run stop together after a save, so then
    rank 0 prints the message without asking the others.
    """

    def on_failure(record: FailureRecord) -> None:
        if not record.primary:
            time.sleep(ECHO_SECONDS)
        all_stop = record.code == EXIT_STOPPED and record.begun
        speaks = this_rank() == 0 if all_stop else claim()
        if speaks:
            say(text_of(record, several_ranks=world_size() > 1))

    return run_rank(loaded, recipe_class, on_failure, exit_stopped)


def say(text: str) -> None:
    """The last word to the user, after everything this process has printed."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def restart_count() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _the_ranks_store() -> Any:
    """torch's, which its server serves as long as somebody there holds it; None where there is none yet."""
    distributed = importlib.import_module("torch.distributed")
    return (
        distributed.distributed_c10d._get_default_store() if distributed.is_initialized() else None
    )


def _ending(
    failure_dir: FailureDirectory,
    attempt: int,
    code: int,
    failures: list[FailureRecord],
    wire: FailureChannel | None,
) -> int:
    if failures and not failures[0].primary and code not in FINAL_CODES:
        time.sleep(ECHO_SECONDS)
        failure_dir.note_gone(attempt)
        _listen(wire, failure_dir, attempt)
        cause = verdict(failure_dir.records(attempt))
        if cause is not None and cause.code in FINAL_CODES:
            return cause.code
    if code not in FINAL_CODES and code != EXIT_DONE:
        _end_stopped_peers(failure_dir, attempt)
        exit_now(EXIT_INTERNAL)
    if code == EXIT_STOPPED and failure_dir.is_elastic:
        _make_room(failure_dir, attempt)
    flush()
    return code


def _listen(wire: FailureChannel | None, failure_dir: FailureDirectory, attempt: int) -> None:
    """Put what another machine's rank told in this node's failure directory."""
    told = wire.heard() if wire is not None else None
    if told is not None:
        failure_dir.write(attempt, told)


def _make_room(failure_dir: FailureDirectory, attempt: int) -> None:
    """Where all ranks were stopped because machines come: end in a way that lets the agent start this one again.

    An agent stops its ranks itself, one after the other; the first to be told tells the others, whose agents may not
    have noticed yet.
    """
    told = bool(stop_request().requested)
    end = time.monotonic() + (0 if told or failure_dir.stop_signals() else NOTICE_SECONDS)
    while not failure_dir.has_joining_nodes(attempt):
        if time.monotonic() > end:
            return
        time.sleep(POLL_SECONDS / 5)
    if not told:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PEER_GRACE_SECONDS)
    exit_now(EXIT_STOPPED)


def _end_stopped_peers(failure_dir: FailureDirectory, attempt: int) -> None:
    """What the agent would do too, half a minute later: they cannot obey its SIGTERM."""
    for peer, process in failure_dir.processes(attempt).items():
        if is_stopped(process):
            failure_dir.write(
                attempt, _ended(peer, f"rank {peer} was stopped when the others had failed")
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _ended(rank: int, message: str) -> FailureRecord:
    """The record of a rank that is ended because of others."""
    return FailureRecord(
        time.time(), rank, EXIT_INTERNAL, message, primary=False, names_rank=True, absent=True
    )


def exit_now(code: int) -> NoReturn:
    """End without the interpreter's teardown, where libraries that ran threads sometimes abort."""
    flush()
    os._exit(code)


def flush() -> None:
    """Write out what the standard streams still hold; a reader that went away is no failure of the run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _die_with(launcher: int) -> None:
    """Be killed when the launcher is, even by SIGKILL; a save is atomic, so nothing is lost but time."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(EXIT_INTERNAL)


def _sign_in(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """From here on the launcher's signals reach this rank; earlier ones are stored in the failure directory."""
    stop = stop_request()
    stop.at_once = lambda number: failure_dir.write(attempt, stopped_at_once(rank, number))
    stop.install()
    failure_dir.sign_in(attempt, rank)
    if os.environ.get("LOCAL_RANK") == "0":
        failure_dir.note_store(attempt, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    for number in failure_dir.stop_signals()[:1]:
        stop.note(number)


def _announce_restart(earlier: FailureRecord | None, *, made_room: bool) -> None:
    if made_room:
        say(f"machines came, or came back: started again with {world_size()} ranks")
        return
    reason = (
        text_of(earlier, several_ranks=world_size() > 1)
        if earlier and earlier.primary
        else "a rank died"
    )
    total = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    say(f"{reason}\nrestart {restart_count()} of {total}")


def _watch_peers(
    failure_dir: FailureDirectory,
    attempt: int,
    rank: int,
    done: threading.Event,
    wire: FailureChannel | None,
) -> None:
    stopped: Counter[int] = Counter()
    listens = wire if os.environ.get("LOCAL_RANK") == "0" else None
    for poll in count(1):
        if done.wait(POLL_SECONDS):
            return
        if poll % WIRE_POLLS == 0:
            _listen(listens, failure_dir, attempt)
        _log_stopped(failure_dir.processes(attempt), rank, stopped)
        if not stop_request().elsewhere and _has_early_leaver(failure_dir, attempt, rank):
            stop_request().follow()
        failed = _failed_peer(failure_dir, attempt, rank)
        at_once = any(
            record.code > STOPPED_AT_ONCE or record.lost for record in failure_dir.records(attempt)
        )
        if failed is not None and not done.wait(0 if at_once else PEER_GRACE_SECONDS):
            failure_dir.write(
                attempt, _ended(rank, f"rank {rank} was ended because rank {failed} had failed")
            )
            exit_now(EXIT_INTERNAL)


def _hold_keepalive(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """End the ranks of this machine when another one goes silent; rank 0 is where all lines meet, and tells all."""
    wire = FailureChannel.of_this_rank(os.environ)
    assert wire is not None

    def lost(other: int, seconds: float) -> None:
        record = lost_node(other, seconds)
        if rank == 0:
            wire.tell(record)
            if int(os.environ.get("GROUP_WORLD_SIZE", "2")) > 2:
                time.sleep(FAREWELL_SECONDS)
        failure_dir.write(attempt, record)

    if rank == 0:
        listener = listen()
        while not wire.offer_keepalive(listener.getsockname()[1]):
            time.sleep(POLL_SECONDS)
        hold_all(listener, lost)
    while (address := wire.keepalive()) is None:
        time.sleep(POLL_SECONDS)
    hold(address, rank, lost)


def _log_stopped(processes: Mapping[int, int], rank: int, seen: Counter[int]) -> None:
    """Say once of a rank of this machine that it was stopped, not ended: only people know whether it will go on. The
    first rank that runs says it; *seen* counts how often in a row a peer was seen so."""
    standing = {peer for peer, process in processes.items() if peer != rank and is_stopped(process)}
    for peer in seen.keys() - standing:
        del seen[peer]
    seen.update(standing)
    if rank == min(processes.keys() - standing):
        for peer in (one for one in standing if seen[one] == STOPPED_POLLS):
            say(
                f"warning: rank {peer} (process {processes[peer]}) is stopped, and the others wait for it, at most "
                f"distributed.timeout_minutes; `kill -CONT {processes[peer]}` lets it go on"
            )


def _has_early_leaver(failure_dir: FailureDirectory, attempt: int, rank: int) -> bool:
    return any(record.rank != rank and not record.begun for record in failure_dir.records(attempt))


def _failed_peer(failure_dir: FailureDirectory, attempt: int, rank: int) -> int | None:
    """A rank of this machine that failed or died, if any; one that stopped for a signal while training did neither."""
    for record in failure_dir.records(attempt):
        if record.rank != rank and (record.code != EXIT_STOPPED or not record.begun):
            return record.rank
    for peer, process in failure_dir.processes(attempt).items():
        if peer != rank and is_gone(process) and not failure_dir.is_done(attempt, peer):
            failure_dir.note_gone(attempt)
            return peer
    return None


def _close_quietly(recipe: Recipe | None) -> None:
    """Close a failed recipe and leave its groups; both may hang on peers that are gone, so only for so long."""

    def close() -> None:
        try:
            if recipe is not None:
                recipe.close()
        except BaseException:  # noqa: S110 - the failure that counts is recorded; this one follows from it
            pass
        finally:
            _leave_process_groups()

    _in_time(close)


def _in_time(ending: Callable[[], None]) -> None:
    thread = threading.Thread(target=ending, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)


def _leave_process_groups() -> None:
    distributed = importlib.import_module("torch.distributed")
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
