"""Checkpoints of other programs for ``tools/bench_import.py``: real structures, random values, any size.

Kinds with ``state`` in their name have a Llama with the moments of AdamW, a third of the bytes for each, and are
imported with ``--training-state``. The size counts the tensors as they are imported, so that the files of quantized
kinds are smaller.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from automodel_ckpt.convert.formats.nemo.archives import pack

_ROWS = 4096
_COLUMNS = 4096
_WIDTH = 2048
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _WIDTH,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_STEP = 10
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}


class Sharded(NamedTuple):
    """A tensor of random values that two ranks split along a dimension."""

    shape: tuple[int, ...]
    dimension: int


State = dict[tuple[str, ...], Any]
"""A nested state dict by the keys that lead to each value, which may be :class:`Sharded`."""

_MEGATRON_LAYER: Mapping[str, Any] = {
    "self_attention.linear_qkv.weight": Sharded((3072, _WIDTH), 0),
    "self_attention.linear_qkv.layer_norm_weight": torch.ones(_WIDTH),
    "self_attention.linear_proj.weight": Sharded((_WIDTH, _WIDTH), 1),
    "mlp.linear_fc1.weight": Sharded((2 * 8192, _WIDTH), 0),
    "mlp.linear_fc1.layer_norm_weight": torch.ones(_WIDTH),
    "mlp.linear_fc2.weight": Sharded((_WIDTH, 8192), 1),
}
"""A layer of the Llama below under Megatron's names, and the dimension along which its ranks split each tensor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a checkpoint is made, in a directory with a given number of gigabytes, and imported.

    *file* is what is imported, where it is not the directory; *options* are those of ``ckpt import``, in which
    ``{config}`` is a directory with the model's config.json. *converts*: the bytes are not copied, but computed.
    """

    make: Callable[[Path, float], None]
    file: str | None = None
    options: tuple[str, ...] = ()
    converts: bool = False


def make(kind: str, directory: str, gigabytes: float) -> None:
    """Write a checkpoint of *kind* with about *gigabytes* of float32 tensors into *directory*."""
    torch.manual_seed(0)
    KINDS[kind].make(Path(directory), gigabytes)


def write_config(directory: Path) -> None:
    """Write the config.json of a Llama with the dimensions of the kinds here; its number of layers is not used."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_LLAMA | {"num_hidden_layers": 1}))


@functools.cache
def _random_values() -> torch.Tensor:
    return torch.rand(_ROWS * _COLUMNS)


def _random(shape: Sequence[int]) -> torch.Tensor:
    """A new tensor. Tensors of the same shape have the same values: drawing gigabytes of numbers would take minutes."""
    return _random_values()[: math.prod(shape)].reshape(tuple(shape)).clone()


# ---------------------------------------------------------------- matrices under any names


def _weights(gigabytes: float) -> dict[str, torch.Tensor]:
    count = max(1, round(gigabytes * 1e9 / (_ROWS * _COLUMNS * 4)))
    tensors: dict[str, torch.Tensor] = {}
    for number in range(count):
        tensors[f"model.layers.{number}.weight"] = _random((_ROWS, _COLUMNS))
    return tensors


