"""Who may import whom (docs/design.md), and which modules must stay light enough to answer before torch is loaded."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import automodel_ckpt

PACKAGE = Path(automodel_ckpt.__file__).parent

MAY_IMPORT = {
    "errors": set(),
    "units": set(),
    "git_lfs": set(),
    "other_weights": set(),
    "durable_io": set(),
    "seeds": set(),
    "forks": set(),
    "hub_access": {"errors"},
    "hub_retries": set(),
    "user_code": {"errors"},
    "user_cache": set(),
    "device_copies": set(),
    "kernel_trial": set(),
    "python_child": set(),
    "socket_paths": {"errors"},
    "store_url": {"errors", "user_cache"},
    "bounded_templates": {"errors"},
    "config": {"errors", "user_code", "store_url", "hub_access"},
    "distributed": {"errors"},
    "models": {
        "errors",
        "bounded_templates",
        "hub_access",
        "units",
        "git_lfs",
        "other_weights",
        "durable_io",
        "device_copies",
        "kernel_trial",
        "checkpoint.files.bounded_json",
        "checkpoint.files.safe_open",
        "checkpoint.files.weight_map",
        "checkpoint.sources.model_files",
    },
    "data": {
        "errors",
        "bounded_templates",
        "units",
        "user_code",
        "user_cache",
        "durable_io",
        "seeds",
        "forks",
        "hub_access",
        "checkpoint.sources.model_files",
    },
    "checkpoint": {
        "errors",
        "units",
        "git_lfs",
        "other_weights",
        "user_code",
        "store_url",
        "durable_io",
        "forks",
        "python_child",
        "distributed.agree",
        "distributed.node_address",
    },
    "training": {
        "errors",
        "units",
        "durable_io",
        "device_copies",
        "kernel_trial",
        "seeds",
        "python_child",
        "checkpoint.files.bounded_json",
        "checkpoint.files.safe_open",
        "checkpoint.layout",
        "checkpoint.run.timeline",
    },
    "convert": {"errors", "units", "git_lfs", "other_weights", "durable_io", "checkpoint"},
    "report": {"errors", "units", "checkpoint"},
    "recipes": {
        "errors",
        "hub_retries",
        "device_copies",
        "hub_access",
        "units",
        "git_lfs",
        "other_weights",
        "user_cache",
        "store_url",
        "seeds",
        "config",
        "distributed",
        "models",
        "data",
        "training",
        "checkpoint",
        "convert",
        "hub",
    },
    "hub": {
        "errors",
        "units",
        "durable_io",
        "hub_access",
        "hub_retries",
        "config",
        "checkpoint",
        "report",
    },
    "integrations": {"errors", "training", "checkpoint"},
    "api": {"errors", "socket_paths", "config", "distributed", "checkpoint", "recipes"},
    "cli": {
        "errors",
        "units",
        "forks",
        "python_child",
        "socket_paths",
        "user_code",
        "user_cache",
        "store_url",
        "config",
        "distributed",
        "models",
        "data",
        "training",
        "checkpoint",
        "convert",
        "report",
        "recipes",
        "hub",
        "hub_access",
    },
    "consolidate": {"errors", "cli"},
}
"""Package (or module at the top) to the packages that it may import; its own modules are always allowed."""

CHECKPOINT_ORDER = (
    {
        "threads",
        "digests",
        "discovery",
        "dtypes",
        "failures",
        "layout",
        "policy",
        "slices",
        "tiling",
        "collective_errors",
        "collector",
    },
    {"files"},
    {"json_values", "manifest_file", "sharding"},
    {"slice_columns", "slice_table", "tree"},
    {"manifest_consistency"},
    {"manifest"},
    {"commit", "merkle", "export_leftovers", "export_manifest", "verify"},
    {"options", "arguments", "library_terms"},
    {"run"},
    {"remote"},
    {"memory"},
    {"tensors"},
    {"sources"},
    {"export"},
    {"writing"},
    {"formats", "tensor_bytes"},
    {"module_tensors"},
    {"hf_assets", "state"},
    {"saving"},
    {"loader", "node_directories", "transfers"},
    {"checkpointer"},
)
"""The packages and modules of checkpoint/, lowest layer first. Each imports its own line and the lines before it."""

HEAVY = ["torch", "transformers", "datasets", "peft", "accelerate"]
LIGHT = [
    "",
    "errors",
    "units",
    "user_code",
    "user_cache",
    "store_url",
    "durable_io",
    "hub_access",
    "hub_retries",
    "consolidate",
    "convert",
    "convert.checkpoint_archive",
    "convert.gguf",
    "convert.sources",
    "convert.targets",
    "checkpoint",
    "checkpoint.layout",
    "checkpoint.slices",
    "checkpoint.tiling",
    "checkpoint.manifest",
    "checkpoint.slice_table",
    "checkpoint.files.safetensors_header",
    "checkpoint.tensors",
    "checkpoint.sources",
    "checkpoint.export",
    "checkpoint.writing",
    "checkpoint.run.directory",
    "checkpoint.state.display",
    "checkpoint.commit",
    "checkpoint.policy",
    "checkpoint.verify",
    "checkpoint.options",
    "cli",
    "cli.commands",
    "cli.checks",
    "cli.launch",
    "config",
    "hub",
    "report",
]
"""Modules, or packages with all their modules, that load none of HEAVY; relative to the package."""


def imported_modules(source: str) -> Iterator[str]:
    """Every module or name of the package that a file imports, anywhere in it: `checkpoint.slices.Slice`."""
    prefix = automodel_ckpt.__name__ + "."
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"line {node.lineno}: relative import; this package imports by full names"
            )
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (
            name.removeprefix(prefix)
            for name in names
            if name.startswith(prefix) and "__version__" not in name
        )


def forbidden(package: str, source: str) -> list[str]:
    allowed = MAY_IMPORT[package] | {package}
    return [
        name
        for name in imported_modules(source)
        if not any(name == a or name.startswith(a + ".") for a in allowed)
    ]


def against_the_order(module: str, source: str) -> list[str]:
    """What a *module* of checkpoint/ (``files.durable``) imports that stands after it in CHECKPOINT_ORDER."""
    level = {name: number for number, names in enumerate(CHECKPOINT_ORDER) for name in names}
    within = [
        name.split(".")[1:] for name in imported_modules(source) if name.startswith("checkpoint.")
    ]
    return [".".join(name) for name in within if level[name[0]] > level[module.split(".")[0]]]


def package_files() -> list[Path]:
    """Every Python file of the package, recipes included (`rglob` alone would not follow the symlink)."""
    packages = [
        package for package in PACKAGE.iterdir() if package.is_dir() and package.name != "examples"
    ]
    nested = (
        package / file.relative_to(package.resolve())
        for package in packages
        for file in package.resolve().rglob("*.py")
    )
    return sorted({*PACKAGE.glob("*.py"), *nested})


@pytest.mark.parametrize("file", package_files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_follow_the_dependency_direction(file: Path) -> None:
    package = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    assert package in MAY_IMPORT, f"new package {package}: add it to MAY_IMPORT and docs/design.md"
    assert forbidden(package, file.read_text()) == []
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts[1:])
    if package == "checkpoint" and module != "__init__":
        assert against_the_order(module, file.read_text()) == []


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("checkpoint", "from automodel_ckpt.config.schema import RecipeConfig"),
        ("checkpoint", "from automodel_ckpt.distributed import mesh"),
        ("config", "import automodel_ckpt.checkpoint.layout"),
        ("recipes", "def f():\n    from automodel_ckpt.cli.train import main"),
        ("errors", "from automodel_ckpt import config"),
    ],
)
def test_an_import_against_the_direction_is_found(package: str, line: str) -> None:
    assert forbidden(package, line)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("files.durable_file", "from automodel_ckpt.checkpoint.manifest import Manifest"),
        ("layout", "from automodel_ckpt.checkpoint.files import durable_file"),
        (
            "export.plan",
            "def f():\n    from automodel_ckpt.checkpoint.saving.save import SaveReport",
        ),
        ("module_tensors", "import automodel_ckpt.checkpoint.checkpointer"),
    ],
)
def test_an_import_against_the_order_within_checkpoint_is_found(module: str, line: str) -> None:
    assert against_the_order(module, line)


def test_no_two_packages_may_import_each_other() -> None:
    def importable(package: str) -> set[str]:
        return {name.split(".")[0] for name in MAY_IMPORT[package]}

    mutual = [(a, b) for a in MAY_IMPORT for b in importable(a) if a in importable(b)]
    assert mutual == []


def test_what_the_direction_allows_is_not_reported() -> None:
    assert forbidden("checkpoint", "from automodel_ckpt.distributed.agree import gather") == []
    assert forbidden("cli", "from automodel_ckpt.recipes.llm_finetune import LLMFinetune") == []
    assert (
        against_the_order("saving.planner", "from automodel_ckpt.checkpoint import commit, layout")
        == []
    )
    assert (
        against_the_order(
            "export.consolidate", "from automodel_ckpt.checkpoint.export.plan import Plan"
        )
        == []
    )


def light_modules() -> list[str]:
    names = set()
    for name in LIGHT:
        path = PACKAGE.joinpath(*name.split("."))
        if path.is_dir() and name not in ("", "checkpoint"):
            names.update(
                f"{name}.{file.stem}" for file in path.glob("*.py") if file.stem != "__init__"
            )
        names.add(name)
    return [".".join(filter(None, ("automodel_ckpt", name))) for name in sorted(names)]


def test_light_modules_load_no_torch() -> None:
    script = (
        "import importlib, json, sys\n"
        "names, heavy = json.loads(sys.argv[1])\n"
        "found = {}\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "    found[name] = [h for h in heavy if h in sys.modules]\n"
        "print(json.dumps(found))\n"
    )
    arguments = json.dumps([light_modules(), HEAVY])
    done = subprocess.run(
        [sys.executable, "-c", script, arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {name: heavy for name, heavy in json.loads(done.stdout).items() if heavy} == {}


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("automodel_ckpt.cli.train", ["--help"]),
        (
            "automodel_ckpt.cli.train",
            ["--print-config", "examples/llm_finetune/tiny_llama_python_docs.yaml"],
        ),
        ("automodel_ckpt.cli.ckpt", ["--help"]),
    ],
    ids=["ckpt-train --help", "ckpt-train --print-config", "ckpt --help"],
)
def test_help_and_print_config_answer_in_under_a_second_without_torch(
    module: str, arguments: list[str]
) -> None:
    script = (
        "import importlib, sys\n"
        "main = importlib.import_module(sys.argv[1]).main\n"
        "try:\n"
        "    code = main(sys.argv[2:])\n"
        "except SystemExit as stop:\n"
        "    code = stop.code\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)\n"
    )
    command = [sys.executable, "-c", script, module, *arguments]
    seconds: list[float] = []
    # Processor time of the fastest start: about 0.2 seconds, more on a busy machine.
    while not seconds or (seconds[-1] > 1 and len(seconds) < 5):
        before = os.times()
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent
        )
        after = os.times()
        user = after.children_user - before.children_user
        seconds.append(user + after.children_system - before.children_system)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 10
    assert min(seconds) < 1
