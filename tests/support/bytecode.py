"""Write the bytecode of the test modules once: each of pytest-xdist's workers would rewrite all their assertions."""

import compileall
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[2]
_NUM_PROCESSES = 2


def write_bytecode(config: pytest.Config, directories: Sequence[Path]) -> None:
    """Write what is missing for the test modules in *directories*, and for the modules that tests import."""
    modules = sorted(path for place in directories for path in place.rglob("test_*.py"))
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_write, args=(config, modules[first::_NUM_PROCESSES], first == 0))
        for first in range(_NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _write(config: pytest.Config, modules: Sequence[Path], with_others: bool) -> None:
    for module in modules:
        rewrite_assertions(config, module)
    if with_others:
        for name in ("tests/support", "tests/hostile", "tools"):
            compileall.compile_dir(ROOT / name, quiet=2)
    os._exit(0)


def rewrite_assertions(config: pytest.Config, module: Path) -> Path:
    """As pytest does when it imports a test module, but without running it. Returns the file of the bytecode."""
    directory = rewrite.get_cache_dir(module)
    file = directory / (module.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(module, file) is None and rewrite.try_makedirs(directory):
        source, code = rewrite._rewrite_test(module, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, file)
    return file
