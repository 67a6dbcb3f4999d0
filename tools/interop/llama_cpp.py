"""llama.cpp (xllamacpp): GGUF files that are written here; its answers are compared with transformers'."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.convert.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.convert.targets.flow import export_to
from tests.support.models.gguf_models import MODELS, TinyModel, model_named
from tools.interop.program import Check, Workplace

_VOCABULARY = 520
_NUM_TOKENS = 24
_END = 2
_TEXTS = (
    "The if statement, and what it's for in 2024: 12345!",
    "a  b\n\n\tspaces   and\r\n  lines  ",
    "naïve café 漢字 😀 don't WE'LL",
    "x = [1, 2]; # comment\n  return y",
    "An ordinary sentence <|marker|> with a marker",
    "CamelCase HTTPServer ÀÉÎ 3.14159 1,000,000",
)
_QUANTIZED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
# Gemma's GELU is a table of halves in llama.cpp. For products with quantized weights it rounds activations to 8 bits,
# which the sharp attention of random models amplifies. Logits of another model would have an error of 1.4.
_MAX_ERROR = {"F32": 0.001, "quantized": 0.2}


@dataclass(frozen=True)
class _Job:
    """A file, and what transformers makes of its model."""

    name: str
    file: Path
    texts: list[str]
    tokens: list[list[int]]
    prompts: list[list[int]]
    greedy: list[list[int]]
    logprobs: list[torch.Tensor]


def checks(place: Workplace) -> Iterator[Check]:
    jobs = []
    for model in MODELS:
        source = model.save_in(place.directory)
        jobs.append(_job(model.name, source, "F32", model.build(torch.float32)))
    yield from _compared(place, jobs, "F32")
    yield from _pre_tokenizers(place)
    for name in ("Llama 2", "Gemma 3", "Qwen 3"):
        source = model_named(name).path_in(place.directory)
        jobs = [_quantized_job(f"{name}, {kind}", source, kind) for kind in _QUANTIZED]
        yield from _compared(place, jobs, "quantized")


def _job(name: str, source: Path, kind: str, model: Any) -> _Job:
    """Export the Hugging Face files *source* as *kind*; *model* is what llama.cpp is compared with."""
    file = source.with_name(f"{source.name}-{kind}.gguf")
    export_to("gguf", source, file, tensor_type=kind, log=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(source)
    # llama.cpp puts a space after each special token for tokenizers of SentencePiece, which this one does not; the
    # export warns of it.
    is_first_only = (
        getattr(tokenizer.backend_tokenizer.pre_tokenizer, "prepend_scheme", "") == "first"
    )
    texts = [text for text in _TEXTS if not (is_first_only and "<|" in text)]
    tokens = [tokenizer(text).input_ids for text in texts]
    prompts = [*tokens, (torch.arange(48) * 7 % 500).tolist()]
    greedy, logprobs = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logprobs.append(torch.log_softmax(model(ids).logits[0, -1].double(), -1))
            continued = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=_NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=[_END],
            )
        greedy.append(continued[0, len(prompt) :].tolist())
    varied = {tuple(each) for each in greedy}
    assert len(varied) > 1 and len(set(greedy[0])) > 3, f"{name}: degenerate output proves nothing"
    return _Job(name, file, texts, tokens, prompts, greedy, logprobs)


def _quantized_job(name: str, source: Path, kind: str) -> _Job:
    """Export as *kind*; the model to compare with has the dequantized weights, as they are read here."""
    file = source.with_name(f"{source.name}-read-{kind}.gguf")
    export_to("gguf", source, file, tensor_type=kind, log=lambda _: None)
    read = source.with_name(f"{source.name}-read-{kind}")
    consolidate(file, read, log=lambda _: None, opener=open_source)
    # from_pretrained() returns the model in evaluation mode.
    model = AutoModelForCausalLM.from_pretrained(
        read, dtype=torch.float32, attn_implementation="eager"
    )
    return _job(name, source, kind, model)


def _answers(place: Workplace, jobs: list[_Job]) -> list[dict[str, Any]]:
    request = place.directory / "request.json"
    sizes = {"num_tokens": _NUM_TOKENS, "vocab": _VOCABULARY}
    documents = [
        {"gguf": str(job.file), "texts": job.texts, "prompts": job.prompts, **sizes} for job in jobs
    ]
    request.write_text(json.dumps(documents))
    answers: list[dict[str, Any]] = place.report("llama_cpp_answers.py", request)
    return answers


def _compared(place: Workplace, jobs: list[_Job], precision: str) -> Iterator[Check]:
    for job, answer in zip(jobs, _answers(place, jobs), strict=True):
        num_texts, num_prompts = len(job.tokens), len(job.prompts)
        tokens = sum(a == b for a, b in zip(job.tokens, answer["tokens"], strict=True))
        errors = []
        for expected, found in zip(job.logprobs, answer["logprobs"], strict=True):
            # There are none where llama.cpp's first token ends the text.
            if found[0] is not None:
                difference = torch.tensor(found, dtype=torch.float64) - expected
                errors.append(float(difference.std() / expected.std()))
        good = tokens == num_texts and len(errors) > num_prompts // 2
        good = good and max(errors) < _MAX_ERROR[precision]
        text = f"{tokens} of {num_texts} texts; error {max(errors):.0e}"
        what = f"{job.name}: tokenization; log probabilities relative to their deviation"
        # Rounding of activations changes tokens of random models.
        if precision == "F32":
            greedy = sum(a == b for a, b in zip(job.greedy, answer["greedy"], strict=True))
            good = good and greedy == num_prompts
            what += f"; {_NUM_TOKENS} greedy tokens"
            text += f"; {greedy} of {num_prompts} prompts"
        yield Check(what, text, good)


def _pre_tokenizers(place: Workplace) -> Iterator[Check]:
    """Compare tokenization with each way of splitting text that no model above has."""
    used = {model.tokenizer.partition(":")[2] for model in MODELS}
    jobs = []
    for known in PRE_TOKENIZERS:
        if known.name in used:
            continue
        model = TinyModel(known.name, "llama", f"bpe:{known.name}", config={"num_hidden_layers": 1})
        source = model.save(place.directory / f"splits-{known.name}")
        jobs.append(_job(known.name, source, "F32", model.build()))
    for job, answer in zip(jobs, _answers(place, jobs), strict=True):
        tokens = sum(a == b for a, b in zip(job.tokens, answer["tokens"], strict=True))
        text = f"{tokens} of {len(job.tokens)} texts"
        good = tokens == len(job.tokens)
        yield Check(f"pre-tokenizer {job.name}: tokenization equal", text, good)
