"""Run one rank, however it was started: build the recipe, run it, and end so that the other ranks end too.

Under the launcher of this package, a rank ends in one of two ways:

* If it is done, or with a code that a restart cannot fix (2, 3, 4, 75), it *returns* the code. The elastic agent
  treats every returned value as success: it neither restarts nor signals any rank.
* With code 1, it exits with status 1, so that the agent restarts or ends the ranks.

If only one rank fails, the others wait for it in a collective. They detect the failure in one of three ways:

1. The failed rank writes its failure record, and *then* leaves its process groups. With gloo, this breaks the
   connections of the other ranks and raises in their collectives. A rank that fails for this reason finds the record in
   the failure directory, and returns its code if that is final.
2. Each rank has a thread that looks for records of other ranks, and for ranks that died without one. It ends its own
   rank if that has not ended PEER_GRACE_SECONDS later: a backend may not detect the failure (NCCL), or the rank may be
   busy elsewhere. After a second signal to one rank, it does not wait.
3. The agent sends SIGTERM if a rank died, and SIGKILL later.

Ranks of other nodes are notified by :class:`~automodel_ckpt.cli.launch.failure_channel.FailureChannel`, which stores
the failure in the failure directory of their node.

A rank whose connections broke waits SECONDARY_DELAY_SECONDS before it exits, so that the agent reports the rank that
died first. A rank that is restarted although the root cause is final (way 2 exits with 1) returns its code immediately.
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
from functools import partial
from itertools import count
from typing import Any, NoReturn, Protocol

from automodel_ckpt.checkpoint.run.lease import release_all
from automodel_ckpt.cli.launch.failure_channel import FailureChannel
from automodel_ckpt.cli.launch.failures import (
    FINAL_CODES,
    SECOND_SIGNAL_CODE,
    FailureDirectory,
    FailureRecord,
    early_stop_record,
    failure_record,
    failure_text,
    has_ended,
    is_suspended,
    printed_failure,
    root_cause,
    second_signal_record,
    unreachable_node_record,
)
from automodel_ckpt.distributed import hang_action
from automodel_ckpt.distributed.keepalive import keep_connection, listen, serve_connections
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
from automodel_ckpt.training.start_time import note_process_start
from automodel_ckpt.user_code import reporting_user_failures

PEER_GRACE_SECONDS = 10.0
SECONDARY_DELAY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.5
CHANNEL_POLLS = 4
"""The failure channel is read once in so many polls: it asks another node."""
STORE_LINGER_SECONDS = 4.0
"""How long the first node serves the store after a failure, so that the other nodes can read the cause."""
JOIN_NOTICE_SECONDS = 3.0
"""How long a stopped rank waits for its agent to report that nodes join."""
SUSPENDED_POLLS = 20
"""A peer must be suspended in so many polls in a row before a warning. Not seconds: the whole job may be suspended."""
PR_SET_PDEATHSIG = 1


class Recipe(Protocol):
    """The interface of a recipe. Its class is called as ``cls(config, config_yaml=text)``.

    Then two attributes are set: ``origins`` maps each dotted key to the place where its value was set, and
    ``overridden`` contains the keys that the command line sets.
    """

    origins: Mapping[str, str]
    overridden: Collection[str]

    def setup(self) -> None: ...
    def run(self) -> None: ...
    def close(self) -> None: ...


RecipeClass = Callable[..., Recipe]


class Loaded(Protocol):
    """The interface of a loaded recipe file."""

    @property
    def config(self) -> Any: ...
    def to_yaml(self) -> str: ...


def run_rank(
    loaded: Loaded,
    recipe_class: RecipeClass,
    on_failure: Callable[[FailureRecord], None],
    exit_stopped: int = EXIT_STOPPED,
) -> int:
    """Run the recipe in this process as the rank in the environment (RANK, default 0), and return its exit code.

    Raises nothing. *on_failure* is called with the failure record before anything is closed. A signal before training
    may end the process with *exit_stopped*. Afterwards, the threads of process groups have ended, unless closing them
    took longer than CLOSE_SECONDS.
    """
    recipe: Recipe | None = None
    stop, is_training = stop_request(), False
    stop.exit_code = exit_stopped

    def leave(number: int) -> None:
        on_failure(early_stop_record(this_rank(), number))
        # During setup, no object may own the lease yet, and exit_now() closes nothing.
        _run_with_time_limit(release_all)
        exit_now(exit_stopped)

    try:
        let_gloo_be_found(os.environ)
        with stop.before_training(leave), reporting_user_failures(RecipeError):
            recipe = recipe_class(loaded.config, config_yaml=loaded.to_yaml())
            recipe.origins = getattr(loaded, "origins", {})
            recipe.overridden = frozenset(getattr(loaded, "overridden", ()))
            recipe.setup()
        is_training = True
        with reporting_user_failures(AutomodelError):
            recipe.run()
            recipe.close()
        _leave_process_groups()
        stop.finished = True
        return EXIT_DONE
    # BaseException: StoppedWaiting and SystemExit must also leave a record for the other ranks.
    except BaseException as error:
        # A second signal must not change the exit code of a rank that has saved: srun sends one to all tasks as soon
        # as the first has ended with 75, where Slurm's KillOnBadExit is set.
        stop.finished = isinstance(error, Stopped)
        record = failure_record(error, this_rank())
        if not is_training and _was_stopped(stop, error, record):
            record = early_stop_record(this_rank(), stop.requested)
            stop.finished = True
        record = replace(record, follows_log=_progress_of(recipe) is not None)
        _end_progress_line(recipe)
        on_failure(record)
        text = failure_text(record, several_ranks=world_size() > 1)
        _run_with_time_limit(lambda: _log_failure(recipe, text))
        # After on_failure(): closing may wait for dead ranks, and the others act on the record.
        _close_quietly(recipe)
        if not is_training:
            _run_with_time_limit(release_all)
        return record.code


def _was_stopped(stop: StopRequest, error: BaseException, record: FailureRecord) -> bool:
    """Whether *error* is the result of a stop request, or of another rank that stopped first."""
    if not stop.wanted:
        return False
    return stop.interrupted or isinstance(error, StoppedWaiting) or not record.primary


def _end_progress_line(recipe: Recipe | None) -> None:
    """End the progress line, so that the error begins on a new line."""
    progress = _progress_of(recipe)
    if progress is not None:
        with contextlib.suppress(Exception):
            progress.break_off()


def _progress_of(recipe: Recipe | None) -> Progress | None:
    """The progress line of a run; None if the run did not get so far."""
    progress = getattr(getattr(recipe, "run_log", None), "progress", None)
    return progress if isinstance(progress, Progress) else None


def _log_failure(recipe: Recipe | None, text: str) -> None:
    """Write the error to the run's ``log.txt``, if the run got so far."""
    log_failure = getattr(getattr(recipe, "run_log", None), "log_failure", None)
    if log_failure is not None:
        with contextlib.suppress(Exception):
            log_failure(text)


