"""Forked processes do not destroy what the process that forked them left in cycles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from automodel_ckpt.cli.launch import recipe_import
from automodel_ckpt.data.batches import micro_batches
from automodel_ckpt.data.rows import preparation as row_workers

FORKS = Path(row_workers.__file__).parents[2] / "base" / "python_child.py"

PROGRAM = """
import gc, os, runpy, sys

def allocate():
    # A thousand objects begin a collection, as a library's hook may.
    global kept
    kept = [[] for _ in range(2000)]

os.register_at_fork(after_in_child=allocate)
if sys.argv[2] == "protected":
    freeze = runpy.run_path(sys.argv[1])["freeze_in_forked_processes"]
    freeze()
    freeze()

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("destroyed in the", "parent" if os.getpid() == parent else "child", flush=True)

parent = os.getpid()
gc.collect()
gc.disable()
Cycle()
gc.enable()
child = os.fork()
if child == 0:
    gc.collect()
    print("child collects:", gc.isenabled(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent collects:", gc.isenabled(), flush=True)
gc.collect()
gc.disable()
if os.fork() == 0:
    print("second child collects:", gc.isenabled(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("protected", [True, False], ids=["protected", "not protected"])
def test_a_child_does_not_destroy_what_it_inherits(protected: bool) -> None:
    words = [sys.executable, "-c", PROGRAM, FORKS, "protected" if protected else "not"]
    lines = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert ("destroyed in the child" in lines) is not protected
    assert [line for line in lines if "child" not in line] == [
        "parent collects: True",
        "destroyed in the parent",
    ]
    assert "child collects: True" in lines and "second child collects: False" in lines


class One(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> int:
        return 1


def read_in_a_worker() -> None:
    assert list(micro_batches.run_workers(One(), 1, shuffle=False)) == [1]


def compute_in_workers() -> None:
    assert list(row_workers.in_order(lambda start, stop: start + stop, [(0, 1), (1, 2)], 2)) == [
        1,
        3,
    ]


def import_before_forks() -> None:
    def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        recipe_import.import_before_forks(fail)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "fork"),
    [
        (micro_batches, read_in_a_worker),
        (row_workers, compute_in_workers),
        (recipe_import, import_before_forks),
    ],
    ids=["data loader", "rows", "ranks"],
)
def test_every_place_that_forks_protects_its_children(
    module: object, fork: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(module, "freeze_in_forked_processes", lambda: calls.append(True))
    fork()  # type: ignore[operator]
    assert calls
