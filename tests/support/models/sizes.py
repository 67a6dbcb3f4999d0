"""The sizes of a small model under the names of transformers."""

_NAMES = {
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}


def model_sizes(**given: int) -> dict[str, int]:
    return {_NAMES[name]: size for name, size in given.items()}
