"""What a checkpoint holds of a PEFT model: the tensors that its adapter file would, under the names they have there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn


def adapter_keys(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str] | None:
    """{FQN: key in ``adapter_model.safetensors``} of a ``PeftModel`` with this state dict; None for other modules.

    peft itself chooses and names (``get_peft_model_state_dict``). Its attribute ``save_embedding_layers``, where there
    is one, says whether the base's embeddings are among them though nothing trains them.
    """
    # A PeftModel cannot be at hand without the library; importing it takes a second.
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(module, PeftModel):
        return None
    tokens = {fqn: object() for fqn in state}
    fqns = {id(token): fqn for fqn, token in tokens.items()}
    name = module.active_adapters[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = get_peft_model_state_dict(
            module, tokens, name, save_embedding_layers=bool(module.__dict__.get("save_embedding_layers", False))
        )
    # Resized embeddings are named once more, with all in them, where they are trained as a whole too.
    twice = (".original_module.", ".modules_to_save.")
    return {fqns[id(token)]: key for key, token in named.items() if not any(part in key for part in twice)}
