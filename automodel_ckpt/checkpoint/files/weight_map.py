"""Reading weight maps: the index that names the file of each tensor of a Hugging Face model. Imports no torch.

``model.safetensors.index.json`` and ``pytorch_model.bin.index.json`` have the same content: a JSON mapping. Its
``weight_map`` maps tensor names to file names. Its ``metadata`` is not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import TextDict
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, unusable

# The index of a model with 200,000 tensors (experts, quantization scales) has about 25 MB. Parsed JSON takes up to 25
# times its size in memory.
_INDEX_SUFFIX = ".index.json"
_MAX_INDEX_BYTES = 64 << 20


def read_weight_map(
    index: Path,
    *,
    follow_links: bool = False,
    check_bytes: Callable[[str, bytes], None] | None = None,
    kind: type[AutomodelError] = CheckpointUnusable,
) -> TextDict | None:
    """Return {tensor name: file name} from the file *index*, or None when there is no such file.

    None also if ``model.safetensors`` (or ``pytorch_model.bin``) is next to *index*, which does not name it:
    transformers reads this file then, and does not remove the index of an earlier, larger model when it saves a smaller
    one.

    Every file name is a plain name in the directory of *index*. With *follow_links*, *index* may be a symbolic link, as
    in the Hub's cache. *check_bytes* gets the index's name and content before it is parsed, and raises an error if
    they do not match a manifest.

    Raises *kind* if the index cannot be read, is too large, is not JSON of this form, or names a file outside of its
    directory. For the base model that a recipe names, *kind* is :class:`RecipeError`.
    """
    try:
        return _read(index, follow_links, check_bytes)
    except CheckpointUnusable as error:
        raise kind.all_of(error.problems) from error


def _read(
    index: Path, follow_links: bool, check_bytes: Callable[[str, bytes], None] | None
) -> TextDict | None:
    path = Path(os.path.realpath(index)) if follow_links else index
    try:
        content = read_safely(path.parent, path.name, limit=_MAX_INDEX_BYTES)
        if check_bytes is not None:
            check_bytes(index.name, content)
        document = parse_json(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        value = getattr(error, "strerror", None) or repr(error)[:200]
        raise unusable("the index of the weights cannot be read", index, value) from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise unusable(
            "the index of the weights has no weight_map of file names",
            index,
            type(weight_map).__name__,
        )
    # An index from another source must not lead to files outside of its directory.
    for fqn, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or layout.unsafe_path(name):
            raise unusable(
                "the index names a file outside of its directory",
                index,
                f"{fqn[:200]!r}: {name!r:.200}",
            )
    single, suffix, _ = index.name.partition(_INDEX_SUFFIX)
    if suffix and single not in weight_map.values() and (index.parent / single).is_file():
        return None
    return weight_map
