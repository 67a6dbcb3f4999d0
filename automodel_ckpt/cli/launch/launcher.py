"""Start the ranks of a run, or join those that torchrun or srun started; return the exit code of `ckpt-train`.

One rank runs in this process. Several are forked by torch's elastic agent (the engine of `torch.distributed.run`) after
this process has imported torch, transformers and the recipe's class, so that they start immediately. Before the fork,
this process computes nothing and does not initialize CUDA, because neither survives a fork.
:mod:`automodel_ckpt.cli.launch.forked_rank` describes how ranks end.

Signals are passed to the ranks, which save and return 75. The agent would stop the ranks after a few seconds, so it
handles only SIGQUIT. This module handles the recipe's signals (``step_scheduler.stop_signals``) and SIGINT, from before
the imports.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from automodel_ckpt.checkpoint.layout import HANGS
from automodel_ckpt.cli.launch.failure_channel import FailureChannel
from automodel_ckpt.cli.launch.failures import (
    BROKEN_CONNECTION,
    FailureDirectory,
    FailureRecord,
    death_record,
    failure_record,
    failure_text,
    has_ended,
    is_connection_error,
    lost_connection_record,
    name_silent_ranks,
    printed_failure,
    root_cause,
)
from automodel_ckpt.cli.launch.forked_rank import launched_rank
from automodel_ckpt.cli.launch.hang_examiner import HangExaminer
from automodel_ckpt.cli.launch.joined_rank import joined_rank
from automodel_ckpt.cli.launch.memory import keep_memory, keep_memory_of_rank
from automodel_ckpt.cli.launch.nodes import RendezvousHost, RendezvousInterrupted
from automodel_ckpt.cli.launch.process import exit_now, flush, print_message
from automodel_ckpt.cli.launch.shared_directory import scratch_directory
from automodel_ckpt.cli.launch.topology import (
    C10D,
    LOCAL,
    Rendezvous,
    choose_rendezvous,
    cores,
    count_ranks,
    remove_leftover_ranks,
    set_allocator,
    set_threads,
    slurm_environment,
    started_by,
    visible_gpus,
)
from automodel_ckpt.cli.launch.worker import Loaded, RecipeClass, run_rank
from automodel_ckpt.cli.terminal import forgiving_streams
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.config.urls import with_local_directory
from automodel_ckpt.distributed.hangs import poll_seconds
from automodel_ckpt.distributed.network import (
    address_towards,
    hosts_unknowingly,
    is_known,
    is_loopback,
    is_own_address,
)
from automodel_ckpt.distributed.stop import (
    SAME_SIGNAL_SECONDS,
    SIGNALS,
    StoppedWaiting,
    stop_request,
)
from automodel_ckpt.errors import (
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_STOPPED,
    AutomodelError,
    Problem,
    RecipeError,
    describe,
    os_problem,
)
from automodel_ckpt.training.start_time import note_process_start

MONITOR_SECONDS = 0.1
SHUTDOWN_SECONDS = 10
CONNECT_ATTEMPTS = 3
STORE_SECONDS = 5.0
READ_SECONDS = 20
"""How long the rendezvous may take to answer. torch's agent tries twice, and does not watch its ranks meanwhile."""
TORCHRUN_GRACE_SECONDS = 20.0
"""torchrun kills its ranks 30 seconds after it has passed a signal on to them. They also have to close."""
NOISY_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")

Prepare = Callable[[], tuple[Loaded, RecipeClass]]


def launch(loaded: Loaded, flags: LaunchFlags, prepare: Prepare) -> int:
    """Run a loaded recipe with the ranks that the flags and the environment describe; return the exit code.

    Raises nothing: a failure is printed once, as the last output. *prepare* imports what the ranks need and returns the
    checked recipe and its class. It is called once, after the variables that torch reads at its import are set.
    """
    with forgiving_streams():
        return _launch(loaded, flags, prepare)


