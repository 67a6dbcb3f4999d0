"""``ckpt-train --write-launcher``: what the scripts and manifests contain of a recipe, and what the scripts do."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import EXIT_DONE, EXIT_USAGE

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPE = """\
# A recipe with a comment 🙂.
model:
  from_pretrained: my-llama
dataset:
  _target_: automodel_ckpt.data.text.prompt_completion
  path: not-on-this-machine.jsonl
  seq_length: 64
step_scheduler:
  global_batch_size: 16
  local_batch_size: 1
  max_steps: 2
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My recipe.yaml").write_text(RECIPE)


def written(capsys: pytest.CaptureFixture[str], kind: str, *words: str) -> str:
    """What is printed for the recipe on two nodes with two ranks."""
    flags = ["--nnodes=2", "--nproc-per-node=2", f"--write-launcher={kind}"]
    assert main(["My recipe.yaml", *flags, *words]) == EXIT_DONE
    return capsys.readouterr().out


def documents(text: str) -> dict[str, Any]:
    """The objects of a manifest by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def run_script(directory: Path, text: str, code: int, **environment: str) -> tuple[int, list[str]]:
    """Run a batch script next to an `srun` that ends with *code*; its exit code, and the commands it called."""
    (directory / "train.sbatch").write_text(text)
    (directory / "bin").mkdir(exist_ok=True)
    answers = {"srun": f"exit {code}", "scontrol": '[ "$1" = requeue ] || echo node7'}
    for name, answer in answers.items():
        command = directory / "bin" / name
        command.write_text(
            f'#!/bin/bash\nprintf "<%s>" {name} "$@" >> calls\necho >> calls\n{answer}\n'
        )
        command.chmod(0o755)
    calls = directory / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "train.sbatch"],
        cwd=directory,
        env={
            "PATH": f"{directory}/bin:/usr/bin:/bin",
            "HOME": "/home/me",
            "VENV": "/my env",
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "node[7-8]",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


# Slurm


def test_a_script_for_slurm_requeues_a_job_that_saved_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(
        capsys, "slurm", "--trust=my_pkg", "--checkpoint.restore_from=a 'b' c", "--seed", "3"
    )
    start = "<srun><--kill-on-bad-exit=0></my env/bin/ckpt-train><My recipe.yaml>"
    start += "<--trust=my_pkg><--checkpoint.restore_from=a 'b' c><--seed=3>"
    assert run_script(tmp_path, text, 75) == (75, [start, "<scontrol><requeue><12345>"])
    for code in (0, 1, 2, 4):
        assert run_script(tmp_path, text, code) == (code, [start])
    task = run_script(tmp_path, text, 0, SLURM_ARRAY_TASK_ID="3")[1]
    assert task == [f"{start}<--run-name=task_3>"]


def test_a_script_for_slurm_gives_the_signal_the_time_of_a_save(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = written(capsys, "slurm", "--time-limit=1-02:00:00")
    lines = {line for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {
        "#SBATCH --job-name=my-recipe",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --time=1-02:00:00",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    } < lines
    on_cpu = written(
        capsys, "slurm", "--distributed.backend=gloo", "--step_scheduler.stop_signals=[SIGTERM]"
    )
    assert "#SBATCH --signal=TERM@" in on_cpu
    assert "gpu" not in on_cpu


def test_a_script_with_restarts_starts_a_launcher_on_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(capsys, "slurm", "--max-restarts=3", "--run-name=a")
    assert "#SBATCH --ntasks-per-node=1" in text
    _, calls = run_script(tmp_path, text, 0, SLURM_RESTART_COUNT="2", SLURM_ARRAY_TASK_ID="1")
    scontrol, srun = calls
    assert scontrol == "<scontrol><show><hostnames><node[7-8]>"
    words = srun.strip("<>").split("><")
    assert words[3:8] == [
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--nnodes=2",
        "--rdzv-endpoint=node7:22345",
        "--rdzv-id=12345-2",
    ]
    assert words[-1] == "--run-name=a_task_1", "the last one applies"


def test_variables_are_required_by_name_and_their_values_are_in_no_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_TOKEN", "hunter2hunter2")
    words = [
        "--checkpoint.remote.url=s3://b/${oc.env:STORE_TOKEN}",
        "--seed=${oc.env:SEED,1}",
        "--logging.trackers={wandb: {}}",
    ]
    texts = {kind: written(capsys, kind, *words) for kind in ("slurm", "k8s", "skypilot")}
    assert not any("hunter2" in text for text in texts.values())
    assert run_script(tmp_path, texts["slurm"], 0)[0] != 0
    assert run_script(tmp_path, texts["slurm"], 0, STORE_TOKEN="x")[0] == 0
    references = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]["optional"]
        for variable in container_of(documents(texts["k8s"]))["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert references == {
        "STORE_TOKEN": False,
        "SEED": True,
        "HF_TOKEN": True,
        "WANDB_API_KEY": True,
        "AWS_ACCESS_KEY_ID": True,
        "AWS_SECRET_ACCESS_KEY": True,
        "AWS_SESSION_TOKEN": True,
    }
    task = yaml.safe_load(texts["skypilot"])
    assert task["secrets"] == {"STORE_TOKEN": None}
    assert "CHECKPOINT_URL" not in task["envs"]
    assert "pip install '.[s3]' wandb" in task["setup"]


# Kubernetes


def container_of(objects: dict[str, Any]) -> dict[str, Any]:
    """The fields of the container of a TrainJob and its runtime."""
    [replicated] = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container | objects["TrainJob"]["spec"]["trainer"]


def test_pods_have_the_time_of_a_save_and_are_replaced_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--image=r.io/x:1", "--volume-claim=mine", "--checkpoint.checkpoint_dir=/data/runs"]
    objects = documents(written(capsys, "k8s", *words, "--checkpoint.restore_from=$(A)$$"))
    assert objects["ConfigMap"]["data"] == {"recipe.yaml": RECIPE}
    container = container_of(objects)
    [replicated] = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    trainer = objects["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    pod = job["template"]["spec"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 2}
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["restartPolicy"] == "Never", "a failure policy requires it"
    fail, ignore, evicted = job["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [2, 3, 4])
    assert (ignore["action"], ignore["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == (
        "Ignore",
        "DisruptionTarget",
    )
    assert container["image"] == "r.io/x:1"
    assert "--node-rank=$(PET_NODE_RANK)" in container["args"]
    # Kubernetes reads this as $(A)$$.
    assert "--checkpoint.restore_from=$$(A)$$$" in container["args"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/data/runs"] == {
        "name": "work",
        "mountPath": "/data/runs",
        "subPath": "data-runs",
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/dev/shm"]["name"] == "shared-memory"


@pytest.mark.parametrize("start", ["\n", "\n---\n", "# \u00e9\n", "#  \n\n"])
def test_a_manifest_has_the_text_of_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str
) -> None:
    text = start + RECIPE
    (tmp_path / "My recipe.yaml").write_text(text)
    assert documents(written(capsys, "k8s"))["ConfigMap"]["data"] == {"recipe.yaml": text}


# SkyPilot


def test_a_task_for_skypilot_needs_a_store_and_recovers_after_a_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load(written(capsys, "skypilot"))
    assert task["num_nodes"] == 2
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert task["resources"]["accelerators"].keys() >= {"H100"}
    assert task["envs"]["CHECKPOINT_URL"] is None, "SkyPilot then refuses to start without it"
    assert "file_mounts" not in task
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ckpt-train"
    command.write_text('#!/bin/bash\nprintf "<%s>" "$@"\n')
    command.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "CHECKPOINT_URL": "s3://b/my run",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "<--nproc-per-node=2><--nnodes=2><--node-rank=1><--master-addr=10.0.0.1><--master-port=29500>"
        "<My recipe.yaml><--checkpoint.remote.url=s3://b/my run>"
    )


def test_a_run_that_waits_for_uploads_has_time_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    url = "--checkpoint.remote.url=file:///store"
    wait = "--checkpoint.remote.wait_after_signal_seconds=600"
    assert "--signal=USR1@630" in written(capsys, "slurm", url, wait)


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--write-launcher=slrum"], "use slurm, k8s, skypilot"),
        (["--output=x"], "--output requires --write-launcher"),
        (["--write-launcher=k8s", "--time-limit=1:0:0"], "--time-limit is used only with"),
        (["--write-launcher=slurm", "--time-limit=soon"], "--time-limit must be"),
        (["--write-launcher=slurm", "--time-limit=00:09:59"], "the time limit is too short"),
        (["--write-launcher=slurm", "--nnodes=2:4"], "needs a number"),
        (["--write-launcher=slurm", "--rdzv-id=a"], "determines --rdzv-id"),
        (["--write-launcher=slurm", "--nnodes=3"], "must be a multiple of"),
        (["--write-launcher=slurm", "--output=My recipe.yaml"], "the launcher cannot be written"),
    ],
)
def test_mistakes_are_reported(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["My recipe.yaml", *words]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert (tmp_path / "My recipe.yaml").read_text() == RECIPE


@pytest.mark.parametrize(
    ("kind", "name"), [("k8s", "kubernetes/trainjob.yaml"), ("skypilot", "skypilot/train.yaml")]
)
def test_the_examples_are_what_the_command_writes(
    kind: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    recipe = "examples/llm_finetune/qwen3/qwen3_8b_chat_fsdp2_tp.yaml"
    words = ["--nnodes=2", "--nproc-per-node=8", f"--write-launcher={kind}"]
    assert main([recipe, *words]) == EXIT_DONE
    assert capsys.readouterr().out == (EXAMPLES / name).read_text()


def test_an_escaped_reference_is_text_and_no_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "My recipe.yaml").write_text(
        RECIPE
        + "checkpoint: {checkpoint_dir: 'runs\\${oc.env:A:=`touch PWN`}'}\n"
        + "model: {from_pretrained: 'a\\${oc.env:B,$(touch PWN)}'}\n".replace(
            "model: ", "tokenizer: "
        )
    )
    text = written(capsys, "slurm")
    assert ":=`" not in text.replace("# ", "#").partition("#SBATCH")[2]
    assert run_script(tmp_path, text, 0)[0] == 0
    assert not (tmp_path / "PWN").exists()
    for kind in ("k8s", "skypilot"):
        assert "touch PWN" not in json.dumps(
            list(yaml.safe_load_all(written(capsys, kind)))
        ).replace(json.dumps((tmp_path / "My recipe.yaml").read_text()), "")


def test_a_reference_with_another_name_of_a_variable_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("A:=`touch PWN`", "A B", "1A", "A-B", "\u00c4", "${oc.env:HOME}"):
        words = [f"--checkpoint.checkpoint_dir=runs/${{oc.env:{name}}}", "--write-launcher=slurm"]
        assert main(["My recipe.yaml", *words]) == EXIT_USAGE
        assert "interpolation" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["slurm", "k8s", "skypilot"])
@pytest.mark.parametrize("character", ["\n", "\r", "\x85", "\u2028", "\x1b"])
def test_a_launcher_has_only_printable_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, character: str
) -> None:
    before = len(list(yaml.safe_load_all(written(capsys, kind)))) if kind != "slurm" else 0
    hostile = f"{character}---{character}kind: Pod{character}touch PWN #"
    recipe = f"{RECIPE}checkpoint: {{checkpoint_dir: {json.dumps('runs' + hostile)}}}\n# \u202e\n"
    (tmp_path / "My recipe.yaml").write_text(recipe, encoding="utf-8")
    text = written(capsys, kind, f"--checkpoint.restore_from=a{hostile}", "--output=a\u2028b")
    text += (tmp_path / "a\u2028b").read_text(encoding="utf-8")
    text = text.partition("\n")[2]
    assert all(line.isprintable() for line in text.split("\n"))
    if kind == "slurm":
        assert run_script(tmp_path, text, 0)[0] == 0
        assert not (tmp_path / "PWN").exists()
        calls = (tmp_path / "calls").read_bytes().decode()
        assert f"<--checkpoint.restore_from=a{hostile}>" in calls
    else:
        made = list(yaml.safe_load_all(text))
        assert len(made) == before
        assert "Pod" not in [each.get("kind") for each in made]
