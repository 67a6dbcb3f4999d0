"""Files that have no weights for this program: weights of programs that it does not read, and pointers of Git LFS."""

from __future__ import annotations

import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/"
"""The first bytes of a pointer: what a clone has in the place of large files if Git LFS is not installed."""
LFS_HINT = "it is a pointer of Git LFS: `git lfs pull` downloads the file itself"
# Flax and TensorFlow also have an index.
_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")
_READ = ("*.safetensors", "*.bin", "*.distcp", "*.gguf", "*.ckpt", *_INDEXES)
_TRANSFORMERS_4 = (
    "convert it with transformers 4 and the model's class, such as "
    "AutoModelForCausalLM.from_pretrained(DIRECTORY, {}=True).save_pretrained(NEW)"
)
_SAVE = "load the model with the program that wrote it, and save its weights as safetensors"
_OTHERS = {
    "*.pt2": ("a program of torch.export (.pt2)", _SAVE),
    "*.keras": ("a model of Keras", _SAVE),
    "flax_model*.msgpack": ("Flax weights", _TRANSFORMERS_4.format("from_flax")),
    "tf_model*.h5": ("TensorFlow weights of transformers", _TRANSFORMERS_4.format("from_tf")),
    "*.h5": ("weights in HDF5, as Keras writes", _SAVE),
    "saved_model.pb": ("a SavedModel of TensorFlow", _SAVE),
    "_CHECKPOINT_METADATA": ("a checkpoint of Orbax (JAX)", _SAVE),
    "manifest.ocdbt": ("a checkpoint of Orbax (JAX)", _SAVE),
    "*/_CHECKPOINT_METADATA": ("a directory of Orbax's checkpoints (JAX)", _SAVE),
    "*/manifest.ocdbt": ("a checkpoint of Orbax (JAX)", _SAVE),
    "*/*/manifest.ocdbt": ("a directory of Orbax's checkpoints (JAX)", _SAVE),
}
"""Pattern of a file -> what the directory has, and how to convert it."""
MLX_ADAPTER = (
    "an adapter of MLX",
    "merge it into its base with mlx_lm.fuse, and use the result",
)
TORCH_SCRIPT = (
    "a program of TorchScript",
    "save its weights: python -c \"import torch; torch.save(torch.jit.load('FILE').state_dict(), 'FILE.bin')\"",
)


def weights_of_another_program(directory: Path) -> tuple[str, str] | None:
    """Return what *directory* has, and how to convert it, if nothing in it can be read; None for other directories."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return None
    # mlx-lm also keeps numbered copies of the adapter in the directory.
    if {"adapters.safetensors", "adapter_config.json"} <= set(names):
        return MLX_ADAPTER
    # transformers' own name; a script can have saved a program under it.
    if is_torch_script(directory / "pytorch_model.bin"):
        names.remove("pytorch_model.bin")
    if any(fnmatchcase(name, pattern) for name in names for pattern in _READ):
        return None
    for pattern, found in _OTHERS.items():
        if any(directory.glob(pattern)):
            return found
    if any(is_torch_script(path) for path in (*directory.glob("*.pt*"), *directory.glob("*.bin"))):
        return TORCH_SCRIPT
    return None


def kind_of_file(name: str) -> tuple[str, str] | None:
    """Return what a file with this name has, and how to convert it, or None for other names."""
    return next((found for pattern, found in _OTHERS.items() if fnmatchcase(name, pattern)), None)


def is_torch_script(path: Path) -> bool:
    """Whether the file *path* is an archive of TorchScript, which has code in addition to its tensors."""
    # Opening a FIFO would wait for a writer forever.
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
