"""A real training on two ranks, one of which sleeps in a step and later is suspended: named, dumped, restarted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from automodel_ckpt.report.goodput import read_goodput
from tests.support.training import RECIPE

CODE = """
import os, signal, time
from pathlib import Path
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.loop import TrainingLoop

def sleep_long():
    time.sleep(1000)

class Loop(TrainingLoop):
    def train_step(self, batch, control):
        step, rank = self.step_scheduler.step, self.layout.rank
        if rank == 1 and step == 11 and not Path("slept").exists():
            Path("slept").touch()
            sleep_long()
        if rank == 0 and step == 20 and not Path("suspended").exists():
            Path("suspended").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().train_step(batch, control)

class Hanging(LLMFinetune):
    loop_class = Loop
"""


def test_the_rank_that_does_not_arrive_is_named_and_the_run_restarts(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(CODE)
    (tmp_path / "recipe.yaml").write_text(f"recipe: hanging.py:Hanging\n{RECIPE}")
    command = [
        str(Path(sys.executable).with_name("ckpt-train")),
        "recipe.yaml",
        "--trust=hanging.py",
        "--nproc-per-node=2",
        "--max-restarts=2",
        "--hangs.min_seconds=2",
        "--step_scheduler.num_epochs=4",
        "--checkpoint.checkpoint_dir=run",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    hangs = re.findall(r"step (\d+) hangs: it takes \d+ s, and the median is .*\n(.*)\n", log)
    assert [step for step, _ in hangs] == ["12", "21"], log
    assert "rank 1 did not arrive: in a step: sleep_long (hanging.py:8)" in hangs[0][1]
    assert re.search(r"rank 0 is suspended \(process \d+\)", hangs[1][1])
    assert "restart 1 of 2" in log
    assert "restart 2 of 2" in log
    stacks = (tmp_path / "run/hangs/step_12/rank_1.txt").read_text()
    assert "in sleep_long" in stacks
    waiting = (tmp_path / "run/hangs/step_12/rank_0.txt").read_text()
    assert "distributed_c10d.py" in waiting
    found = read_goodput(tmp_path / "run")
    assert [start.first_step for start in found.starts] == [0, 10, 20]
    assert [start.outcome for start in found.starts] == ["killed", "killed", "done"]