def launched_rank(
    loaded: Loaded, recipe_class: RecipeClass, failure_dir: FailureDirectory, launcher: int
) -> int:
    """Run a rank that our launcher (process id *launcher*) forked.

    Returns its exit code, or exits; the docstring of this module describes when.
    """
    _die_with(launcher)
    attempt, rank = failure_dir.attempt, this_rank()
    # Importing the packages, which the launcher does once, is a part of the first start.
    note_process_start(os.getpid() if attempt else launcher)
    channel = FailureChannel.of_this_rank(os.environ)
    nodes_joined = failure_dir.has_joining_nodes(attempt - 1)
    earlier: FailureRecord | None = None
    if attempt and not nodes_joined:
        earlier = failure_dir.cause_of_end(attempt - 1)
    is_final = earlier is not None and earlier.code in FINAL_CODES
    if attempt and (failure_dir.stop_signals() or is_final):
        return earlier.code if earlier else EXIT_INTERNAL
    _register(failure_dir, attempt, rank)
    if attempt and _is_local_rank_0():
        _report_restart(earlier, nodes_joined=nodes_joined)
    done = threading.Event()
    watch = (failure_dir, attempt, rank, done, channel)
    threading.Thread(target=_watch_peers, args=watch, daemon=True).start()
    if channel is not None and _is_local_rank_0():
        nodes = (failure_dir, attempt, rank)
        threading.Thread(target=_watch_nodes, args=nodes, daemon=True).start()
    hang_action.restart = partial(_restart_after_hang, failure_dir, attempt, rank, channel)
    failures: list[FailureRecord] = []
    stores: list[Any] = []  # references that keep the ranks' store alive

    def on_failure(record: FailureRecord) -> None:
        was_interrupted = stop_request().interrupted
        outside = was_interrupted and not record.primary and not record.timed_out
        record = replace(record, outside_collective=outside)
        failures.append(record)
        failure_dir.write(attempt, record)
        stopped_in_training = record.code == EXIT_STOPPED and record.was_training
        if channel is not None and not stopped_in_training:
            stores.append(_default_store())
            if record.primary:
                channel.report(record)

    code = run_rank(loaded, recipe_class, on_failure)
    # The watcher must not end this rank while it waits below.
    done.set()
    # Before this process ends: peers take one that ends without this file for a dead rank.
    failure_dir.mark_done(attempt, rank)
    if stores and rank == 0:
        time.sleep(STORE_LINGER_SECONDS)
    return _end_rank(failure_dir, attempt, code, failures, channel)


