"""Runs in a client's environment: NeMo AutoModel's reader and its consolidation take the shards. JOB RESULT"""

import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from nemo_automodel.components.checkpoint._backports.consolidate_hf_safetensors import (
    consolidate_safetensors_files,
)
from nemo_automodel.components.checkpoint._backports.hf_storage import _HuggingFaceStorageReader
from safetensors.torch import load_file


def main(job, result):
    work, checks = Path(result).parent, []
    for number, model in enumerate(json.loads(Path(job).read_text())["models"]):
        wanted = load_file(model["state"])
        found = {name: torch.full_like(tensor, 1) for name, tensor in wanted.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, storage_reader=_HuggingFaceStorageReader(model["shards"]), no_dist=True)
        wrong = sum(not torch.equal(found[name], wanted[name]) for name in wanted)
        checks.append(
            [
                "NeMo AutoModel",
                f"{model['name']}: its reader reads the shards",
                f"{wrong} tensors differ",
                not wrong,
            ]
        )
        output = work / f"automodel_{number}"
        output.mkdir(exist_ok=True)
        consolidate_safetensors_files(model["shards"], str(output), dict.fromkeys(wanted, 1))
        found = {
            name: tensor
            for file in output.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        wrong = sum(
            name not in found or not torch.equal(found[name], wanted[name]) for name in wanted
        )
        what = f"{model['name']}: its consolidation takes the shards"
        checks.append(["NeMo AutoModel", what, f"{wrong} tensors differ", not wrong])
    Path(result).write_text(
        json.dumps({"versions": {"NeMo AutoModel": version("nemo-automodel")}, "checks": checks})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
