"""Who starts the ranks, how many, and where they meet, from flags and environment alone."""

import math
import re
from pathlib import Path

import pytest

from automodel_ckpt.cli.launch.node_resources import (
    count_ranks,
    cpu_quota,
)
from automodel_ckpt.cli.launch.ranks import (
    choose_rendezvous,
    first_host,
    slurm_environment,
    started_by,
)
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import RecipeError

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "flags", "who"),
    [
        ({}, LaunchFlags(), None),
        (TORCHRUN, LaunchFlags(), "torchrun"),
        (STEP, LaunchFlags(), "srun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, LaunchFlags(), "srun"),
        (STEP | {"SLURM_NTASKS": "1"}, LaunchFlags(), None),
        (STEP, LaunchFlags(nproc_per_node="8", nnodes="4"), None),
    ],
)
def test_who_started_this_process(
    environment: dict[str, str], flags: LaunchFlags, who: str | None
) -> None:
    assert started_by(environment, flags) == who


def test_flags_that_ask_for_ranks_are_refused_under_torchrun() -> None:
    with pytest.raises(RecipeError, match="already a rank"):
        started_by(TORCHRUN, LaunchFlags(nproc_per_node="2"))


@pytest.mark.parametrize(
    "wrong", [{"RANK": "2"}, {"RANK": "a"}, {"MASTER_PORT": ""}, {"LOCAL_RANK": "x"}]
)
def test_variables_that_make_no_rank_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match="these variables do not describe a rank"):
        started_by(TORCHRUN | wrong, LaunchFlags())


def test_a_task_of_srun_that_sees_its_own_gpu_alone_takes_that() -> None:
    own = {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    devices = [
        slurm_environment(STEP | gpu, LaunchFlags())["LOCAL_RANK"]
        for gpu in (own, own | {"CUDA_VISIBLE_DEVICES": "0,1"})
    ]
    assert devices == ["0", "1"]
    assert (
        slurm_environment(STEP | {"RANK": "0", "WORLD_SIZE": "1"}, LaunchFlags())["RANK"] == "3"
    ), "a stale one"


def test_sruns_variables_become_torchs() -> None:
    nodes = {
        "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "gpu[07-09],login",
        "SLURM_CPUS_PER_TASK": "6",
    }
    ranks = slurm_environment(STEP | nodes, LaunchFlags())
    assert ranks == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": ranks["MASTER_PORT"],
        "OMP_NUM_THREADS": "6",
    }
    assert 20000 <= int(ranks["MASTER_PORT"]) < 30000
    assert (
        slurm_environment(STEP | nodes | {"SLURM_PROCID": "0"}, LaunchFlags())["MASTER_PORT"]
        == ranks["MASTER_PORT"]
    )


