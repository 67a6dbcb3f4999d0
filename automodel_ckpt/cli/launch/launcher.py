"""Start the ranks of a run, or join those that torchrun or srun started; return the exit code of `ckpt-train`.

One rank runs in this process. Several are forked by torch's elastic agent (the engine of `torch.distributed.run`) after
this process has imported torch, transformers and the recipe's class, so that they start immediately. Before the fork,
this process computes nothing and does not initialize CUDA, because neither survives a fork.
:mod:`automodel_ckpt.cli.launch.worker` describes how ranks end.

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
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from automodel_ckpt.cli.launch.failure_channel import FailureChannel
from automodel_ckpt.cli.launch.failures import (
    FailureDirectory,
    FailureRecord,
    death_of,
    is_gone,
    lost_connection,
    naming_the_silent,
    record_of,
    text_of,
    verdict,
)
from automodel_ckpt.cli.launch.nodes import LauncherRendezvous, StoppedRendezvous
from automodel_ckpt.cli.launch.shared_directory import scratch_directory
from automodel_ckpt.cli.launch.topology import (
    C10D,
    LOCAL,
    Rendezvous,
    cores,
    count_ranks,
    forget_ranks,
    rendezvous,
    set_threads,
    slurm_ranks,
    started_by,
    visible_gpus,
)
from automodel_ckpt.cli.launch.worker import (
    Loaded,
    RecipeClass,
    exit_now,
    flush,
    joined_rank,
    launched_rank,
    run_rank,
    say,
)
from automodel_ckpt.cli.terminal import forgiving_streams
from automodel_ckpt.config.flags import LaunchFlags
from automodel_ckpt.distributed.network import (
    address_towards,
    hosts_unknowingly,
    is_known,
    is_loopback,
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
    RecipeError,
    describe,
    os_problem,
)

MONITOR_SECONDS = 0.1
SHUTDOWN_SECONDS = 10
CONNECT_ATTEMPTS = 3
STORE_SECONDS = 5.0
READ_SECONDS = 20
"""So long the rendezvous may take to answer: its agent asks it twice, blind to its ranks, before it gives up."""
NOISY_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")

Prepare = Callable[[], tuple[Loaded, RecipeClass]]


def launch(loaded: Loaded, flags: LaunchFlags, prepare: Prepare) -> int:
    """Run a loaded recipe as the flags and the environment say; what went wrong is printed last, once.

    ``prepare`` imports what the ranks need and returns the checked recipe and its class. It is called once in this
    process, after the environment that torch reads at import is set. Raises nothing.
    """
    with forgiving_streams():
        return _launch(loaded, flags, prepare)


def _launch(loaded: Loaded, flags: LaunchFlags, prepare: Prepare) -> int:
    try:
        stop_request().signals = _stop_signals(loaded)
        started = started_by(os.environ, flags)
        if started == "srun":
            os.environ.update(slurm_ranks(os.environ, flags))
        if started != "nobody":
            return _join(prepare, serve=started == "srun")
        if found := forget_ranks(os.environ):
            say(
                f"{' and '.join(found)} in the environment: without MASTER_ADDR they make no rank, and are ignored"
            )
        meet = rendezvous(flags, os.environ)  # where nobody is met it refuses what makes no sense
        if flags.nproc_per_node == "1" and flags.nnodes == "1" and not flags.max_restarts:
            return _run_here(prepare)
        return _run_forked(flags, meet, prepare)
    except StoppedWaiting:
        return _stopped(stop_request().requested, "before training began")
    except Exception as error:
        record = record_of(error, 0)
        say(text_of(record, several_ranks=False))
        return record.code


def _stopped(number: int, when: str) -> int:
    say(f"stopped by {signal.Signals(number).name} {when}")
    return EXIT_STOPPED


def _stop_signals(loaded: Loaded) -> Sequence[signal.Signals]:
    """What the recipe says; a foreign configuration need not. A hangup that nohup has this process ignore stays so."""
    numbers: Sequence[signal.Signals] = getattr(
        getattr(loaded.config, "step_scheduler", None), "stop_signal_numbers", SIGNALS
    )
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return [number for number in numbers if number not in ignored]


def _imported(prepare: Prepare) -> tuple[Loaded, RecipeClass]:
    """Call ``prepare`` without the garbage collector, which would search the modules' objects again and again.

    They live as long as the process: freezing them spares later collections, and the ranks' copies of their pages.
    """
    gc.disable()
    try:
        return prepare()
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """End the process of a command with this code, past the interpreter's teardown.

    After distributed work that teardown sometimes aborts in a library's threads; a finished run must not fail there.
    """
    # atexit offers no public way to run its callbacks, and exit_now() skips them.
    atexit._run_exitfuncs()
    exit_now(code)


def _run_here(prepare: Prepare) -> int:
    stop_request().install()
    _hush(os.environ)
    with stop_request().interrupting():
        loaded, recipe_class = _imported(prepare)
    return run_rank(loaded, recipe_class, lambda record: say(text_of(record, several_ranks=False)))


def _join(prepare: Prepare, *, serve: bool) -> int:
    stop_request().install()
    _hush(os.environ)
    store = _serve_store() if serve else None
    # torchrun knows only success and failure, and a rank that saved for a signal did not fail.
    exit_stopped = EXIT_DONE if "TORCHELASTIC_RUN_ID" in os.environ and not serve else EXIT_STOPPED
    claims: list[bool] = []

    def claim() -> bool:
        claims.append(claim_final_report())
        return claims[-1]

    try:
        loaded, recipe_class = _imported(prepare)
    except AutomodelError as error:
        if claim():
            say(describe(error)[1])
        code = error.exit_code
    else:
        code = joined_rank(loaded, recipe_class, claim, exit_stopped)
    if store is not None:
        if claims:  # other ranks ask this store which of them prints its failure
            time.sleep(STORE_SECONDS)
        return code
    return exit_stopped if code == EXIT_STOPPED else code


def _serve_store() -> Any:
    """Under srun rank 0 serves the ranks' store, as torchrun's agent does; None elsewhere."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if not is_known(os.environ["MASTER_ADDR"]):
        raise RecipeError(
            "the name of the machine of rank 0 leads nowhere",
            where="MASTER_ADDR",
            value=os.environ["MASTER_ADDR"],
            hint="give --master-addr a name or an address that all machines of the job know",
        )
    if os.environ["RANK"] != "0":
        return None
    distributed = importlib.import_module("torch.distributed")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)