def _launch(loaded: Loaded, flags: LaunchFlags, prepare: Prepare) -> int:
    try:
        request = stop_request()
        # A program may call main() several times. Otherwise, ranks would ignore signals after a finished run.
        request.reset()
        request.signals = _stop_signals(loaded)
        program = started_by(os.environ, flags)
        if program == "srun":
            os.environ.update(slurm_environment(os.environ, flags))
        if program is not None:
            return _run_joined(prepare, serve=program == "srun")
        leftover = remove_leftover_ranks(os.environ)
        if leftover:
            names = " and ".join(leftover)
            print_message(f"ignoring {names} in the environment: MASTER_ADDR is not set")
        # Raises RecipeError for contradictory flags, also if no rendezvous is needed.
        rendezvous = choose_rendezvous(flags, os.environ)
        if flags.nproc_per_node == "1" and flags.nnodes == "1" and not flags.max_restarts:
            return _run_in_this_process(prepare)
        return _run_forked(flags, rendezvous, prepare)
    except StoppedWaiting:
        return _stopped(stop_request().requested, "before training began")
    except Exception as error:
        record = failure_record(error, 0)
        print_message(failure_text(record, several_ranks=False))
        return record.code


def _stopped(number: int, when: str) -> int:
    print_message(f"stopped by {signal.Signals(number).name} {when}")
    return EXIT_STOPPED


