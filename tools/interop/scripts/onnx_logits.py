"""Runs in the environment of onnxruntime. [--external-data] SOURCE OUTPUT RESULT

Compares the logits of OUTPUT/model.onnx with those of the Hugging Face files SOURCE, for several shapes and with
padding. With --external-data, it exports SOURCE to OUTPUT first, with the weights in a file beside the graph.
"""

import json
import sys
from functools import partialmethod
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
        # Not 0, the padding, whose embedding is zero.
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


def main(*arguments):
    *options, source, output, result = arguments
    source, output = Path(source), Path(output)
    if options:
        from automodel_ckpt.models import onnx_export

        # As torch does with models of more than 1.5 GiB.
        save = torch.onnx.ONNXProgram.save
        torch.onnx.ONNXProgram.save = partialmethod(save, external_data=True)
        output.mkdir()
        onnx_export.export_to_onnx(source, output / "model.onnx", "float32")
        assert (output / "model.onnx.data").stat().st_size > (output / "model.onnx").stat().st_size
        found = [max(error for _, error in errors(source, output))]
    else:
        found = errors(source, output)
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