def _restart_after_hang(
    failure_dir: FailureDirectory,
    attempt: int,
    rank: int,
    channel: FailureChannel | None,
    message: str,
) -> None:
    """End this rank because a step hangs, so that the agent restarts all ranks. Called by a thread."""
    record = FailureRecord(
        time.time(), rank, EXIT_INTERNAL, f"error: {message}", names_rank=True, follows_log=True
    )
    failure_dir.write(attempt, record)
    if channel is not None:
        channel.report(record)
    _kill_suspended_peers(failure_dir, attempt)
    exit_now(EXIT_INTERNAL)


def joined_rank(
    loaded: Loaded,
    recipe_class: RecipeClass,
    is_first_to_report: Callable[[], bool],
    exit_stopped: int,
) -> int:
    """Run a rank that torchrun or srun started, and return its exit code.

    A rank prints its own failure if *is_first_to_report* returns True. All ranks of a run stop together after a save,
    so then rank 0 prints the message without asking the others.
    """

    def on_failure(record: FailureRecord) -> None:
        if not record.primary:
            # Let the rank that failed first be the first to report.
            time.sleep(SECONDARY_DELAY_SECONDS)
        all_ranks_stop = record.code == EXIT_STOPPED and record.was_training
        is_reporter = this_rank() == 0 if all_ranks_stop else is_first_to_report()
        if is_reporter:
            print_message(printed_failure(record, several_ranks=world_size() > 1))

    def restart(message: str) -> None:
        print_message(f"error: {message}")
        exit_now(EXIT_INTERNAL)

    hang_action.restart = restart
    return run_rank(loaded, recipe_class, on_failure, exit_stopped)