def _stop_signals(loaded: Loaded) -> Sequence[signal.Signals]:
    """Return the signals that stop the run: those of the recipe, or the defaults if it has no such key.

    SIGHUP is left out if this process ignores it, because nohup started it.
    """
    section = getattr(loaded.config, "step_scheduler", None)
    numbers: Sequence[signal.Signals] = getattr(section, "stop_signal_numbers", SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [number for number in numbers if number != signal.SIGHUP]
    return list(numbers)


def _import_recipe(prepare: Prepare) -> tuple[Loaded, RecipeClass]:
    """Call *prepare* without garbage collection, which would traverse the objects of the modules again and again.

    These objects live as long as the process. Freezing them also prevents that a collection in a rank copies the memory
    pages that the ranks share.
    """
    gc.disable()
    try:
        return prepare()
    finally:
        gc.freeze()
        gc.enable()


def exit_process(code: int) -> NoReturn:
    """Run the exit handlers, and end the process without the interpreter's teardown.

    After distributed work, that teardown sometimes aborts in a library's threads, and a finished run must not fail.
    """
    # atexit offers no public way to run its callbacks, and exit_now() skips them.
    atexit._run_exitfuncs()
    exit_now(code)


def _run_in_this_process(prepare: Prepare) -> int:
    """Run the only rank in this process."""
    stop_request().install()
    _configure_torch(os.environ)
    with stop_request().interrupting():
        loaded, recipe_class = _import_recipe(prepare)
    note_process_start(os.getpid())

    def on_failure(record: FailureRecord) -> None:
        print_message(printed_failure(record, several_ranks=False))

    code = run_rank(loaded, recipe_class, on_failure)
    keep_memory(loaded, code)
    return code


def _run_joined(prepare: Prepare, *, serve: bool) -> int:
    """Run a rank that torchrun or srun started. With *serve* (srun), rank 0 serves the ranks' store."""
    stop_request().install()
    _configure_torch(os.environ)
    store = _serve_store() if serve else None
    # torchrun distinguishes only success and failure, and a rank that saved because of a signal did not fail.
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and not serve
    exit_stopped = EXIT_DONE if is_under_torchrun else EXIT_STOPPED
    if is_under_torchrun:
        stop_request().grace_seconds = TORCHRUN_GRACE_SECONDS
    has_asked = False

    def is_first() -> bool:
        nonlocal has_asked
        has_asked = True
        return is_first_to_report()

    try:
        loaded, recipe_class = _import_recipe(prepare)
        note_process_start(os.getpid())
    except AutomodelError as error:
        if is_first():
            print_message(describe(error)[1])
        code = error.exit_code
    else:
        code = joined_rank(loaded, recipe_class, is_first, exit_stopped)
        keep_memory_of_rank(loaded, code)
    if store is not None:
        if has_asked:  # the other ranks also ask this store whether they print their failure
            time.sleep(STORE_SECONDS)
        return code
    return exit_stopped if code == EXIT_STOPPED else code


def _serve_store() -> Any:
    """Serve the ranks' store on rank 0 under srun, as torchrun's agent does; return None on other ranks."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if not is_known(os.environ["MASTER_ADDR"]):
        raise RecipeError(
            "the host name of rank 0 cannot be resolved",
            where="MASTER_ADDR",
            value=os.environ["MASTER_ADDR"],
            hint="set --master-addr to a host name or an address that all nodes of the job can resolve",
        )
    if os.environ["RANK"] != "0":
        return None
    distributed = importlib.import_module("torch.distributed")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)


def is_first_to_report() -> bool:
    """Whether this rank is the first of its run that calls this function, and so prints its failure.

    The store of torchrun's agent, or of rank 0 under srun, counts the calls. True if there is no store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    distributed = importlib.import_module("torch.distributed")
    timeout = timedelta(seconds=STORE_SECONDS)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun keeps one store over restarts, and each start has its first failure.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = distributed.TCPStore(
            host, port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        return bool(store.add(f"automodel_ckpt/failure_reports/{restart}", 1) == 1)
    except RuntimeError:  # the base class of torch's store and network errors
        return True


def _run_forked(flags: LaunchFlags, rendezvous: Rendezvous, prepare: Prepare) -> int:
    """Fork the ranks of this node, again if they cannot connect, and return the exit code of the run."""
    host = RendezvousHost(rendezvous)
    with (
        scratch_directory() as directory,
        _SignalForwarder(FailureDirectory(directory), host) as signals,
    ):
        # torch reads the number of threads at its import, before it can count the GPUs.
        set_threads(os.environ, _estimated_ranks(flags.nproc_per_node))
        _configure_torch(os.environ)
        with stop_request().interrupting():
            loaded, recipe_class = _import_recipe(prepare)
        torch = importlib.import_module("torch")
        section = getattr(loaded.config, "distributed", None)
        on_gpu = getattr(section, "backend", None) != "gloo"
        num_ranks = count_ranks(flags.nproc_per_node, torch.cuda.device_count(), on_gpu=on_gpu)
        _check_cuda_not_started(torch)
        _validate_no_autograd_threads()
        # A signal after the imports: no rank exists yet that it could be sent to.
        if signals.received:
            raise StoppedWaiting
        host.examiner = _hang_examiner(loaded, rendezvous)
        host.max_restarts = rendezvous.max_restarts(flags.max_restarts)
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            # One per launch: records of ranks that could not connect must not count later.
            failure_dir = FailureDirectory(
                directory / f"launch_{attempt}", is_elastic=rendezvous.is_elastic
            )
            signals.failure_dir = failure_dir
            host.begin(failure_dir)
            try:
                codes, deaths = _rejoining(
                    loaded, recipe_class, rendezvous, num_ranks, failure_dir, host
                )
            except RendezvousInterrupted:
                if failure_dir.attempt >= 0:
                    keep_memory(loaded, EXIT_INTERNAL)
                return _stopped(signals.received, "while waiting for the other nodes")
            finally:
                host.close()
            is_last = attempt == CONNECT_ATTEMPTS
            is_local = rendezvous.rdzv_backend == LOCAL
            # Only on one node: the launchers of other nodes do not take part in this loop.
            may_repeat = is_local and not is_last and not signals.received
            if not (may_repeat and _never_connected(failure_dir)):
                break
            print_message("the ranks could not connect to each other: starting them again")
        code = _report_outcome(
            failure_dir, codes, deaths, num_ranks=num_ranks, num_nodes=rendezvous.max_nodes
        )
        keep_memory(loaded, code)
        return code


def _hang_examiner(loaded: Loaded, rendezvous: Rendezvous) -> HangExaminer | None:
    """Return what examines ranks of this node when a step hangs; None without the section ``hangs`` or other nodes."""
    settings = getattr(loaded.config, "hangs", None)
    if settings is None or rendezvous.max_nodes == 1:
        return None
    run = Path(with_local_directory(loaded.config).checkpoint.checkpoint_dir)
    return HangExaminer(run / HANGS, poll_seconds(settings.min_seconds))


def _estimated_ranks(requested: str) -> int:
    """Estimate the number of ranks on this node for ``--nproc-per-node`` without torch."""
    if requested.isdigit():
        return int(requested)
    if requested == "cpu":
        return cores()
    return visible_gpus(os.environ) or cores()


def _never_connected(failure_dir: FailureDirectory) -> bool:
    """Whether the ranks of the last attempt failed because they could not connect to each other."""
    attempts = failure_dir.attempts()
    if not attempts:
        return False
    return any(not record.connected for record in failure_dir.records(attempts[-1]))


class _LostOtherNodes(Exception):
    """This launcher lost its connection to the other nodes; *record* states how."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(record.message)
        self.record = record


class _EarlierRunEnds(Exception):
    """The nodes of an earlier run are still leaving the rendezvous at this address, as *error* shows."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _rejoining(
    loaded: Loaded,
    recipe_class: RecipeClass,
    rendezvous: Rendezvous,
    num_ranks: int,
    failure_dir: FailureDirectory,
    host: RendezvousHost,
) -> tuple[dict[int, int], list[FailureRecord]]:
    """Run the ranks with :func:`_elastic`, again whenever this launcher lost the other nodes and may rejoin them.

    It also runs them again if those of another node fail after they have ended, and it tries again while the nodes of
    an earlier run leave the rendezvous, as they do if a scheduler starts a node anew before the others have ended.
    """
    ours = importlib.import_module("automodel_ckpt.distributed.rendezvous")
    max_restarts = host.max_restarts
    while True:
        config = _launch_config(rendezvous, num_ranks, max_restarts, failure_dir, host)
        try:
            return _elastic(loaded, recipe_class, rendezvous, config, failure_dir)
        except ours.OtherNodesStartAgain:
            max_restarts = host.max_restarts - host.restarts
            continue
        except _EarlierRunEnds as ends:
            if not host.may_join_later():
                raise _rendezvous_error(rendezvous, ends.error) from ends.error
            host.pause()
            continue
        except _LostOtherNodes as lost:
            if not host.may_rejoin():
                return {}, [lost.record]
        host.report_loss()
        host.pause()
        # The agent restarts the ranks, which is one of the restarts.
        max_restarts = host.max_restarts - host.restarts - 1


def _elastic(
    loaded: Loaded,
    recipe_class: RecipeClass,
    rendezvous: Rendezvous,
    config: Any,
    failure_dir: FailureDirectory,
) -> tuple[dict[int, int], list[FailureRecord]]:
    """Run the ranks with torch's elastic agent; return their exit codes, or the deaths that the agent detected.

    Raises :class:`_LostOtherNodes` if the connection to the other nodes broke, and :class:`_EarlierRunEnds` if the
    rendezvous belongs to a run that ends.
    """
    api = importlib.import_module("torch.distributed.launcher.api")
    flush()  # otherwise every rank would print the content of the buffers
    codes: dict[int, int] = {}
    deaths: list[FailureRecord] = []
    try:
        run = api.elastic_launch(config, launched_rank)
        codes = run(loaded, recipe_class, failure_dir, os.getpid())
    except api.ChildFailedError as error:
        for rank, failure in error.failures.items():
            deaths.append(death_record(rank, failure.exitcode, float(failure.timestamp)))
        detected = {death.rank for death in deaths}
        for death in failure_dir.vanished_ranks(failure_dir.attempt):
            if death.rank not in detected:
                deaths.append(death)
        _notify_other_nodes(rendezvous, failure_dir, deaths)
    except api.SignalException as error:
        message = f"ended by {error.sigval.name}"
        deaths.append(FailureRecord(0.0, 0, 128 + error.sigval, message, names_rank=True))
    except AutomodelError:
        raise
    except Exception as error:
        if failure_dir.attempt < 0:
            if is_of_ending_run(error):
                raise _EarlierRunEnds(error) from error
            raise _rendezvous_error(rendezvous, error) from error
        # No rank has registered: the system could not start them.
        if isinstance(error, OSError) and not failure_dir.attempts():
            raise _start_error(error) from error
        record = rendezvous_failure(rendezvous, error)
        if is_connection_error(error):
            raise _LostOtherNodes(record) from error
        deaths.append(record)
    return codes, deaths


def _notify_other_nodes(
    rendezvous: Rendezvous, failure_dir: FailureDirectory, deaths: list[FailureRecord]
) -> None:
    """Report the first rank that died without writing a failure record to the other nodes."""
    store = failure_dir.store(failure_dir.attempt)
    recorded = {record.rank for record in failure_dir.records(failure_dir.attempt)}
    silent = [death for death in deaths if death.rank not in recorded]
    if rendezvous.max_nodes > 1 and store is not None and silent:
        first = min(silent, key=lambda death: death.time)
        FailureChannel(store).report(first)


def _launch_config(
    rendezvous: Rendezvous,
    num_ranks: int,
    max_restarts: int,
    failure_dir: FailureDirectory,
    rendezvous_host: RendezvousHost,
) -> Any:
    """Return torch's LaunchConfig for the ranks of this node."""
    api = importlib.import_module("torch.distributed.launcher.api")
    ours = importlib.import_module("automodel_ckpt.distributed.rendezvous")
    ours.register_rendezvous()
    host = rendezvous.rdzv_endpoint.rpartition(":")[0].strip("[]")
    configs: dict[str, Any] = {"host": rendezvous_host}
    if rendezvous.rdzv_backend != C10D:
        configs["master"] = rendezvous.node_rank
    else:
        configs["read_timeout"] = READ_SECONDS
        if hosts_unknowingly(rendezvous.rdzv_endpoint):
            configs["is_host"] = True
        elif not is_known(socket.gethostname()) and not is_own_address(host):
            # torch would look up the name of this node to find out whether it is the host.
            configs["is_host"] = False
    # For ranks that the agent stops because of a signal or of its own error. After a rank has failed, torch (all
    # versions up to 2.13) waits 30 seconds before it kills the others. torch 2.10 and 2.11 have no shutdown_timeout.
    optional = known_fields(api.LaunchConfig, {"shutdown_timeout": SHUTDOWN_SECONDS})
    return api.LaunchConfig(
        min_nodes=rendezvous.min_nodes,
        max_nodes=rendezvous.max_nodes,
        nproc_per_node=num_ranks,
        run_id=rendezvous.run_id,
        rdzv_backend=ours.NAME,
        rdzv_endpoint=rendezvous.rdzv_endpoint,
        rdzv_configs=configs,
        local_addr=None if is_loopback(host) else address_towards(host),
        max_restarts=max_restarts,
        monitor_interval=MONITOR_SECONDS,
        start_method="fork",
        signals_to_handle="SIGQUIT",
        logs_specs=api.DefaultLogsSpecs(log_dir=str(failure_dir.directory / "agent")),
        **optional,
    )


def known_fields(config_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the *settings* that are fields of a dataclass; older versions of torch lack some."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if name in names}


def rendezvous_failure(rendezvous: Rendezvous, error: Exception) -> FailureRecord:
    """Return the record of a launcher that could not join the other nodes again, or whose connection to them broke."""
    where = f"rendezvous {rendezvous.rdzv_backend} at {rendezvous.rdzv_endpoint}"
    api = importlib.import_module("torch.distributed.elastic.rendezvous")
    if isinstance(error, (TimeoutError, api.RendezvousTimeoutError)):
        seconds = importlib.import_module("automodel_ckpt.distributed.rendezvous").JOIN_SECONDS
        what = f"the other nodes did not join again within {seconds / 60:.0f} minutes"
        hint = "run the same command on all nodes to resume from the newest checkpoint"
    elif isinstance(error, api.RendezvousClosedError):
        what = "another node ended the run"
        hint = "see the log of that node"
    else:
        return lost_connection_record(error, -1, "to the other nodes", where=where)
    problem = Problem(what, where, f"{type(error).__name__}: {error}", hint)
    return FailureRecord(
        time.time(), -1, EXIT_INTERNAL, f"error: {problem}", primary=False, names_rank=True
    )


def is_of_ending_run(error: Exception) -> bool:
    """Whether a rendezvous failed because it was closed, or its host ended, and not because the host is unknown."""
    api = importlib.import_module("torch.distributed.elastic.rendezvous")
    if isinstance(error, api.RendezvousClosedError):
        return True
    cause = error.__cause__
    return is_connection_error(error) and BROKEN_CONNECTION.search(str(cause)) is not None


def _rendezvous_error(rendezvous: Rendezvous, error: Exception) -> AutomodelError:
    return RecipeError(
        "the ranks could not be started",
        where=f"rendezvous {rendezvous.rdzv_backend} at {rendezvous.rdzv_endpoint}",
        value=f"{type(error).__name__}: {error}",
        hint="check that the address is the one of this run, that its port is free, and that all nodes were started",
    )


def _start_error(error: OSError) -> AutomodelError:
    """Return the error for a system that cannot start a process or create a semaphore, which needs /dev/shm."""
    hint = "check ulimit -u, the free memory, and that /dev/shm is writable"
    problem = os_problem(error, "the system could not start the ranks", hint=hint)
    return AutomodelError.all_of([problem])


def _report_outcome(
    failure_dir: FailureDirectory,
    codes: Mapping[int, int],
    deaths: list[FailureRecord],
    *,
    num_ranks: int,
    num_nodes: int,
) -> int:
    """Return the exit code of the run; print its root cause if it failed.

    A death that the agent detected counts only if the rank wrote no record. Records of earlier attempts do not count.
    """
    attempts = failure_dir.attempts()
    records = failure_dir.records(attempts[-1]) if attempts else []
    recorded = {record.rank for record in records}
    silent = [death for death in deaths if death.rank not in recorded]
    cause = root_cause(records + silent)
    if cause is None:
        # Ranks return the codes that a restart cannot fix: the agent takes them for success.
        return max(codes.values(), default=EXIT_DONE)
    if not deaths and set(codes.values()) == {EXIT_DONE}:
        return EXIT_DONE
    started = failure_dir.processes(attempts[-1]) if attempts else {}
    cause = name_silent_ranks(cause, records, started, is_all=num_nodes == 1)
    # If all ranks failed with the same message, the rank does not matter.
    messages = {record.message for record in records}
    all_failed = len(records) == len(codes or records)
    is_common = len(records) > 1 and len(messages) == 1 and all_failed
    several_ranks = num_ranks * num_nodes > 1 and not is_common
    if any(record.follows_log for record in records):
        # A rank that was killed has no failure record.
        cause = dataclasses.replace(cause, follows_log=True)
    print_message(printed_failure(cause, several_ranks=several_ranks))
    return cause.code or EXIT_INTERNAL


def _check_cuda_not_started(torch: Any) -> None:
    """Raise :class:`RecipeError` if this process has initialized CUDA, which does not survive a fork."""
    if torch.cuda.is_initialized():
        raise RecipeError(
            "the recipe's code uses a GPU while it is imported; ranks that are forked afterwards cannot use any",
            where="recipe, _target_",
            value="torch.cuda is initialized",
            hint="move that code into a function, or start the ranks with torchrun",
        )


def _validate_no_autograd_threads() -> None:
    """Raise :class:`RecipeError` if a backward pass in this process has made every forked rank unable to run one.

    On a machine with a GPU, the first backward pass of a process starts a thread for each GPU, even if all tensors are
    on the CPU. torch then raises an error for each backward pass in a process that is forked later.
    """
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended since it was listed
            names.append(path.read_text())
    num_threads = sum(name.startswith("pt_autograd_") for name in names)
    if num_threads:
        raise RecipeError(
            "this process has already run a backward pass; ranks that are forked afterwards cannot run any",
            where="recipe, _target_",
            value=f"{num_threads} threads of torch's autograd are running",
            hint="move that code into a function, call ckpt-train in a new process, or start the ranks with torchrun",
        )


def _configure_torch(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads at its import: fewer messages, and GPUs are counted without initializing CUDA.

    Variables that the user has set are not changed.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    set_allocator(environment)
    # After a restart, a shared store would give the new ranks the addresses of the old ones (pytorch #135712).
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())


class _SignalForwarder:
    """Forwards this process's signals to the ranks while it is entered. A second signal ends a run without ranks.

    *received* is the first signal, or 0.
    """

    def __init__(self, failure_dir: FailureDirectory, rendezvous_host: RendezvousHost) -> None:
        self.received = 0
        self.failure_dir = failure_dir
        self._rendezvous_host = rendezvous_host
        self._process = os.getpid()
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _SignalForwarder:
        before = {}
        for number in stop_request().signals:
            before[number] = signal.signal(number, self._handle)
        self._before = before
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a rank that has not installed its own handlers yet
            stop_request().note(number)
            return
        # Record the signal before listing the processes: a rank that registers meanwhile reads it from the directory.
        self.failure_dir.record_signal(number)
        is_second = self.received and time.monotonic() - self._first_at >= SAME_SIGNAL_SECONDS
        if not self.received:
            self.received, self._first_at = number, time.monotonic()
            stop_request().note(number)
        has_ranks = False
        for process in self._ranks():
            if self._send(process, number):
                has_ranks = True
        if is_second and not has_ranks:
            self._exit_immediately(number)
        # Last, since both may raise: the ranks have got the signal.
        self._rendezvous_host.stop(number)
        stop_request().wake(number, frame)

    def _exit_immediately(self, number: int) -> NoReturn:
        """End for a second signal when no rank runs. If all ranks were done, their exit code is kept."""
        failure_dir = self.failure_dir
        attempts = failure_dir.attempts()
        attempt = attempts[-1] if attempts else -1
        ranks = failure_dir.processes(attempt)
        cause = root_cause(failure_dir.records(attempt))
        code = cause.code if cause is not None else EXIT_DONE
        are_done = all(failure_dir.is_done(attempt, rank) for rank in ranks)
        if not ranks or not are_done or code == EXIT_INTERNAL:
            sys.stderr.write(f"stopped immediately by a second {signal.Signals(number).name}\n")
            os._exit(128 + number)
        if cause is not None:
            sys.stderr.write(printed_failure(cause, several_ranks=len(ranks) > 1) + "\n")
        os._exit(code)

    def _ranks(self) -> Iterator[int]:
        """Yield the process ids of the ranks of the last attempt."""
        for attempt in self.failure_dir.attempts()[-1:]:
            yield from self.failure_dir.processes(attempt).values()

    def _send(self, process: int, number: int) -> bool:
        """Send a signal; return False if the process has ended."""
        # kill() succeeds for a process that has ended and whose parent has not read its status yet.
        if has_ended(process):
            return False
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return False
        return True
