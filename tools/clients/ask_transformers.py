"""Runs in a client's environment: transformers loads the exports, PyTorch's readers the shards. JOB RESULT"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader


def logits(model):
    wanted = load_file(model["logits"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model["hf"], attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        found = loaded(wanted["ids"]).logits
    return (found - wanted["logits"]).abs().max().item()


def greedy(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model["fp32"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model["fp32"], attn_implementation="eager"
    ).eval()
    equal = 0
    for prompt in model["prompts"]:
        ids = tokenizer(prompt["text"], return_tensors="pt").input_ids
        options = {
            "do_sample": False,
            "max_new_tokens": len(prompt["greedy"]),
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        with torch.no_grad():
            found = loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)[
                0, ids.shape[1] :
            ]
        equal += found.tolist() == prompt["greedy"] and ids[0].tolist() == prompt["ids"]
    return equal


def read(model, reader):
    wanted = load_file(model["state"])
    found = {name: torch.full_like(tensor, 1) for name, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=reader, no_dist=True)
    return sum(not torch.equal(found[name], wanted[name]) for name in wanted)


def main(job, result):
    checks = []
    for model in json.loads(Path(job).read_text())["models"]:
        name, count = model["name"], len(model["prompts"])
        worst, equal = logits(model), greedy(model)
        checks.append(
            ["transformers", f"{name}: largest difference of logits", f"{worst:g}", worst == 0]
        )
        checks.append(
            [
                "transformers",
                f"{name}: greedy tokens equal",
                f"{equal} of {count} prompts",
                equal == count,
            ]
        )
        readers = {
            "safetensors shards": HuggingFaceStorageReader(model["shards"]),
            "DCP files": FileSystemReader(model["dcp"]),
        }
        for kind, reader in readers.items():
            wrong = read(model, reader)
            what = f"{name}: {type(reader).__name__} reads the {kind}"
            checks.append(["PyTorch", what, f"{wrong} tensors differ", wrong == 0])
    versions = {"transformers": transformers.__version__, "PyTorch": torch.__version__}
    Path(result).write_text(json.dumps({"versions": versions, "checks": checks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
