"""The versions that the project declares are those that it installs and tests."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TOOLS = {
    "accelerate",
    "build",
    "hypothesis",
    "jsonschema",
    "moto",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "scikit-learn",
    "scipy",
}


def pins(name: str) -> dict[str, str]:
    """Package -> version in a file of constraints."""
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {package.lower(): version for package, version in pairs}


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def minimums(requirements: list[str]) -> dict[str, str]:
    """Package -> lowest allowed version of requirements such as ``transformers>=5.17,<6``."""
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w-]+)>=([\w.]+)(?:,<\d+)?", requirement)
        assert match, f"{requirement} has no lowest version"
        found[match[1].lower()] = match[2]
    return found


def release(version: str) -> tuple[int, ...]:
    """Numbers of a version without zeros at the end: 5.17 and 5.17.0 are one version."""
    return tuple(int(number) for number in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_oldest_constraints_are_the_declared_minimums() -> None:
    extras = project()["optional-dependencies"]
    optional: list[str] = []
    for extra in ("archive", "compressed-tensors", "gguf", "onnx", "s3", "vision"):
        optional += extras[extra]
    declared = minimums(project()["dependencies"] + optional)
    pinned = pins("constraints-oldest.txt")
    oldest = {
        package: version
        for package, version in pinned.items()
        if package not in TOOLS | {"torchvision", "onnxruntime", "aiobotocore", "boto3"}
    }
    assert {package: release(version) for package, version in oldest.items()} == {
        package: release(version) for package, version in declared.items()
    }


def test_the_oldest_constraints_use_the_tested_versions_of_the_tools() -> None:
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    assert {tool: oldest[tool] for tool in TOOLS} == {tool: newest[tool] for tool in TOOLS}


def test_no_minimum_is_above_the_version_of_development() -> None:
    newest = pins("constraints.txt")
    oldest = pins("constraints-oldest.txt")
    assert [
        name
        for name in oldest.keys() & newest.keys()
        if release(oldest[name]) > release(newest[name])
    ] == []
