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
   busy elsewhere. After a death, it waits only DEATH_NOTICE_SECONDS for a rank that has not noticed it: the others need
   not learn the reason from this one. After a second signal to one rank, it does not wait.
3. The agent sends SIGTERM if a rank died, and SIGKILL 30 seconds later.

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
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
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
    hang_record,
    has_ended,
    printed_failure,
    root_cause,
    second_signal_record,
    terminated_record,
    unreachable_node_record,
)
from automodel_ckpt.cli.launch.suspended import kill_suspended_ranks, suspension_warnings
from automodel_ckpt.distributed import hang_action, peers
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
DEATH_NOTICE_SECONDS = 2.0
"""How long a rank may take to notice that another one died without a failure record."""
SECONDARY_DELAY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.5
AGENT_POLL_SECONDS = 0.02
CHANNEL_POLLS = 4
"""The failure channel is read once in so many polls: it asks another node."""
STORE_LINGER_SECONDS = 4.0
"""How long the first node serves the store at most after a failure, so that the other nodes can read the cause."""
RECEIVED_POLL_SECONDS = 0.1
JOIN_NOTICE_SECONDS = 3.0
"""How long a stopped rank waits for its agent to report that nodes join."""
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
    earlier = failure_dir.cause_of_end(attempt - 1) if attempt else None
    nodes_joined = failure_dir.has_joining_nodes(attempt - 1)
    if nodes_joined and (earlier is None or not earlier.primary or earlier.code == EXIT_STOPPED):
        # The records are those of ranks that were stopped.
        earlier = None
    is_final = earlier is not None and earlier.code in FINAL_CODES
    if attempt and (failure_dir.stop_signals() or is_final):
        return earlier.code if earlier else EXIT_INTERNAL
    _register(failure_dir, attempt, rank)
    if attempt and _is_local_rank_0():
        is_elastic = failure_dir.is_elastic
        _report_restart(earlier, nodes_joined=nodes_joined, is_elastic=is_elastic)
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
        record = unless_ended_by_agent(failure_dir, attempt, record)
        outside = stop_request().interrupted and not record.primary and not record.timed_out
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
    if stores and rank == 0 and _has_reason_to_share(channel):
        _serve_until_received(channel, STORE_LINGER_SECONDS)
    return _end_rank(failure_dir, attempt, code, failures, channel)


def _has_reason_to_share(channel: FailureChannel | None) -> bool:
    """Whether other nodes have to read from the store why a rank failed, or a launcher may still report it there.

    If a restart follows, no process reports a rank that died silently, and all nodes restart without a reason.
    """
    is_reported = channel is not None and channel.receive() is not None
    return is_reported or not hang_action.has_restarts_left(os.environ)