def print_message(text: str) -> None:
    """Print a message on standard error, after everything that this process has printed."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def restart_count() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _is_local_rank_0() -> bool:
    return os.environ.get("LOCAL_RANK") == "0"


def _default_store() -> Any:
    """Return torch's store, which its server serves while a reference to it exists; None before it is created.

    torch has no public function for it (all versions up to 2.11).
    """
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def _end_rank(
    failure_dir: FailureDirectory,
    attempt: int,
    code: int,
    failures: list[FailureRecord],
    channel: FailureChannel | None,
) -> int:
    """Return the exit code of a rank that ended with *code*, or exit so that the agent restarts or ends the ranks.

    A secondary failure returns the code of the root cause, if that is final.
    """
    if failures and not failures[0].primary and code not in FINAL_CODES:
        time.sleep(SECONDARY_DELAY_SECONDS)
        failure_dir.mark_vanished(attempt)
        _receive_failure(channel, failure_dir, attempt)
        cause = root_cause(failure_dir.records(attempt))
        if cause is not None and cause.code in FINAL_CODES:
            return cause.code
    if code not in FINAL_CODES and code != EXIT_DONE:
        _kill_suspended_peers(failure_dir, attempt)
        exit_now(EXIT_INTERNAL)
    if code == EXIT_STOPPED and failure_dir.is_elastic:
        _restart_if_nodes_join(failure_dir, attempt)
    if failures and code != EXIT_STOPPED:
        # The agent waits for all ranks. If others are still in a collective, it ends them and this rank, and would
        # wait 30 seconds for a handler that only notes the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flush()
    return code


def _receive_failure(
    channel: FailureChannel | None, failure_dir: FailureDirectory, attempt: int
) -> None:
    """Write the failure that another node reported, if any, to the failure directory of this node."""
    record = channel.receive() if channel is not None else None
    if record is not None:
        failure_dir.write(attempt, record)


def _restart_if_nodes_join(failure_dir: FailureDirectory, attempt: int) -> None:
    """Exit so that the agent restarts this rank, if the ranks were stopped because nodes join; otherwise return.

    An agent stops its ranks itself, one after the other. The first rank that gets its signal stops all ranks, and other
    nodes' agents may not have noticed yet that nodes join.
    """
    got_signal = bool(stop_request().requested)
    limit = 0.0 if got_signal or failure_dir.stop_signals() else JOIN_NOTICE_SECONDS
    end = time.monotonic() + limit
    while not failure_dir.has_joining_nodes(attempt):
        if time.monotonic() > end:
            return
        time.sleep(POLL_SECONDS / 5)
    if not got_signal:
        # wait for this node's agent to end this process as it ends the others
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PEER_GRACE_SECONDS)
    exit_now(EXIT_STOPPED)


def _kill_suspended_peers(failure_dir: FailureDirectory, attempt: int) -> None:
    """Kill the suspended ranks of this node. They cannot handle the agent's SIGTERM, and it would wait 30 seconds."""
    for peer, process in failure_dir.processes(attempt).items():
        if is_suspended(process):
            message = f"rank {peer} was suspended when the other ranks had failed"
            failure_dir.write(attempt, _terminated_record(peer, message))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _terminated_record(rank: int, message: str) -> FailureRecord:
    """Return the record of a rank that is ended because of others."""
    return FailureRecord(
        time.time(),
        rank,
        EXIT_INTERNAL,
        message,
        primary=False,
        names_rank=True,
        outside_collective=True,
    )


def exit_now(code: int) -> NoReturn:
    """End the process without the interpreter's teardown, where libraries that ran threads sometimes abort."""
    flush()
    os._exit(code)


