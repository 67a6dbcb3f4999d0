"""Runs in the environment of NeMo AutoModel: its reader and consolidation take our shards. SHARDS EXPECTED RESULT"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from nemo_automodel.components.checkpoint._backports.consolidate_hf_safetensors import (
    consolidate_safetensors_files,
)
from nemo_automodel.components.checkpoint._backports.hf_storage import _HuggingFaceStorageReader
from safetensors.torch import load_file


def main(shards, expected, result):
    wanted = load_file(expected)
    read = {name: torch.full_like(tensor, 1) for name, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(read, storage_reader=_HuggingFaceStorageReader(shards), no_dist=True)
    output = Path(result).with_suffix("")
    output.mkdir()
    consolidate_safetensors_files(shards, str(output), dict.fromkeys(wanted, 1))
    consolidated = {}
    for file in output.glob("*.safetensors"):
        consolidated |= load_file(file)
    numbers = {}
    for what, found in (("reader", read), ("consolidation", consolidated)):
        different = [
            name
            for name in wanted
            if name not in found or not torch.equal(found[name], wanted[name])
        ]
        numbers[what] = len(different)
    Path(result).write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