def claim_final_report() -> bool:
    """Whether this rank is the first of its run to ask; the store that outlives the ranks knows. True without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    distributed = importlib.import_module("torch.distributed")
    timeout = timedelta(seconds=STORE_SECONDS)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = f"automodel_ckpt/last_word/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = distributed.TCPStore(
            host, port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        return bool(store.add(key, 1) == 1)
    except RuntimeError:  # the base of torch's store and network errors
        return True


def _run_forked(flags: LaunchFlags, meet: Rendezvous, prepare: Prepare) -> int:
    asked = flags.nproc_per_node
    guess = (
        int(asked)
        if asked.isdigit()
        else cores()
        if asked == "cpu"
        else visible_gpus(os.environ) or cores()
    )
    meetings = LauncherRendezvous(meet)
    with (
        scratch_directory() as directory,
        _Forwarder(FailureDirectory(directory), meetings) as signals,
    ):
        set_threads(os.environ, guess)
        _hush(os.environ)
        with stop_request().interrupting():
            loaded, recipe_class = _imported(prepare)
        torch = importlib.import_module("torch")
        on_gpu = getattr(getattr(loaded.config, "distributed", None), "backend", None) != "gloo"
        num_ranks = count_ranks(asked, torch.cuda.device_count(), on_gpu=on_gpu)
        _check_cuda_not_started(torch)
        _validate_no_autograd_threads()
        if signals.received:
            raise StoppedWaiting
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            failure_dir = signals.failure_dir = meetings.failure_dir = FailureDirectory(
                directory / f"launch_{attempt}", is_elastic=meet.is_elastic
            )
            try:
                config = _launch_config(
                    meet, num_ranks, meet.restarts(flags.max_restarts), failure_dir, meetings
                )
                codes, deaths = _elastic(loaded, recipe_class, meet, config, failure_dir)
            except StoppedRendezvous:
                return _stopped(signals.received, "while waiting for the other machines")
            again = (
                meet.rdzv_backend == LOCAL and attempt < CONNECT_ATTEMPTS and not signals.received
            )
            if not (again and _never_connected(failure_dir)):
                break
            say("the ranks could not connect to each other: starting them again")
        return _conclude(failure_dir, codes, deaths, num_ranks=num_ranks, machines=meet.max_nodes)


def _never_connected(failure_dir: FailureDirectory) -> bool:
    attempts = failure_dir.attempts()
    return bool(attempts) and any(
        not record.connected for record in failure_dir.records(attempts[-1])
    )


def _elastic(
    loaded: Loaded,
    recipe_class: RecipeClass,
    meet: Rendezvous,
    config: Any,
    failure_dir: FailureDirectory,
) -> tuple[dict[int, int], list[FailureRecord]]:
    """Let the elastic agent run the ranks; returns their codes, or the deaths that it saw."""
    api = importlib.import_module("torch.distributed.launcher.api")
    flush()  # what stands in a buffer would be printed by every rank
    codes: dict[int, int] = {}
    deaths: list[FailureRecord] = []
    try:
        codes = api.elastic_launch(config, launched_rank)(
            loaded, recipe_class, failure_dir, os.getpid()
        )
    except api.ChildFailedError as error:
        for rank, failure in error.failures.items():
            deaths.append(death_of(rank, failure.exitcode, float(failure.timestamp)))
        seen = {death.rank for death in deaths}
        deaths += [
            death for death in failure_dir.gone(failure_dir.attempt) if death.rank not in seen
        ]
        _notify_other_nodes(meet, failure_dir, deaths)
    except api.SignalException as error:
        deaths.append(
            FailureRecord(
                0.0, 0, 128 + error.sigval, f"ended by {error.sigval.name}", names_rank=True
            )
        )
    except AutomodelError:
        raise
    except Exception as error:
        if failure_dir.attempt < 0:
            raise _no_meeting(meet, error) from error
        if isinstance(error, OSError) and not failure_dir.attempts():
            raise _no_room(error) from error
        where = f"rendezvous {meet.rdzv_backend} at {meet.rdzv_endpoint}"
        deaths.append(lost_connection(error, -1, "to the other machines", where=where))
    return codes, deaths


def _notify_other_nodes(
    meet: Rendezvous, failure_dir: FailureDirectory, deaths: list[FailureRecord]
) -> None:
    """Report a rank that died without writing a failure record."""
    store = failure_dir.store(failure_dir.attempt)
    silent = [
        death
        for death in deaths
        if death.rank not in {record.rank for record in failure_dir.records(failure_dir.attempt)}
    ]
    if meet.max_nodes > 1 and store is not None and silent:
        FailureChannel(store).tell(min(silent, key=lambda death: death.time))


def _launch_config(
    meet: Rendezvous,
    num_ranks: int,
    max_restarts: int,
    failure_dir: FailureDirectory,
    meetings: LauncherRendezvous,
) -> Any:
    api = importlib.import_module("torch.distributed.launcher.api")
    ours = importlib.import_module("automodel_ckpt.distributed.rendezvous")
    ours.register_rendezvous()
    host = meet.rdzv_endpoint.rpartition(":")[0].strip("[]")
    configs: dict[str, Any] = {"host": meetings}
    if meet.rdzv_backend != C10D:
        configs["master"] = meet.node_rank
    else:
        configs["read_timeout"] = READ_SECONDS
        if hosts_unknowingly(meet.rdzv_endpoint):
            configs["is_host"] = True
    # torch 2.10 and 2.11 have no shutdown_timeout: their agent waits 30 seconds before it kills a rank.
    optional = known_fields(api.LaunchConfig, {"shutdown_timeout": SHUTDOWN_SECONDS})
    return api.LaunchConfig(
        min_nodes=meet.min_nodes,
        max_nodes=meet.max_nodes,
        nproc_per_node=num_ranks,
        run_id=meet.run_id,
        rdzv_backend=ours.NAME,
        rdzv_endpoint=meet.rdzv_endpoint,
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


def _no_meeting(meet: Rendezvous, error: Exception) -> AutomodelError:
    return RecipeError(
        "the ranks could not be started",
        where=f"rendezvous {meet.rdzv_backend} at {meet.rdzv_endpoint}",
        value=f"{type(error).__name__}: {error}",
        hint="check that the address is this run's, that its port is free, and that all machines were started",
    )


def _no_room(error: OSError) -> AutomodelError:
    """This machine lets no process be started, or no semaphore be made, which takes /dev/shm."""
    hint = "look at ulimit -u, at the free memory, and whether /dev/shm can be written"
    return AutomodelError.all_of(
        [os_problem(error, "the system did not let the ranks start", hint=hint)]
    )


def _conclude(
    failure_dir: FailureDirectory,
    codes: Mapping[int, int],
    deaths: list[FailureRecord],
    *,
    num_ranks: int,
    machines: int,
) -> int:
    """The run's exit code; says why it failed, if it did.

    A death that the agent saw counts only where the rank left no record. Records of restarted attempts do not count.
    """
    attempts = failure_dir.attempts()
    recorded = failure_dir.records(attempts[-1]) if attempts else []
    silent = [death for death in deaths if death.rank not in {record.rank for record in recorded}]
    why = verdict(recorded + silent)
    if why is None:
        return max(codes.values(), default=EXIT_DONE)
    if not deaths and set(codes.values()) == {EXIT_DONE}:
        return EXIT_DONE
    started = failure_dir.processes(attempts[-1]) if attempts else {}
    why = naming_the_silent(why, recorded, started, is_all=machines == 1)
    common = len({record.message for record in recorded}) == 1 and len(recorded) == len(
        codes or recorded
    )
    several = num_ranks * machines > 1 and not (common and len(recorded) > 1)
    say(text_of(why, several_ranks=several))
    return why.code or EXIT_INTERNAL


def _check_cuda_not_started(torch: Any) -> None:
    if torch.cuda.is_initialized():
        raise RecipeError(
            "code of the recipe uses a GPU while it is imported; ranks forked after that cannot use any",
            where="recipe, _target_",
            value="torch.cuda is initialised",
            hint="move that code into a function, or start the ranks with torchrun",
        )


def _validate_no_autograd_threads() -> None:
    """Raise RecipeError if a backward pass in this process has made every forked rank unable to run one.

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
            "this process has already run a backward pass; ranks forked after that cannot run any",
            where="recipe, _target_",
            value=f"{num_threads} threads of torch's autograd are running",
            hint="move that code into a function, call ckpt-train in a new process, or start the ranks with torchrun",
        )


