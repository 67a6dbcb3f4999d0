"""The environment that every test runs in: offline, one thread, and caches of this test session's own."""

import gc
import importlib
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.bytecode import write_bytecode
from tests.support.doors import uses_doors_only
from tests.support.logging_state import kept_logging, reset_logging
from tests.support.servers import huge_pages
from tests.support.servers.command_server import CommandServer

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
"""The signals for which a training installs handlers."""
RECORDED = (
    ("automodel_ckpt.config.callables.trust", "_trusts_remote_code"),
    ("automodel_ckpt.logs.timeline", "_noted"),
)
"""What a command records for its process: modules and names."""
# A shell script starts background commands with SIGINT ignored, and each process of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS_AT_START = {number: signal.getsignal(number) for number in HANDLED}

# Set before any test module imports torch or transformers; pytest-xdist's workers inherit the directory.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    # Tests keep all cores busy: processes of the lowest priority would get none.
    AUTOMODEL_CKPT_UPLOAD_NICENESS="0",
)
if not IS_WORKER:
    SESSION_DIR = tempfile.mkdtemp(prefix="automodel-ckpt-tests-")
    os.environ["AUTOMODEL_CKPT_CACHE"] = os.path.join(SESSION_DIR, "cache")
    os.environ["HF_HOME"] = os.path.join(SESSION_DIR, "huggingface")
COMMANDS = CommandServer(Path(os.environ["AUTOMODEL_CKPT_CACHE"]).with_name("commands"))
# Some hundred processes import this repository's modules: each would compile them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What the surrounding shell may carry must not reach the tests' own runs.
for name in (
    "AUTOMODEL_CKPT_TRUST",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
):
    os.environ.pop(name, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not IS_WORKER:
        COMMANDS.end()
        shutil.rmtree(SESSION_DIR, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    _hypothesis_profile()
    if not IS_WORKER and "popen" in (getattr(config.option, "tx", None) or []):
        _fork_the_workers(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not search for garbage during the collection, which makes almost none: it would take a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m "doors ..."``, import no test file that has none."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    leaves_out = config.option.markexpr.startswith("doors") and is_test
    return True if leaves_out and not uses_doors_only(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of files that use public doors only.

    Put slow tests first, and with them all tests of their files: one that began last would run alone.
    """
    for item in items:
        if uses_doors_only(item.path):
            item.add_marker("doors")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Run this process's first backward pass before any test, so that ranks forked by later tests can run theirs.

    The first backward pass starts a thread for each device other than the CPU, and no process that is forked after that
    can run a backward pass. A machine without a GPU has no such device, unless torch is a CUDA build and a test enters
    FakeTensorMode first, which makes autograd find eight devices. Autograd looks for devices only once.
    """
    # Thousands of collected tests stay until the end: a full collection of garbage need not visit them.
    gc.freeze()
    # Ranks and other processes that tests fork must not collect what earlier tests left in cycles.
    importlib.import_module("automodel_ckpt.base.python_child").freeze_in_forked_processes()
    if IS_WORKER:
        huge_pages.collapse()
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()


def _fork_the_workers(config: pytest.Config) -> None:
    """One process imports torch and transformers, not each of pytest-xdist's workers and then its commands' server."""
    places = [Path(argument.partition("::")[0]) for argument in config.args]
    server = COMMANDS.begin(meanwhile=lambda: write_bytecode(config, places))
    worker = f"popen//python={shlex.quote(str(server.bin / 'worker'))}"
    config.option.tx = [worker if spec == "popen" else spec for spec in config.option.tx]


def _hypothesis_profile() -> None:
    """The same examples in every run, and no deadline: a loaded machine is no failure."""
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers

    # Otherwise, examples would contain constants of whichever modules of this repository have been imported, and each
    # worker would search all of these for constants.
    vars(providers)["_get_local_constants"] = lambda: providers._local_constants
    settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
    settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def commands() -> CommandServer:
    """Commands without the time of their imports; all workers share one server."""
    return COMMANDS.begin()


def _forget_commands() -> None:
    """Put what commands record for their process into the state of a new process.

    These are signal handlers and whether the command was stopped or is done (ranks that are forked later would ignore
    signals), logging, whether code of models is trusted, when the process started, and the values of
    ``${oc.env:NAME}`` that messages must not show (a later test's message with the same word would be changed).
    """
    reset_logging()
    for module, name in RECORDED:
        if module in sys.modules:
            setattr(sys.modules[module], name, None)
    errors = sys.modules.get("automodel_ckpt.errors")
    if errors is not None:
        errors._references.clear()
    stop = sys.modules.get("automodel_ckpt.parallel.ranks.stop")
    if stop is None:
        return
    request = stop.stop_request()
    if request._installed:
        signal.set_wakeup_fd(-1)
        for number, handler in HANDLERS_AT_START.items():
            signal.signal(number, handler)
    state = vars(request)
    state.clear()
    state.update(vars(stop.StopRequest()))


def _seed_generators() -> None:
    """Seed the generators of Python, and of numpy and torch where they are imported.

    Without a GPU, ``torch.manual_seed`` would keep a stack trace for each kind of accelerator.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        on_gpu = torch.cuda.is_available()
        (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Undo what a command that ran inside a test leaves in this process, and the variables that it sets for torch.

    Also before the test: a fixture of the module or session may have run a command. Each test begins with the same
    random numbers, whichever tests have drawn some before.
    """
    before = dict(os.environ)
    _forget_commands()
    _seed_generators()
    with kept_logging():
        yield
    _forget_commands()
    after = dict(os.environ)
    if after == before:
        return
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
