"""Forked processes do not destroy what the process that forked them left in cycles."""

import subprocess
import sys
from pathlib import Path

import pytest

import automodel_ckpt

FORKS = Path(automodel_ckpt.__file__).parent / "base" / "python_child.py"

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
