"""Validate manifests and tasks with the schemas of Kubernetes, Kubeflow Trainer, JobSet and SkyPilot.

    python schemas.py DIRECTORY [--crds DIRECTORY]

Runs in an environment with ``kubernetes-validate kubeflow-trainer-api skypilot jsonschema``, and imports nothing of
this repository. DIRECTORY contains ``*.k8s.yaml`` and ``*.sky.yaml``. Unknown fields are errors. With ``--crds``,
Kubeflow's objects are also validated with the schemas in Kubeflow's own CRD files (manifests/base/crds).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

# Not installed where this repository's types are checked.
jsonschema: Any = importlib.import_module("jsonschema")
kubernetes_validate: Any = importlib.import_module("kubernetes_validate")
kubeflow: Any = importlib.import_module("kubeflow_trainer_api.models")
sky: Any = importlib.import_module("sky")

MODELS = {
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
    "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
}
VERSIONS = ("1.31", "1.37")


def check_core(document: dict[str, Any]) -> None:
    """Validate an object of Kubernetes itself with the oldest and a new supported version."""
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def check_kubeflow(document: dict[str, Any], crds: Path | None) -> None:
    """Validate an object of Kubeflow. Its models drop unknown fields, so that the result must equal the input."""
    model = MODELS[document["kind"]].from_dict(document)
    assert model is not None
    if missing := difference(document, model.to_dict()):
        raise ValueError(f"unknown fields of {document['kind']}: {missing}")
    if document["kind"] == "TrainingRuntime":
        check_pods(document)
    if crds is not None:
        name = f"trainer.kubeflow.org_{document['kind'].lower()}s.yaml"
        definition = yaml.safe_load((crds / name).read_text())
        (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1alpha1")
        jsonschema.validate(document, closed(version["schema"]["openAPIV3Schema"]))


def check_pods(runtime: dict[str, Any]) -> None:
    """Validate the Job of each replicated job of a runtime as an object of Kubernetes; Kubeflow sets its container."""
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        template = replicated["template"]
        check_core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template})


def difference(given: Any, read: Any, path: str = "") -> list[str]:
    """Return the paths of values of *given* that *read* lacks or has differently."""
    keys: Iterable[Any]
    if isinstance(given, dict) and isinstance(read, dict):
        keys = given.keys()
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        keys = range(len(given))
    else:
        return [] if given == read else [path]
    found = []
    for key in keys:
        if isinstance(given, dict) and key not in read:
            found.append(f"{path}.{key}")
        else:
            found += difference(given[key], read[key], f"{path}.{key}")
    return found


def closed(schema: Any) -> Any:
    """Return a structural schema that rejects unknown fields, as the API server does for kubectl --validate=strict."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    has_fields = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if has_fields and "additionalProperties" not in schema and "metadata" not in schema:
        result["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    if schema.get("type") == "object" and not has_fields:
        result.pop("additionalProperties", None) if schema.get("description") == "" else None
    return result


def check_sky(path: Path) -> None:
    """Read a task with SkyPilot, which validates it, and check what its managed jobs get."""
    text = path.read_text()
    document = yaml.safe_load(text)
    required = [name for name, value in document.get("envs", {}).items() if value is None]
    values = [(name, "value") for name in required]
    secrets = [(name, "value") for name in document.get("secrets", {})]
    # SkyPilot changes the mapping that it reads.
    task = sky.Task.from_yaml_config(
        yaml.safe_load(text), env_overrides=values, secrets_overrides=secrets
    )
    assert task.num_nodes == document["num_nodes"]
    for resources in task.resources:
        assert resources.use_spot
        assert resources.job_recovery["recover_on_exit_codes"] == [75], resources.job_recovery
    if required:
        expect_rejection(
            lambda: sky.Task.from_yaml_config(yaml.safe_load(text)), f"without {required}"
        )
    changed = yaml.safe_load(text) | {"unknown": 1}
    expect_rejection(
        lambda: sky.Task.from_yaml_config(changed, env_overrides=values), "with an unknown key"
    )


def expect_rejection(check: Callable[[], object], what: str) -> None:
    """Raise ValueError if *check* accepts a document that has a mistake."""
    try:
        check()
    except Exception:
        return
    raise ValueError(f"a document {what} is accepted")


def with_unknown_fields(value: Any) -> Iterator[Any]:
    """Yield copies of a document, each with an unknown field in one of its mappings with known fields."""
    free = {"labels", "selector", "data", "limits", "requests"}
    if isinstance(value, dict):
        yield {**value, "unknownField": 1}
        for key, child in value.items():
            if key not in free:
                yield from ({**value, key: changed} for changed in with_unknown_fields(child))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            for changed in with_unknown_fields(child):
                yield [*value[:index], changed, *value[index + 1 :]]


def check_manifest(path: Path, crds: Path | None) -> list[str]:
    """Validate each object of a manifest, and that its validator rejects unknown fields. Returns the kinds."""

    def check(document: dict[str, Any]) -> None:
        if document["kind"] in MODELS:
            check_kubeflow(document, crds)
        else:
            check_core(document)

    kinds = []
    for document in yaml.safe_load_all(path.read_text()):
        kinds.append(document["kind"])
        check(document)
        for changed in with_unknown_fields(document):
            expect_rejection(functools.partial(check, changed), f"with a field too many: {changed}")
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--crds", type=Path)
    given = parser.parse_args()
    for path in sorted(given.directory.glob("*.k8s.yaml")):
        kinds = check_manifest(path, given.crds)
        print(f"{path.name}: {', '.join(kinds)} are valid, and unknown fields are rejected")
    for path in sorted(given.directory.glob("*.sky.yaml")):
        check_sky(path)
        print(f"{path.name}: SkyPilot {sky.__version__} reads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