def _serve_until_received(channel: FailureChannel | None, seconds: float) -> None:
    """Wait until all other nodes have received why a rank failed, at most so long: this node may serve the store."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if channel is not None and channel.is_confirmed():
            return
        time.sleep(RECEIVED_POLL_SECONDS)


def _restart_after_hang(
    failure_dir: FailureDirectory,
    attempt: int,
    rank: int,
    channel: FailureChannel | None,
    message: str,
) -> None:
    """End this rank because a step hangs, so that the agent restarts all ranks. Called by a thread."""
    record = hang_record(message, rank)
    if channel is not None:
        channel.report(record)
    failure_dir.write(attempt, record)
    kill_suspended_ranks(failure_dir, attempt)
    # The ranks of this node end after this time, too: one of them may serve the store.
    _serve_until_received(channel, _hang_grace())
    exit_now(EXIT_INTERNAL)


def _hang_grace() -> float:
    """How many seconds the ranks of this node continue after a hang, so that other nodes can read about it."""
    is_first = os.environ.get("GROUP_RANK") == "0"
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return STORE_LINGER_SECONDS if is_first and num_nodes > 1 else 0.0


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

    with hang_action.ending_processes():
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
    if failures:
        # run_rank() takes a signal of the agent, which ends this rank, for a stop request.
        code = failures[0].code
    if failures and not failures[0].primary and code not in FINAL_CODES:
        _await_agent(SECONDARY_DELAY_SECONDS)
        failure_dir.mark_vanished(attempt)
        _receive_failure(channel, failure_dir, attempt)
        cause = root_cause(failure_dir.records(attempt))
        if cause is not None and cause.code in FINAL_CODES:
            return cause.code
    if code not in FINAL_CODES and code != EXIT_DONE:
        kill_suspended_ranks(failure_dir, attempt)
        exit_now(EXIT_INTERNAL)
    if code == EXIT_STOPPED and failure_dir.is_elastic:
        _restart_if_nodes_join(failure_dir, attempt)
    if failures and code != EXIT_STOPPED:
        # The agent waits for all ranks. If others are still in a collective, it ends them and this rank, and would
        # wait 30 seconds for a handler that only notes the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flush()
    ending = (failure_dir, attempt, this_rank())
    threading.Thread(target=_end_with_failed_peer, args=ending, daemon=True).start()
    return code


def _await_agent(seconds: float) -> None:
    """Wait until the agent ends the ranks of this node, because it has noticed a rank that died, at most so long."""
    end = time.monotonic() + seconds
    while not stop_request().requested and time.monotonic() < end:
        time.sleep(AGENT_POLL_SECONDS)


def _end_with_failed_peer(failure_dir: FailureDirectory, attempt: int, rank: int) -> None:
    """End this rank, which has returned its code, if a peer dies or fails before it returns one. Runs in a thread.

    A rank that is done ignores signals, so that they do not change its code. The agent would wait 30 seconds for it.
    """
    while not _is_ended_by_agent(failure_dir, attempt, rank):
        time.sleep(POLL_SECONDS)
    exit_now(EXIT_INTERNAL)


def _is_ended_by_agent(failure_dir: FailureDirectory, attempt: int, rank: int) -> bool:
    """Whether the agent ends the ranks of this node because another one, or one of another node, has failed."""
    if failure_dir.has_joining_nodes(attempt):
        return True
    failed = {
        record.rank for record in failure_dir.records(attempt) if record.code not in FINAL_CODES
    }
    for peer, process in failure_dir.processes(attempt).items():
        if peer == rank or not has_ended(process):
            continue
        if not failure_dir.is_done(attempt, peer):
            return True
        # Without a signal, the agent may have taken its code for a success.
        if peer in failed and stop_request().requested:
            return True
    return False


def _receive_failure(
    channel: FailureChannel | None, failure_dir: FailureDirectory, attempt: int
) -> None:
    """Write the failure that another node reported, if any, to the failure directory of this node."""
    record = channel.receive() if channel is not None else None
    if channel is not None and record is not None:
        failure_dir.write(attempt, record)
        channel.confirm()


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
    peers.find_dead = partial(_dead_peers, failure_dir, attempt, rank)
    stop.is_restart = lambda: failure_dir.has_joining_nodes(attempt)
    stop.a_peer_died = lambda: _failed_peer(failure_dir, attempt, rank) is not None
    stop.install()
    failure_dir.register_process(attempt, rank)
    if _is_local_rank_0():
        failure_dir.record_store(attempt, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    for number in failure_dir.stop_signals()[:1]:
        stop.note(number)


def _report_restart(earlier: FailureRecord | None, *, nodes_joined: bool, is_elastic: bool) -> None:
    if nodes_joined and earlier is None:
        # Without a range of --nnodes, only nodes whose ranks have failed join again.
        reason = "nodes joined" if is_elastic else "ranks of another node failed"
        print_message(f"{reason}: restarted with {world_size()} ranks")
        return
    reason = "a rank died"
    if earlier and earlier.primary:
        reason = printed_failure(earlier, several_ranks=world_size() > 1)
    total = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    # The agent counts the failures of its own ranks.
    number = f"restart {restart_count()} of {total}"
    again = f"restarted with {world_size()} ranks" if nodes_joined else number
    print_message(f"{reason}\n{again}")


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
        processes = failure_dir.processes(attempt)
        for warning in suspension_warnings(processes, rank, num_polls_suspended):
            print_message(warning)
        if not stop_request().elsewhere and _stopped_before_training(failure_dir, attempt, rank):
            stop_request().follow()
        failed = _failed_peer(failure_dir, attempt, rank)
        if failed is not None:
            reason = f"rank {failed} failed"
        elif _others_restart(failure_dir, attempt):
            reason = "ranks of another node failed"
        else:
            continue
        if not _ends_in_time(failure_dir, attempt, rank, done):
            failure_dir.write(attempt, terminated_record(rank, _terminated_text(rank, reason)))
            kill_suspended_ranks(failure_dir, attempt)
            exit_now(EXIT_INTERNAL)


def _others_restart(failure_dir: FailureDirectory, attempt: int) -> bool:
    """Whether the agent ends the ranks of this node because those of another one have failed."""
    # With a range of --nnodes, new nodes may join, and the ranks have to save.
    return not failure_dir.is_elastic and failure_dir.has_joining_nodes(attempt)


def _ends_in_time(
    failure_dir: FailureDirectory, attempt: int, rank: int, done: threading.Event
) -> bool:
    """Wait for *done* after another rank has failed or died, as long as this rank may take to end."""
    records = failure_dir.records(attempt)
    if not any(record.rank != rank for record in records):
        if done.wait(DEATH_NOTICE_SECONDS):
            return True
        # Without a failure record, it has nothing to close: it waits for other ranks, or its step cannot be used.
        if not any(record.rank == rank for record in failure_dir.records(attempt)):
            return False
    return done.wait(_grace_seconds(records))


def _grace_seconds(records: Iterable[FailureRecord]) -> float:
    """How many seconds a rank has to end after failures of other ranks that wrote *records*."""
    grace = PEER_GRACE_SECONDS
    for record in records:
        if record.code > SECOND_SIGNAL_CODE:
            grace = 0.0
        elif record.node_unreachable:
            grace = min(grace, STORE_LINGER_SECONDS if _serves_other_nodes() else 0.0)
        elif record.is_hang:
            grace = min(grace, _hang_grace())
    return grace


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
        listener, token = listen(), secrets.token_hex(16)
        while not channel.publish_keepalive(listener.getsockname()[1], token):
            time.sleep(POLL_SECONDS)
        serve_connections(listener, token, report_unreachable)
    while (published := channel.keepalive()) is None:
        time.sleep(POLL_SECONDS)
    keep_connection(*published, rank, report_unreachable)


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
    dead = _dead_peers(failure_dir, attempt, rank)
    if not dead:
        return None
    failure_dir.mark_vanished(attempt)
    return dead[0]


def _dead_peers(failure_dir: FailureDirectory, attempt: int, rank: int) -> list[int]:
    """Return the ranks of this node whose processes ended before they were done."""
    dead = []
    for peer, process in failure_dir.processes(attempt).items():
        if peer != rank and has_ended(process) and not failure_dir.is_done(attempt, peer):
            dead.append(peer)
    return dead


def unless_ended_by_agent(
    failure_dir: FailureDirectory, attempt: int, record: FailureRecord
) -> FailureRecord:
    """Return *record* unless it takes a signal of the agent, which ends this rank because of another, for a stop.

    That of an early stop would end the run: nodes whose ranks only lost a connection would believe it.
    """
    is_early_stop = record.code == EXIT_STOPPED and record.primary and not record.was_training
    if not is_early_stop or failure_dir.stop_signals():
        return record
    if _others_restart(failure_dir, attempt):
        reason = "ranks of another node failed"
        return terminated_record(record.rank, _terminated_text(record.rank, reason))
    failure_dir.mark_vanished(attempt)
    others = [*failure_dir.records(attempt), *failure_dir.vanished_ranks(attempt)]
    failed = [
        each.rank for each in others if each.code != EXIT_STOPPED and each.rank != record.rank
    ]
    if not failed:
        return record
    reason = f"rank {failed[0]} failed"
    return terminated_record(record.rank, _terminated_text(record.rank, reason))


def _terminated_text(rank: int, reason: str) -> str:
    return f"rank {rank} was terminated because {reason}"


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