def _shards(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in four parts."""
    names = list(weights)
    size = -(-len(names) // 4)
    for begin in range(0, len(names), size):
        yield {name: weights[name] for name in names[begin : begin + size]}


def _hugging_face(directory: Path, gigabytes: float) -> None:
    from safetensors.torch import save_file

    for number, part in enumerate(_shards(_weights(gigabytes))):
        save_file(part, directory / f"part-{number}.safetensors", {"format": "pt"})


def _torch_file(directory: Path, gigabytes: float) -> None:
    torch.save({"model": _weights(gigabytes), "step": 1}, directory / "model.pt")


def _transposed(directory: Path, gigabytes: float) -> None:
    weights = _weights(gigabytes)
    torch.save({name: value.T for name, value in weights.items()}, directory / "model.pt")


def _dcp(directory: Path, gigabytes: float) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(_weights(gigabytes)), checkpoint_id=directory, no_dist=True)


def _deepspeed(directory: Path, gigabytes: float) -> None:
    """Write ZeRO stage 2 of two ranks, as DeepSpeed 0.19 does: each rank has half of the concatenated parameters."""
    weights = _weights(gigabytes)
    tag = directory / "global_step1"
    tag.mkdir()
    (directory / "latest").write_text(tag.name)
    shapes = {name: value.shape for name, value in weights.items()}
    states = {"module": {}, "param_shapes": [shapes], "buffer_names": [], "dp_world_size": 2}
    torch.save({**states, "ds_version": "0.19.8"}, tag / "mp_rank_00_model_states.pt")
    names = list(weights)
    half = len(names) // 2
    for rank, part in enumerate((names[:half], names[half:])):
        flat = torch.cat([weights[name].reshape(-1) for name in part])
        optimizer = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [flat],
        }
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        del flat


def _nemo(directory: Path, gigabytes: float) -> None:
    torch.save(_weights(gigabytes), directory / "model_weights.ckpt")
    _pack_nemo(directory)


def _pack_nemo(directory: Path) -> None:
    """Replace the files in *directory* by a .nemo file of them."""
    (directory / "model_config.yaml").write_text("activation: gelu\n")
    packed = directory.with_name("packed.nemo")
    pack(directory, packed, lambda _: None)
    shutil.rmtree(directory)
    directory.mkdir()
    packed.rename(directory / "model.nemo")


# ---------------------------------------------------------------- a Llama, with and without optimizer


def _llama(directory: Path, gigabytes: float) -> dict[str, torch.Tensor]:
    """Write the config of a Llama of about *gigabytes* in float32; return its weights in the order of the model."""
    shapes = _llama_shapes(directory, gigabytes)
    return {name: _random(shape) for name, shape in shapes.items()}


def _llama_shapes(directory: Path, gigabytes: float) -> dict[str, torch.Size]:
    """Write the config of a Llama of about *gigabytes* in float32; return the shapes of its weights."""
    first_layer_bytes = _parameter_bytes(1)
    layer_bytes = _parameter_bytes(2) - first_layer_bytes
    more_layers = round((gigabytes * 1e9 - first_layer_bytes) / layer_bytes)
    num_layers = 1 + max(0, more_layers)
    config = _LLAMA | {"num_hidden_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(config))
    model = _meta_llama(num_layers)
    return {name: value.shape for name, value in model.named_parameters()}


def _parameter_bytes(num_layers: int) -> int:
    return 4 * sum(parameter.numel() for parameter in _meta_llama(num_layers).parameters())


def _meta_llama(num_layers: int) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**_LLAMA, num_hidden_layers=num_layers)
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def _moments(value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(float(_STEP)),
        "exp_avg": _random(value.shape),
        "exp_avg_sq": _random(value.shape),
    }


def _group(parameters: list[Any]) -> dict[str, Any]:
    """The options of AdamW (torch 2.13) for *parameters*, numbers or names."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1e-3)
    return {**optimizer.state_dict()["param_groups"][0], "initial_lr": 1e-3, "params": parameters}


def _numbered_optimizer(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict of an optimizer that got the parameters in the order of the model."""
    state = {number: _moments(value) for number, value in enumerate(weights.values())}
    return {"state": state, "param_groups": [_group(list(state))]}


def _trainer(directory: Path, gigabytes: float) -> None:
    _write_trainer(directory, _llama(directory, gigabytes))


def _trainer_state(directory: Path, gigabytes: float) -> None:
    """Write a checkpoint of the Trainer, whose optimizer has the parameters with weight decay first."""
    weights = _llama(directory, gigabytes / 3)
    _write_trainer(directory, weights)
    decays = [name for name in weights if "norm" not in name]
    others = [name for name in weights if "norm" in name]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, name in enumerate((*decays, *others)):
        state[number] = _moments(weights[name])
    numbers = list(state)
    groups = [_group(numbers[: len(decays)]), _group(numbers[len(decays) :])]
    torch.save({"state": state, "param_groups": groups}, directory / "optimizer.pt")
    schedule = {"base_lrs": [1e-3, 1e-3], "last_epoch": _STEP, "_step_count": _STEP + 1}
    torch.save(schedule, directory / "scheduler.pt")


def _write_trainer(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    counters = {"global_step": _STEP, "epoch": 0.5, "train_batch_size": 1, "log_history": []}
    (directory / "trainer_state.json").write_text(json.dumps(counters))


def _lightning_state(directory: Path, gigabytes: float) -> None:
    weights = _llama(directory, gigabytes / 3)
    state = {
        "epoch": 0,
        "global_step": _STEP,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"model.{name}": value for name, value in weights.items()},
        "optimizer_states": [_numbered_optimizer(weights)],
        "lr_schedulers": [],
        "loops": {},
        "callbacks": {},
    }
    torch.save(state, directory / "model.ckpt")


def _megatron(directory: Path, gigabytes: float) -> None:
    """Write a torch_dist directory of Megatron-Core with tensor parallelism 2, each layer apart."""
    shapes = _llama_shapes(directory, gigabytes)
    (directory / "config.json").rename(directory.with_name("config") / "config.json")
    state: State = {}
    for name in shapes:
        if not name.endswith("input_layernorm.weight"):
            continue
        layer = name.split(".")[2]
        for key, value in _MEGATRON_LAYER.items():
            state[f"decoder.layers.{layer}.{key}",] = value
    state["embedding.word_embeddings.weight",] = Sharded(shapes["model.embed_tokens.weight"], 0)
    state["output_layer.weight",] = Sharded(shapes["lm_head.weight"], 0)
    state["decoder.final_layernorm.weight",] = _random((_WIDTH,))
    _save_sharded(directory, state)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(backend))


def _save_sharded(directory: Path, state: State) -> None:
    """Save a nested state dict with DCP from two ranks."""
    code = "from tools.bench_import_kinds import save_as_rank; save_as_rank()"
    with tempfile.TemporaryDirectory(dir=directory.parent) as rendezvous:
        file = Path(rendezvous, "state.pickle")
        file.write_bytes(pickle.dumps(state))
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(2):
            arguments = [str(rank), str(file), str(directory), f"{rendezvous}/store"]
            ranks.append(subprocess.Popen([sys.executable, "-c", code, *arguments]))
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"a rank that writes the checkpoint failed: {codes}")


def save_as_rank() -> None:
    """Save the shards of one of two ranks. Arguments: rank, file of the state, target directory, rendezvous file."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, file, directory, store = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    nested: dict[str, Any] = {}
    state: State = pickle.loads(Path(file).read_bytes())
    for path, value in state.items():
        if isinstance(value, Sharded):
            extents = list(value.shape)
            extents[value.dimension] //= 2
            value = DTensor.from_local(_random(extents), mesh, [Shard(value.dimension)])
        place = nested
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    save(nested, checkpoint_id=directory)
    dist.destroy_process_group()


def _gguf(directory: Path, gigabytes: float, name: str) -> None:
    """Write a GGUF file with the library of llama.cpp."""
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    # What is imported has 4 bytes per value for quantized kinds, 2 for others.
    shapes = _llama_shapes(directory, gigabytes if name == "Q8_0" else 2 * gigabytes)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").unlink()
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    quantized: dict[torch.Size, Any] = {}
    for fqn, shape in shapes.items():
        stored = kind if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        if shape not in quantized:
            quantized[shape] = gguf.quants.quantize(_random(shape).numpy(), stored)
        writer.add_tensor(_gguf_name(fqn), quantized[shape], raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(fqn: str) -> str:
    for part, replacement in _GGUF_NAMES.items():
        fqn = fqn.replace(part, replacement)
    return fqn


def _gguf_bf16(directory: Path, gigabytes: float) -> None:
    _gguf(directory, gigabytes, "BF16")


def _gguf_q8_0(directory: Path, gigabytes: float) -> None:
    _gguf(directory, gigabytes, "Q8_0")


_STATE = ("--training-state",)
KINDS: Mapping[str, Kind] = {
    "safetensors": Kind(_hugging_face),
    "torch": Kind(_torch_file, "model.pt"),
    "torch-transposed": Kind(_transposed, "model.pt", converts=True),
    "dcp": Kind(_dcp),
    "trainer": Kind(_trainer),
    "trainer-state": Kind(_trainer_state, options=_STATE),
    "lightning-state": Kind(_lightning_state, "model.ckpt", _STATE),
    "deepspeed": Kind(_deepspeed),
    "megatron": Kind(_megatron, options=("--config", "{config}"), converts=True),
    "nemo": Kind(_nemo, "model.nemo"),
    "gguf-bf16": Kind(_gguf_bf16, "model.gguf", converts=True),
    "gguf-q8_0": Kind(_gguf_q8_0, "model.gguf", converts=True),
}
