"""`ckpt-train` with a hand-made recipe that fails in one chosen way: the launcher's tests run it as a command.

python -m tests.support.runs.fake_train CASE [--nproc-per-node 2] [--max-restarts 1] ... [--notes DIRECTORY]
"""

import argparse
import importlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from automodel_ckpt.cli.launch.launcher import launch
from automodel_ckpt.cli.launch.process import exit_process
from automodel_ckpt.config.keys.ranks_and_steps import StepSchedulerConfig
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError, SaveFailed, Stopped
from automodel_ckpt.parallel.ranks.stop import stop_request
from tests.support.servers.networks import enter_network

IDLE_SECONDS = 600
"""How long a rank does nothing that another one must end: longer than any test waits."""
DISK_FULL = SaveFailed("cannot write", where="shard", value="ENOSPC", hint="make room")


class FakeRecipe:
    """Two gloo steps; what happens after them is the method named by the case."""

    def __init__(self, config: Any, *, config_yaml: str) -> None:
        self.config = config
        self.notes = Path(config.notes)

    def setup(self) -> None:
        import torch.distributed as dist

        if self.config.case == "wrong_everywhere":
            raise RecipeError(
                "the data set is empty", where="dataset", value="0 samples", hint="give it samples"
            )
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.size > 1:
            self.note("joining", "")
            dist.init_process_group("gloo")
        self.note("started", f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')}")

    def run(self) -> None:
        for _ in range(2):
            self.step()
        getattr(self, self.config.case)()

    def close(self) -> None:
        if self.config.case == "closes_slowly":
            self.note("closing", "")
            time.sleep(2)
        self.note("closed", "")
        if self.config.case in ("killed_at_the_end", "fails_at_the_end") and self.is_first_start():
            self.fail_after_the_others()

    def fail_after_the_others(self) -> None:
        """Rank 1 fails when rank 0 is done and waits for its launcher."""
        if self.rank == 1:
            while not (self.notes / "closed_0").exists():
                time.sleep(0.05)
            time.sleep(1)
        if self.config.case == "killed_at_the_end":
            self.die_alone(signal.SIGKILL)
        elif self.rank == 1:
            raise ValueError("boom")

    def is_first_start(self) -> bool:
        return len((self.notes / f"started_{self.rank}").read_text().splitlines()) == 1

    def note(self, name: str, text: str) -> None:
        with open(self.notes / f"{name}_{os.environ.get('RANK', 0)}", "a") as file:
            file.write(text + "\n")

    def step(self, stop: int = 0) -> int:
        import torch
        import torch.distributed as dist

        control = torch.tensor([float(stop)])
        if self.size > 1:
            dist.all_reduce(control, op=dist.ReduceOp.MAX)
        return int(control.item())

    def ok(self) -> None:
        # In one write: the ranks share the pipe.
        sys.stdout.write(f"rank {self.rank} trained\n")

    killed_at_the_end = fails_at_the_end = ok

    def train_until_stopped(self) -> None:
        self.note("training", "")
        while True:
            number = self.step(stop_request().requested)
            if number:
                what = f"stopped by {signal.Signals(number).name}"
                raise Stopped(what, where="", value="", hint="run it again")
            time.sleep(0.05)

    closes_slowly = train_until_stopped

    def deaf_until_stopped(self) -> None:
        """As long as rank 0 does not step, rank 1 waits in a collective, where no Python handler runs."""
        self.note("training", "")
        if self.rank == 0:
            time.sleep(IDLE_SECONDS)
        self.step()

    def killed_beside_a_busy_rank(self) -> None:
        if self.is_first_start():
            self.die_alone(signal.SIGKILL)
            time.sleep(IDLE_SECONDS)
        self.ok()

    def save_fails_on_all(self) -> None:
        import torch.distributed as dist

        from automodel_ckpt.parallel.ranks.agree import all_or_nothing

        all_or_nothing(dist.group.WORLD, DISK_FULL if self.rank == 1 else None)

    def save_fails_on_one(self) -> None:
        self.only_on_rank_1(DISK_FULL)

    def value_error_on_one(self) -> None:
        self.only_on_rank_1(ValueError("boom"))

    def value_error_on_one_of_the_busy(self) -> None:
        if self.rank == 0:
            time.sleep(IDLE_SECONDS)
        self.value_error_on_one()

    def killed(self) -> None:
        self.die(signal.SIGKILL)

    def segfault(self) -> None:
        self.die(signal.SIGSEGV)

    def killed_once(self) -> None:
        if self.is_first_start():
            self.killed()

    def leaves_as_if_done(self) -> None:
        if self.rank == 1:
            os._exit(0)
        self.step()

    def loses_its_own_connection(self) -> None:
        """Rank 1 fails because of a server that has nothing to do with the ranks."""
        self.only_on_rank_1(RuntimeError("tracking server: Connection reset by peer"))

    def die(self, number: int) -> None:
        self.die_alone(number)
        self.step()

    def die_alone(self, number: int) -> None:
        if self.rank == 1:
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), number)

    def only_on_rank_1(self, error: Exception) -> None:
        if self.rank == 1:
            raise error
        self.step()


def raise_in(module: str, error: Exception) -> None:
    """Raise an exception in a frame of the named module."""
    exec(compile("raise error", module, "exec"), {"__name__": module, "error": error})


def _set_rendezvous(last_call: float | None, heartbeat: float | None) -> None:
    """Let the rendezvous of torch wait *last_call* seconds for more machines, and lose one without three heartbeats."""
    dynamic = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    if last_call is not None:
        dynamic.RendezvousTimeout._DEFAULT_TIMEOUTS["last_call"] = timedelta(seconds=last_call)
    if heartbeat is not None:
        settings, interval = dynamic.RendezvousSettings, timedelta(seconds=heartbeat)
        replaced = {"keep_alive_interval": interval}
        vars(dynamic)["RendezvousSettings"] = lambda *given, **named: settings(
            *given, **named | replaced
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--notes", default=".")
    for flag in ("--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--master-addr"):
        parser.add_argument(flag)
    parser.add_argument("--network", help="a network namespace of ip(8)'s to run in")
    parser.add_argument("--stop-signals", nargs="+", default=StepSchedulerConfig().stop_signals)
    for flag in ("--max-restarts", "--node-rank", "--master-port"):
        parser.add_argument(flag, type=int)
    # Seconds that an elastic run waits for more machines, and between two heartbeats of a machine.
    for flag in ("--last-call", "--heartbeat"):
        parser.add_argument(flag, type=float)
    given = vars(parser.parse_args())
    _set_rendezvous(given.pop("last_call"), given.pop("heartbeat"))
    if network := given.pop("network"):
        enter_network(network)
    steps = StepSchedulerConfig(stop_signals=given.pop("stop_signals"))
    config = SimpleNamespace(
        case=given.pop("case"),
        notes=given.pop("notes"),
        step_scheduler=steps,
        distributed=SimpleNamespace(backend="gloo"),
        checkpoint=SimpleNamespace(memory=None),
    )
    loaded: Any = SimpleNamespace(config=config, origins={}, overridden=(), to_yaml=lambda: "")
    flags = LaunchFlags(**{name: value for name, value in given.items() if value is not None})

    def prepare() -> tuple[Any, type[FakeRecipe]]:
        importlib.import_module("torch.distributed")
        return loaded, FakeRecipe

    return launch(loaded, flags, prepare)


if __name__ == "__main__":
    exit_process(main())
