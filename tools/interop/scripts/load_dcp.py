"""Loads a DCP directory with torch into a Llama and its optimizer that two ranks shard, and compares every tensor.

    python load_dcp.py DCP_DIRECTORY SOURCE REPORT

SOURCE has config.json and ``expected.safetensors``: {NAME: weight, NAME:ENTRY: moment}. REPORT gets one line.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

NUM_RANKS = 2


def load(rank: int, directory: str, source: str, report: str, port: int) -> None:
    """Load on one rank; rank 0 writes the report."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole, state = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        expected = load_file(Path(source, "expected.safetensors"))
        for name, entries in state["state"].items():
            whole[f"{name}:exp_avg"] = entries["exp_avg"]
            whole[f"{name}:exp_avg_sq"] = entries["exp_avg_sq"]
        equal = [name for name, tensor in whole.items() if torch.equal(tensor, expected[name])]
        share = "all" if len(equal) == len(whole) else f"{len(equal)} of"
        Path(report).write_text(f"{share} {len(whole)} tensors bit-equal\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(load, (*sys.argv[1:], free_port), nprocs=NUM_RANKS)
