"""Runs in a client's environment: SGLang's sources say which keys and architectures it loads. JOB RESULT

SGLang itself needs a GPU to start; its package is unpacked without its requirements, and its Llama is read, not run.
"""

import ast
import json
import sys
from importlib.metadata import distribution, version
from pathlib import Path

TOP = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def llama_source():
    files = distribution("sglang").files or []
    return Path(
        next(file for file in files if str(file).endswith("srt/models/llama.py")).locate()
    ).read_text()


def main(job, result):
    nodes = list(ast.walk(ast.parse(llama_source())))
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    checks = []
    for model in json.loads(Path(job).read_text())["models"]:
        path = Path(model["hf"])
        config = json.loads((path / "config.json").read_text())
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        known = set(config["architectures"]) <= names and config["model_type"] == "llama"
        checks.append(
            [
                "SGLang",
                f"{model['name']}: has the architecture of config.json",
                str(config["architectures"]),
                known,
            ]
        )
        parts = {key.split(".")[-2] for key in index if key not in TOP}
        strange = sorted(
            part for part in parts if f".{part}" not in texts and part not in texts | attributes
        )
        files = all((path / name).is_file() for name in index.values())
        what = f"{model['name']}: names all weights of the index"
        checks.append(
            ["SGLang", what, f"{len(strange)} of {len(index)} unknown", not strange and files]
        )
    Path(result).write_text(
        json.dumps({"versions": {"SGLang": version("sglang")}, "checks": checks})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
