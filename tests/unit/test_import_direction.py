"""Who may import whom (docs/design.md), and which modules must stay light enough to answer before torch is loaded."""

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import automodel_ckpt

PACKAGE = Path(automodel_ckpt.__file__).parent

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "base": {"errors"},
    "config": {"base", "errors"},
    "parallel": {"base", "config", "errors"},
    "checkpoint": {"base", "errors", "parallel.ranks"},
    "data": {"base", "checkpoint.sources", "errors"},
    "models": {"base", "checkpoint.files", "checkpoint.sources", "errors"},
    "optim": {"base", "checkpoint.files", "errors"},
    "loss": {"base", "errors"},
    "logs": {"base", "checkpoint", "errors"},
    "convert": {"base", "checkpoint", "errors"},
    "hub": {"base", "checkpoint", "config", "errors", "logs"},
    "training": {
        "base",
        "checkpoint",
        "config",
        "convert",
        "data",
        "errors",
        "hub",
        "logs",
        "loss",
        "models",
        "optim",
        "parallel",
    },
    "recipes": {
        "base",
        "checkpoint",
        "config",
        "data",
        "errors",
        "loss",
        "models",
        "parallel",
        "training",
    },
    "cli": {
        "base",
        "checkpoint",
        "config",
        "convert",
        "data",
        "errors",
        "hub",
        "logs",
        "models",
        "optim",
        "parallel",
        "training",
    },
    "consolidate": {"base", "cli", "errors"},
    "api": {"base", "checkpoint", "config", "errors", "parallel"},
    "integrations": {"base", "checkpoint", "errors"},
}
"""Package (or module at the top) to the packages that it may import, as docs/design.md has them; lowest first."""

HEAVY = ["torch", "transformers", "datasets", "peft", "accelerate"]
LIGHT = [
    "",
    "errors",
    "consolidate",
    "base.units",
    "base.user_code",
    "base.store_url",
    "base.durable_io",
    "base.hub_access",
    "checkpoint",
    "checkpoint.options",
    "checkpoint.export",
    "checkpoint.files",
    "checkpoint.parts.commit",
    "checkpoint.parts.manifest",
    "checkpoint.parts.slices",
    "checkpoint.parts.verify",
    "checkpoint.remote",
    "checkpoint.run.directory",
    "checkpoint.run.resume",
    "checkpoint.sources",
    "checkpoint.state.display",
    "checkpoint.store",
    "checkpoint.tensors",
    "cli",
    "cli.checks",
    "cli.cluster",
    "cli.commands",
    "cli.common",
    "cli.launch",
    "cli.targets",
    "config",
    "config.callables",
    "config.help",
    "config.keys",
    "config.tree",
    "convert",
    "convert.formats",
    "convert.formats.gguf",
    "convert.imports",
    "convert.merging",
    "convert.targets",
    "data.rows.source",
    "hub",
    "logs.charts",
    "logs.goodput",
    "logs.page",
]
"""Modules, or packages with all their modules, that load none of HEAVY; relative to the package."""


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every module or name of the package that *nodes* import: `checkpoint.slices.Slice`."""
    prefix = automodel_ckpt.__name__ + "."
    for node in nodes:
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


def forbidden(package: str, tree: ast.Module) -> list[str]:
    allowed = MAY_IMPORT[package] | {package}
    return [
        name
        for name in imported_modules(ast.walk(tree))
        if not any(name == a or name.startswith(a + ".") for a in allowed)
    ]


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


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file of the package, by its path relative to it."""
    return {file.relative_to(PACKAGE): ast.parse(file.read_text()) for file in package_files()}


def test_imports_follow_the_dependency_direction(trees: dict[Path, ast.Module]) -> None:
    found = {}
    for file, tree in trees.items():
        package = file.parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        assert package in MAY_IMPORT, (
            f"new package {package}: add it to MAY_IMPORT and docs/design.md"
        )
        if names := forbidden(package, tree):
            found[str(file)] = names
    assert found == {}


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("checkpoint", "from automodel_ckpt.config.schema import RecipeConfig"),
        ("checkpoint", "from automodel_ckpt.parallel import mesh"),
        ("config", "import automodel_ckpt.checkpoint.files.layout"),
        ("recipes", "def f():\n    from automodel_ckpt.cli.train import main"),
        ("errors", "from automodel_ckpt import config"),
    ],
)
def test_an_import_against_the_direction_is_found(package: str, line: str) -> None:
    assert forbidden(package, ast.parse(line))


def test_no_two_packages_may_import_each_other() -> None:
    def importable(package: str) -> set[str]:
        return {name.split(".")[0] for name in MAY_IMPORT[package]}

    mutual = [(a, b) for a in MAY_IMPORT for b in importable(a) if a in importable(b)]
    assert mutual == []


def test_what_the_direction_allows_is_not_reported() -> None:
    for package, line in (
        ("checkpoint", "from automodel_ckpt.parallel.ranks.agree import gather"),
        ("cli", "from automodel_ckpt.training.recipe import Recipe"),
    ):
        assert forbidden(package, ast.parse(line)) == []


def top_imports(tree: ast.Module, modules: Container[str]) -> set[str]:
    """The *modules* that a file imports when it is imported itself."""
    statements = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    found = set()
    for name in imported_modules(statements):
        found.add(name if name in modules else name.rpartition(".")[0])
    return {name for name in found if name in modules}


def test_no_module_imports_itself_through_others(trees: dict[Path, ast.Module]) -> None:
    modules = {
        ".".join(file.with_suffix("").parts): tree
        for file, tree in trees.items()
        if file.stem != "__init__"
    }
    sorter = TopologicalSorter({name: top_imports(tree, modules) for name, tree in modules.items()})
    sorter.prepare()  # raises CycleError


def test_a_folder_has_at_most_twenty_files_and_recipes_nothing_but_recipes() -> None:
    sizes = Counter(file.parent.relative_to(PACKAGE) for file in package_files())
    assert {str(folder): size for folder, size in sizes.items() if size > 20} == {}
    assert sizes[Path("recipes")] <= 16


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


def printed(script: str, *arguments: str) -> Any:
    """What a *script* prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    found = printed(script, json.dumps([light_modules(), HEAVY]))
    assert {name: heavy for name, heavy in found.items() if heavy} == {}


def test_the_checkpointer_loads_torch_only() -> None:
    script = (
        "from automodel_ckpt import Checkpointer\n"
        "import json, sys\n"
        "print(json.dumps(list(sys.modules)))\n"
    )
    assert {*HEAVY, "omegaconf"}.intersection(printed(script)) == {"torch"}
