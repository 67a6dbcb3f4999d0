"""Runs in the environment of onnxruntime. SOURCE OUTPUT RESULT

Compares the logits of OUTPUT/model.onnx with the logits of the Hugging Face files SOURCE, for several shapes and with
padding.
"""

import json
import sys
from pathlib import Path

import onnxruntime
import torch
from transformers import AutoModelForCausalLM

_SHAPES = ((1, 1), (2, 12), (3, 40))


def errors(source, output):
    session = onnxruntime.InferenceSession(output / "model.onnx")
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for shape in _SHAPES:
        # Not 0, the padding: its embedding is zero.
        ids = 3 + torch.arange(shape[0] * shape[1]).reshape(shape) * 7 % 500
        mask = torch.ones_like(ids)
        # Padding on the left; a row has to have one token.
        mask[-1, : shape[1] // 3] = 0
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        (logits,) = session.run(["logits"], inputs)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask).logits
        difference = (torch.from_numpy(logits) - expected).abs()[mask.bool()]
        found.append((shape, float(difference.max())))
    return found


def main(source, output, result):
    Path(result).write_text(json.dumps(errors(source, Path(output))))


if __name__ == "__main__":
    main(*sys.argv[1:])