def test_what_the_user_set_stays_under_srun() -> None:
    given = {
        "MASTER_ADDR": "mine",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "2",
        "SLURM_CPUS_PER_TASK": "6",
    }
    ranks = slurm_environment(STEP | given, LaunchFlags())
    assert (ranks["MASTER_ADDR"], ranks["MASTER_PORT"], ranks["OMP_NUM_THREADS"]) == (
        "mine",
        "1",
        "2",
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_NTASKS", "2(x2"),
        ("SLURM_PROCID", "-1"),
        ("SLURM_NNODES", "1-2"),
    ],
)
def test_a_variable_of_slurm_that_is_no_number_is_named(name: str, text: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"not a number\n  where:  {name}\n  value:  {re.escape(text)}\n"
    ):
        slurm_environment(STEP | {name: text}, LaunchFlags())


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a,b", "a"),
        ("gpu[007-009,12],login", "gpu007"),
        ("rack[0-1]n[07-10],x", "rack0n07"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/unseen/name\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "nonsense"}, math.inf),
    ],
)
def test_a_containers_quota_of_cores(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    assert cpu_quota(tmp_path / "membership", tmp_path / "tree") == quota
    assert cpu_quota(tmp_path / "none", tmp_path / "tree") == math.inf


def test_several_machines_meet_as_with_torchrun() -> None:
    elastic = choose_rendezvous(
        LaunchFlags(nnodes="2:4", rdzv_endpoint="head:29400", rdzv_id="job"), {}
    )
    assert (elastic.rdzv_backend, elastic.min_nodes, elastic.max_nodes, elastic.run_id) == (
        "c10d",
        2,
        4,
        "job",
    )
    for given, endpoint in (("head", "head:29400"), ("[fd00::1]", "[fd00::1]:29400")):
        flags = LaunchFlags(nnodes="2", rdzv_endpoint=given)
        assert choose_rendezvous(flags, {}).rdzv_endpoint == endpoint
    assert [
        meet.max_restarts(asked)
        for meet in (elastic, choose_rendezvous(LaunchFlags(), {}))
        for asked in (None, 0, 5)
    ] == [3, 0, 5, 0, 0, 5]
    static = choose_rendezvous(LaunchFlags(nnodes="2", master_addr="head", node_rank=1), {})
    assert (static.rdzv_backend, static.rdzv_endpoint, static.node_rank) == (
        "static",
        "head:29500",
        1,
    )
    assert (
        choose_rendezvous(
            LaunchFlags(nnodes="2", master_addr="head"), {"SLURM_NODEID": "1"}
        ).node_rank
        == 1
    )


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (LaunchFlags(nnodes="2"), "--nnodes"),
        (LaunchFlags(nnodes="1:2", master_addr="head"), "--nnodes"),
        (LaunchFlags(nnodes="2", master_addr="head"), "--node-rank"),
        (LaunchFlags(nnodes="2", master_addr="head", node_rank=2), "--node-rank"),
        (LaunchFlags(node_rank=1), "--node-rank"),
        (LaunchFlags(nnodes="2", master_addr="head", node_rank=0, max_restarts=1), "--nnodes"),
        (LaunchFlags(nnodes="2", rdzv_endpoint="head:1", node_rank=0), "--node-rank"),
        (LaunchFlags(nnodes="2", rdzv_endpoint="head:port"), "--rdzv-endpoint"),
        (LaunchFlags(nnodes="2", rdzv_endpoint=":29400"), "--rdzv-endpoint"),
        (LaunchFlags(nnodes="2", rdzv_endpoint="fd00::1:29400"), "--rdzv-endpoint"),
    ],
)
def test_flags_that_contradict_each_other_or_say_too_little_are_refused(
    flags: LaunchFlags, where: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        choose_rendezvous(flags, {})
    assert raised.value.problems[0].where.startswith(where)


def test_more_gpus_than_there_are_is_an_error_with_a_hint() -> None:
    with pytest.raises(RecipeError, match="more ranks") as raised:
        count_ranks("3", 2, on_gpu=True)
    assert "3 (2 GPUs are visible)" in str(raised.value)
    with pytest.raises(RecipeError, match="no GPU"):
        count_ranks("gpu", 0, on_gpu=True)


def test_ranks_that_mpirun_started_are_refused_instead_of_training_alone() -> None:
    for environment in ({"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "2"}):
        with pytest.raises(RecipeError, match="mpirun"):
            started_by(environment, LaunchFlags())
    assert (
        started_by({"OMPI_COMM_WORLD_SIZE": "2"}, LaunchFlags(nproc_per_node="8", nnodes="2"))
        is None
    )
    assert started_by({"OMPI_COMM_WORLD_SIZE": "1"}, LaunchFlags()) is None
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert started_by({"OMPI_COMM_WORLD_SIZE": "2", **ranks}, LaunchFlags()) == "torchrun"


def test_a_step_of_several_machines_without_their_names_needs_the_first_ones() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(RecipeError, match="does not provide the nodes"):
        slurm_environment(step, LaunchFlags())
    assert slurm_environment(step, LaunchFlags(master_addr="head"))["MASTER_ADDR"] == "head"
    assert (
        slurm_environment(step | {"MASTER_ADDR": "there"}, LaunchFlags())["MASTER_ADDR"] == "there"
    )
