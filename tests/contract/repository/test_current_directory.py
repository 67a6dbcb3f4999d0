"""No process of a run imports or runs what lies in the current directory, next to a recipe that names no code."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import automodel_ckpt
from tests.support.servers.hub_server import hub_server
from tests.support.servers.object_store import object_store

PACKAGE = Path(automodel_ckpt.__file__).parent
BINARIES = Path(sys.executable).parent
RECIPE = """\
model:
  from_config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
    intermediate_size: 16, vocab_size: 64}
dataset: {_target_: automodel_ckpt.examples.data.mock.random_tokens, vocab_size: 64, seq_length: 8, num_samples: 16}
dataloader: {num_workers: 1}
distributed: {backend: gloo}
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 2, ckpt_every_steps: 1}
checkpoint:
  checkpoint_dir: run
  is_async: true
  save_consolidated: false
  memory: {every_steps: 1, directory: memory}
  remote: {url: "s3://bucket/run", required: true}
hub: {repo: org/model, push: every, required: true}
logging: {trackers: {tensorboard: {}}}
"""
RECORD = """\
import posix
descriptor = posix.open({log!r}, posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND)
posix.write(descriptor, (__name__ + "\\n").encode())
"""
LIBRARIES = (
    *("torch", "transformers", "tensorboard", "numpy", "datasets", "peft", "safetensors", "yaml"),
    *("s3fs", "botocore", "huggingface_hub", "httpx", "fsspec", "omegaconf"),
)
TORCHRUN_TOOL = """
import os
open(f"exported_{os.environ['RANK']}", "w").close()
"""
MODULES = ("subprocess", "runpy", "multiprocessing")
STARTS = (
    *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check"),
    *("subprocess.get", "os.system", "os.popen", "os.exec", "os.spawn", "os.posix_spawn", "runpy."),
    *("asyncio.create_subprocess", "multiprocessing.get_context", "multiprocessing.set_start"),
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with a module for each name of the standard library and of some packages, and a hostile .git."""
    directory, log = tmp_path / "downloaded", tmp_path / "executed"
    directory.mkdir()
    subprocess.run(["git", "init", "--quiet", directory], check=True)
    with (directory / ".git/config").open("a") as config:
        config.write(f'[core]\n\tfsmonitor = "echo git >> {log}; false"\n')
    for name in {*sys.stdlib_module_names, *LIBRARIES}:
        (directory / f"{name}.py").write_text(RECORD.format(log=str(log)))
    (directory / "recipe.yaml").write_text(RECIPE)
    (directory / "memory").mkdir()
    (directory / "tool").mkdir()
    (directory / "tool/consolidation.py").write_text(TORCHRUN_TOOL)
    return directory


def run(directory: Path, environment: dict[str, str], *words: str | Path) -> str:
    done = subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=170
    )
    executed = directory.parent / "executed"
    assert not executed.exists(), (words, sorted(set(executed.read_text().split())))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_nothing_in_the_current_directory_is_executed(hostile: Path) -> None:
    dropped = {"PYTHONPATH", "PYTHONSAFEPATH", "HF_HUB_OFFLINE"}
    base = {name: value for name, value in os.environ.items() if name not in dropped}
    with object_store() as store, hub_server() as hub:
        here = base | store.environment | hub.environment(str(hostile.parent / "home"))
        run(hostile, here, BINARIES / "ckpt-train", "recipe.yaml", "--nproc-per-node", "2")
        assert store.requests and "step-1" in str(hub.repository("org/model").branches)
    assert list(hostile.glob("run/tensorboard/*"))
    script = hostile / "run/LATEST/model/consolidate.sh"
    run(hostile, base | {"NPROC_PER_NODE": "2"}, "bash", script)
    assert (script.parent / "consolidated/model.safetensors.index.json").exists()
    tool = {"NPROC_PER_NODE": "2", "CONSOLIDATION_TOOL": "tool/consolidation.py"}
    run(hostile, base | tool, "bash", script)
    assert (hostile / "exported_0").exists() and (hostile / "exported_1").exists()


def starts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the calls and imports in a module that start a process other than by a plain fork."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.module
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            is_start = name.startswith(STARTS)
            if is_start and ast.unparse(node) != "multiprocessing.get_context('fork')":
                yield name


def test_one_module_starts_python() -> None:
    starts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        names_one = any(word in text for word in ("os.", "asyncio", *MODULES))
        if names_one and (found := set(starts_of(ast.parse(text)))):
            starts[path.relative_to(PACKAGE).as_posix()] = found
    assert starts == {
        "base/python_child.py": {"subprocess.Popen"},
        "base/terminal.py": {"os.execve"},  # the same command again, in another mode
        "checkpoint/parts/manifest.py": {"subprocess.run"},  # git
        "cli/commands/env.py": {"subprocess.run"},  # git, nvidia-smi
    }
    for path in ("checkpoint/parts/manifest.py", "cli/commands/env.py"):
        assert (PACKAGE / path).read_text().count("sys.executable") == 1, "it is only reported"