def flush() -> None:
    """Flush the standard streams. Errors are ignored: a closed terminal is not a failure of the run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _die_with(launcher: int) -> None:
    """Make the kernel kill this process when the launcher dies, even by SIGKILL. Saves are atomic, so this is safe."""
    # The kernel sends it when the thread that forked this process ends (prctl(2)):
    # it has to live as long as the launcher, as its main thread does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(EXIT_INTERNAL)


def _register(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """Register this process, so that the launcher sends its signals to it.

    The handlers are installed before, and signals that the launcher has already received are read afterwards from the
    failure directory: none is missed.
    """
    stop = stop_request()
    stop.at_once = lambda number: failure_dir.write(attempt, second_signal_record(rank, number))
    stop.a_peer_died = lambda: _failed_peer(failure_dir, attempt, rank) is not None
    stop.install()
    failure_dir.register_process(attempt, rank)
    if _is_local_rank_0():
        failure_dir.record_store(attempt, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    for number in failure_dir.stop_signals()[:1]:
        stop.note(number)


def _report_restart(earlier: FailureRecord | None, *, nodes_joined: bool) -> None:
    if nodes_joined:
        print_message(f"nodes joined: restarted with {world_size()} ranks")
        return
    reason = "a rank died"
    if earlier and earlier.primary:
        reason = printed_failure(earlier, several_ranks=world_size() > 1)
    total = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    print_message(f"{reason}\nrestart {restart_count()} of {total}")


def _watch_peers(
    failure_dir: FailureDirectory,
    attempt: int,
    rank: int,
    done: threading.Event,
    channel: FailureChannel | None,
) -> None:
    """Watch the other ranks of this node until *done*, and end this rank when one has failed. Runs in a thread.

    The thread of local rank 0 also receives failures from other nodes.
    """
    num_polls_suspended: Counter[int] = Counter()
    for poll in count(1):
        if done.wait(POLL_SECONDS):
            return
        if poll % CHANNEL_POLLS == 0 and _is_local_rank_0():
            _receive_failure(channel, failure_dir, attempt)
        _warn_suspended(failure_dir.processes(attempt), rank, num_polls_suspended)
        if not stop_request().elsewhere and _stopped_before_training(failure_dir, attempt, rank):
            stop_request().follow()
        failed = _failed_peer(failure_dir, attempt, rank)
        if failed is None:
            continue
        grace = PEER_GRACE_SECONDS
        for record in failure_dir.records(attempt):
            if record.code > SECOND_SIGNAL_CODE:
                grace = 0.0
            elif record.node_unreachable:
                grace = min(grace, STORE_LINGER_SECONDS if _serves_other_nodes() else 0.0)
        if not done.wait(grace):
            message = f"rank {rank} was terminated because rank {failed} failed"
            failure_dir.write(attempt, _terminated_record(rank, message))
            exit_now(EXIT_INTERNAL)


def _serves_other_nodes() -> bool:
    """Whether more than one other node reads failures from the store that this node serves.

    All ranks of the node then wait after a failure, not only rank 0: the agent ends the others with the first one.
    """
    is_first = os.environ.get("GROUP_RANK") == "0"
    return is_first and int(os.environ.get("GROUP_WORLD_SIZE", "2")) > 2


def _watch_nodes(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """Report a node that does not respond, so that the ranks of this node end. Runs in a thread of local rank 0.

    All nodes connect to rank 0, which reports the failure to the others.
    """
    channel = FailureChannel.of_this_rank(os.environ)
    assert channel is not None

    def report_unreachable(other: int, seconds: float) -> None:
        record = unreachable_node_record(other, seconds)
        if rank == 0:
            channel.report(record)
        failure_dir.write(attempt, record)

    if rank == 0:
        listener = listen()
        while not channel.publish_keepalive(listener.getsockname()[1]):
            time.sleep(POLL_SECONDS)
        serve_connections(listener, report_unreachable)
    while (address := channel.keepalive_address()) is None:
        time.sleep(POLL_SECONDS)
    keep_connection(address, rank, report_unreachable)


def _warn_suspended(processes: Mapping[int, int], rank: int, num_polls: Counter[int]) -> None:
    """Warn once about each suspended rank of this node, which only a person can continue.

    The lowest rank that is not suspended prints the warning. *num_polls* counts in how many polls in a row each peer
    was suspended.
    """
    suspended = set()
    for peer, process in processes.items():
        if peer != rank and is_suspended(process):
            suspended.add(peer)
    for peer in num_polls.keys() - suspended:
        del num_polls[peer]
    num_polls.update(suspended)
    if rank != min(processes.keys() - suspended):
        return
    for peer in suspended:
        if num_polls[peer] == SUSPENDED_POLLS:
            print_message(
                f"warning: rank {peer} (process {processes[peer]}) is suspended; the other ranks wait for it, at most "
                f"distributed.timeout_minutes. `kill -CONT {processes[peer]}` continues it"
            )


def _stopped_before_training(failure_dir: FailureDirectory, attempt: int, rank: int) -> bool:
    """Whether another rank of this node was stopped before training."""
    records = failure_dir.records(attempt)
    return any(record.rank != rank and not record.was_training for record in records)


def _failed_peer(failure_dir: FailureDirectory, attempt: int, rank: int) -> int | None:
    """Return a rank of this node that failed or died; None if there is none.

    A rank that a signal stopped during training has not failed.
    """
    for record in failure_dir.records(attempt):
        stopped_in_training = record.code == EXIT_STOPPED and record.was_training
        if record.rank != rank and not stopped_in_training:
            return record.rank
    for peer, process in failure_dir.processes(attempt).items():
        if peer != rank and has_ended(process) and not failure_dir.is_done(attempt, peer):
            failure_dir.mark_vanished(attempt)
            return peer
    return None


def _close_quietly(recipe: Recipe | None) -> None:
    """Close a failed recipe and leave its process groups, with a time limit: both may wait for dead ranks."""

    def close() -> None:
        try:
            if recipe is not None:
                recipe.close()
        except BaseException:  # noqa: S110 - the failure is already recorded, and this error follows from it
            pass
        finally:
            _leave_process_groups()

    _run_with_time_limit(close)


def _run_with_time_limit(action: Callable[[], None]) -> None:
    """Run *action* in a thread, and abandon the thread after CLOSE_SECONDS."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)


def _leave_process_groups() -> None:
    distributed = importlib.import_module("torch.distributed")
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
