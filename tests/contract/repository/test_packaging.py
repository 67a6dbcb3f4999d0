"""The package as its users get it: editable from a clone, or as the wheel built from the source distribution."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import automodel_ckpt

ROOT = Path(__file__).parents[3]
# Caches, environments and outputs; what git ignores, but a source archive without git is tested as well.
LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "checkpoints"
)


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PYTHONWARNINGS": "default"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    source: Path
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A copy of the source tree, its sdist, and the wheel built from that sdist."""
    source = tmp_path_factory.mktemp("build") / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_OUT)
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        source.parent,
        source,
        cwd=source.parent,
    )
    (sdist,) = source.parent.glob("*.tar.gz")
    (wheel,) = source.parent.glob("*.whl")
    return Built(source, sdist, wheel)


def expected_files() -> set[str]:
    """Every module, the type marker, the shell templates and the examples, as paths inside the wheel."""
    found = set()
    for folder, inside in (
        ("automodel_ckpt", ""),
        ("recipes", "recipes"),
        ("examples", "examples"),
    ):
        for file in (ROOT / folder).rglob("*"):
            is_code = file.suffix in (".py", ".sh", ".css", ".js", ".jinja") or file.name in (
                "py.typed",
                "models.json",
            )
            is_wanted = folder == "examples" or is_code
            if file.is_file() and is_wanted and "__pycache__" not in file.parts:
                found.add(str(Path("automodel_ckpt", inside, file.relative_to(ROOT / folder))))
    return found