def _hush(environment: MutableMapping[str, str]) -> None:
    """What torch reads from the environment: few words on the terminal, and no CUDA started for counting GPUs."""
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # A store that outlives a restart hands the new ranks the old ones' addresses (pytorch #135712).
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())


class _Forwarder:
    """Passes this process's signals on to the ranks while it is entered; the second one ends a run without ranks."""

    def __init__(self, failure_dir: FailureDirectory, meetings: LauncherRendezvous) -> None:
        self.received = 0
        self.failure_dir = failure_dir
        self._meetings = meetings
        self._process = os.getpid()
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Forwarder:
        self._before = {
            number: signal.signal(number, self._handle) for number in stop_request().signals
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a rank that has not installed its own handlers yet
            stop_request().note(number)
            return
        self.failure_dir.sign_stop(number)
        again = self.received and time.monotonic() - self._first_at >= SAME_SIGNAL_SECONDS
        if not self.received:
            self.received, self._first_at = number, time.monotonic()
            stop_request().note(number)
        told = [self._tell(process, number) for process in self._ranks()]
        if again and not any(told):
            self._leave(number)
        self._meetings.stop(number)
        stop_request().wake(number, frame)

    def _leave(self, number: int) -> NoReturn:
        """End for a second signal when no rank runs. Ranks whose work is done keep their exit code."""
        attempt = self.failure_dir.attempts()[-1] if self.failure_dir.attempts() else -1
        processes = self.failure_dir.processes(attempt)
        why = verdict(self.failure_dir.records(attempt))
        code = why.code if why is not None else EXIT_DONE
        are_done = all(self.failure_dir.is_done(attempt, rank) for rank in processes)
        if not processes or not are_done or code == EXIT_INTERNAL:
            sys.stderr.write(f"stopped at once by a second {signal.Signals(number).name}\n")
            os._exit(128 + number)
        if why is not None:
            sys.stderr.write(text_of(why, several_ranks=len(processes) > 1) + "\n")
        os._exit(code)

    def _ranks(self) -> Iterator[int]:
        for attempt in self.failure_dir.attempts()[-1:]:
            yield from self.failure_dir.processes(attempt).values()

    def _tell(self, process: int, number: int) -> bool:
        if is_gone(process):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
            return True
        return False