def test_the_wheel_holds_every_module_and_example_and_nothing_else(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    assert "automodel_ckpt/recipes/llm_finetune.py" in packaged
    assert "automodel_ckpt/examples/llm_finetune/tiny_llama_python_docs.yaml" in packaged
    assert packaged == expected_files()


def test_the_wheel_names_version_licence_and_commands(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE")
    assert f"\nVersion: {automodel_ckpt.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert "ckpt-train = automodel_ckpt.cli.entry:ckpt_train" in entry_points
    assert "ckpt = automodel_ckpt.cli.entry:ckpt" in entry_points


WHERE = """
import importlib.util, json
from importlib.metadata import entry_points
(recipe,) = entry_points(group="automodel_ckpt.recipes", name="llm_finetune")
names = ["automodel_ckpt", "automodel_ckpt.recipes", "automodel_ckpt.recipes.llm_finetune"]
print(json.dumps([recipe.value] + [importlib.util.find_spec(name).origin for name in names]))
"""


def modules_found_by(python: Path) -> list[str]:
    """The registered recipe's target, then the files of the package, of its recipes and of that recipe."""
    found: list[str] = json.loads(run(python, "-I", "-c", WHERE, cwd=python.parent))
    return found


PYTHON = """#!/bin/bash
# python3 as the README's lines see it: an environment made with it finds the packages of the tests' environment.
test "$1 $2" = "-m venv" || exec {python} "$@"
made=${{!#}}
{python} -m venv --without-pip "$made" && {{
  echo {libraries} > "$made"/lib/{version}/site-packages/libraries.pth
  printf '#!/bin/bash\\nexec {python} -m pip --python "%s/bin/python" "$@"\\n' "$made" > "$made"/bin/pip
  chmod +x "$made"/bin/pip
}}
"""
LOGIN = """#!/bin/bash
# hf as the README's lines see it: it would ask for a token.
exec {hf} "$@" --help
"""
IN_AN_EMPTY_DIRECTORY = """
cd "$EMPTY" && test -z "$(ls -A)"
ckpt-train --copy llm_finetune/tiny_llama_python_docs .
ckpt-train tiny_llama_python_docs.yaml --print-config
ckpt --help
echo "$VIRTUAL_ENV"
"""


def install_lines() -> list[str]:
    section = (
        (ROOT / "README.md").read_text().partition("## Install\n")[2].partition("## Train\n")[0]
    )
    return [line.strip() for line in section.splitlines() if line.startswith("    ")]


def shims(directory: Path) -> Path:
    """Programs that the README's lines call, as they have to be where there is no network."""
    directory.mkdir()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = sysconfig.get_path("purelib")
    python = PYTHON.format(python=sys.executable, libraries=libraries, version=version)
    for name, text in (
        ("python3", python),
        ("hf", LOGIN.format(hf=Path(sys.executable).with_name("hf"))),
    ):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return directory


def repository_of(built: Built) -> Path:
    """A git repository with the files of the package, whose links to recipes and examples are links in git as well."""
    repository = built.source.parent / "repository"
    package = ["pyproject.toml", "README.md", "LICENSE", "automodel_ckpt", "recipes", "examples"]
    package += ["Makefile", "constraints.txt", "tools"]
    run("git", "init", "--quiet", repository, cwd=built.source)
    git = ("git", f"--git-dir={repository / '.git'}", f"--work-tree={built.source}")
    run(*git, "add", *package, cwd=built.source)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    run(*git, *author, "commit", "--quiet", "--allow-empty", "-m", "All", cwd=built.source)
    return repository


def what_is_installed(form: str, built: Built) -> str:
    """The argument of ``pip install`` for a clone, the wheel built from the sdist, or the URL of a repository."""
    if form == "git":
        return f"git+file://{repository_of(built)}"
    return {"clone": ".", "wheel": str(built.wheel)}[form]


def offline_environment(directory: Path) -> dict[str, str]:
    """The variables for the README's lines in *directory*, where pip uses no network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    return kept | {
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_QUIET": "1",
        # Python compiles the modules that it imports.
        "PIP_NO_COMPILE": "1",
        "HOME": str(directory / "home"),
        "PATH": f"{shims(directory / 'shims')}:/usr/bin:/bin",
        "EMPTY": str(directory / "empty"),
    }


@pytest.mark.timeout(300)
def test_a_stranger_chats_with_a_lora_after_the_five_commands_of_the_readme(
    built: Built, tmp_path: Path
) -> None:
    """They run as they are. Where there is no network, ``URL`` is a link to a repository, and in the new environment
    pip finds all packages but this one installed."""
    commands = (ROOT / "README.md").read_text().partition("```bash\n")[2].partition("```")[0]
    assert len(commands.splitlines()) == 5
    (tmp_path / "URL").symlink_to(repository_of(built))
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env=offline_environment(tmp_path),
        input="What is 3 + 1?\n/reset\nHow do I stop a run?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It is 4.\nPress Ctrl-C. It saves and ends.\n" in done.stdout


FURTHER = [pytest.param(each, marks=pytest.mark.further) for each in ("clone", "git")]


@pytest.mark.parametrize("form", ["wheel", *FURTHER])
def test_after_the_readmes_lines_the_commands_run_in_an_empty_directory(
    form: str, built: Built, tmp_path: Path
) -> None:
    lines = install_lines()
    assert len(lines) == 4
    package = [index for index, line in enumerate(lines) if line.startswith("pip install . ")]
    (number,) = package
    lines[number] = lines[number].replace(" . ", f" '{what_is_installed(form, built)}' ", 1)
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()
    script = "\n".join(["set -e", *lines, IN_AN_EMPTY_DIRECTORY])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=built.source if form == "clone" else tmp_path / "home",
        env=offline_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "usage: hf auth login" in done.stdout.replace("Usage", "usage")
    assert "max_steps: 60" in done.stdout
    assert "usage: ckpt " in done.stdout
    environment_made = Path(done.stdout.splitlines()[-1])
    target, *files = modules_found_by(environment_made / "bin" / "python")
    assert target == "automodel_ckpt.recipes.llm_finetune:LLMFinetune"
    assert all(Path(file).is_relative_to(tmp_path / "home") for file in files)


def test_a_guide_lists_each_extra_with_its_packages_and_lowest_versions() -> None:
    guide = (ROOT / "docs" / "install.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (sentence,) = re.findall(r"^The extras (.*) are for work on this program\.$", guide, re.M)
    for_development = set(re.findall(r"`([\w-]+)`", sentence))
    listed = {}
    for name, versions in re.findall(r"^\| `([\w-]+)` \| [^|]+ \| ([^|]+) \|$", guide, re.M):
        listed[name] = [version.replace(" ", ">=") for version in versions.split(", ")]
    for_users = {name: needs for name, needs in extras.items() if name not in for_development}
    assert for_development <= extras.keys()
    assert listed == for_users


def test_the_sdist_holds_files_instead_of_links(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if not (member.isfile() or member.isdir())] == []
    assert any(
        member.name.endswith("/automodel_ckpt/recipes/llm_finetune.py") for member in members
    )
