"""Small models, tokenizers and data under the names that the examples' are found by on the Hub.

Both libraries prefer a directory of that name to the Hub. So an example runs as it is, from a working directory that
holds these: models of the same class with fresh weights, chat templates and columns that are built alike.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models.sizes import model_sizes
from tests.support.models.small_tokenizer import small_tokenizer
from tests.support.models.vision import make_base, write_conversations

_SIZES = {
    **model_sizes(hidden=32, inner=48, layers=2, heads=4, kv_heads=2, positions=4096),
    "head_dim": 8,
    "tie_word_embeddings": True,
}
_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 500_000.0,
}
_LLAMA: dict[str, Any] = {"model_type": "llama", "rope_parameters": _ROPE}
_QWEN: dict[str, Any] = {"model_type": "qwen3"}
_GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
_OLMOE: dict[str, Any] = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
_SMOL: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "hidden_size": 24,
}

LLAMA_CHAT = """<s>{% for m in messages %}[{{ m.role }}]

{{ m.content | trim }}<eot>{% endfor %}{% if add_generation_prompt %}[assistant]

{% endif %}"""
QWEN_CHAT = """{% for m in messages %}[{{ m.role }}]
{% if m.role == 'assistant' and loop.last %}<think>

</think>

{% endif %}{{ m.content }}<eot>
{% endfor %}{% if add_generation_prompt %}[assistant]
{% endif %}"""
"""Only the last answer has a place for reasoning: earlier ones are written differently when more follows."""
CALLS_CHAT = """{% if tools %}[system]
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<eot>
{% endif %}{% for m in messages %}[{{ m.role }}]
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>
{{ call.function | tojson }}
</call>{% endfor %}<eot>
{% endfor %}{% if add_generation_prompt %}[assistant]
{% endif %}"""
"""Functions stand in a system message, calls in that of the assistant."""
GEMMA_CHAT = """<s>{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}[{{ 'model' if m.role == 'assistant' else m.role }}]
{{ system if loop.first }}{{ m.content | trim }}<eot>
{% endfor %}{% if add_generation_prompt %}[model]
{% endif %}"""
"""The system message stands before the first question, the assistant is called model."""
SMOL_CHAT = """{% if messages[0].role != 'system' %}[system]
You are helpful<eot>
{% endif %}{% for m in messages %}[{{ m.role }}]
{{ m.content }}<eot>
{% endfor %}{% if add_generation_prompt %}[assistant]
{% endif %}"""

MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "meta-llama/Llama-3.2-1B": (_LLAMA, None),
    "meta-llama/Llama-3.2-1B-Instruct": (_LLAMA, LLAMA_CHAT),
    "Qwen/Qwen3-0.6B": (_QWEN, QWEN_CHAT),
    "Qwen/Qwen3-4B": (_QWEN, CALLS_CHAT),
    "Qwen/Qwen3-8B": (_QWEN | {"tie_word_embeddings": False}, QWEN_CHAT),
    "allenai/OLMoE-1B-7B-0125-Instruct": (_OLMOE, SMOL_CHAT),
    "google/gemma-3-1b-it": (_GEMMA, GEMMA_CHAT),
    "HuggingFaceTB/SmolLM2-360M": (_SMOL, None),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (_SMOL, SMOL_CHAT),
}
"""Hub name -> what its config is like, and its chat template."""
VISION_MODELS = {"Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl"}
"""Hub name -> its family in :mod:`tests.support.models.vision`."""
IMAGES = "images/conversations.jsonl"
"""The file of conversations with images that recipes name."""
MEDPIX = "mmoukouba/MedPix-VQA"
"""The table of images, questions and answers that recipes name."""


def _conversation(number: int) -> dict[str, Any]:
    talk = [("user", f"What is {number} plus one?"), ("assistant", f"It is {number + 1}.")]
    if number % 3 == 0:
        talk.insert(0, ("system", "Answer in a sentence."))
    if number % 4 == 0:
        talk += [("user", "Are you sure?"), ("assistant", "Yes, I counted again.")]
    messages = [{"role": role, "content": content} for role, content in talk]
    return {
        "prompt": messages[0]["content"],
        "prompt_id": str(number),
        "messages": messages,
        "category": "Chat",
    }


def _talk(number: int) -> dict[str, Any]:
    return {"messages": _conversation(number)["messages"], "source": "made up"}


def _question(number: int) -> dict[str, Any]:
    context = f"The tower has {number} steps and a bell."
    answers = {"text": [str(number), "a few"], "answer_start": [14, 0]}
    return {
        "id": str(number),
        "title": "Tower",
        "context": context,
        "question": "How many?",
        "answers": answers,
    }


def _beginning(number: int) -> dict[str, Any]:
    endings = [f"and then counts to {number + other}." for other in range(4)]
    return {"ind": number, "ctx": "Someone sits down", "endings": endings, "label": str(number % 4)}


def _story(number: int) -> dict[str, Any]:
    return {
        "text": " ".join([f"Once upon a time there were {number} little bears."] * (1 + number % 3))
    }


def _calls(number: int) -> dict[str, Any]:
    number_of = {"number": {"description": "any number", "type": "int"}}
    tool = {"name": "next", "description": "The number after this one", "parameters": number_of}
    return {
        "id": number,
        "query": f"What is {number} plus one?",
        "answers": json.dumps([{"name": "next", "arguments": {"number": number}}]),
        "tools": json.dumps([tool]),
    }


def _preference(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {number} plus one?"}
    answers = {"chosen": f"It is {number + 1}.", "rejected": "I do not count."}
    row: dict[str, Any] = {}
    for name, answer in answers.items():
        row[name] = [question, {"role": "assistant", "content": answer}]
        row[f"score_{name}"] = 7.5 if name == "chosen" else 3.0
    return row


DATA: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "HuggingFaceH4/no_robots": (_conversation, "test"),
    "HuggingFaceTB/smol-smoltalk": (_talk, "test"),
    "rajpurkar/squad": (_question, "validation"),
    "Rowan/hellaswag": (_beginning, "validation"),
    "roneneldan/TinyStories": (_story, "validation"),
    "Salesforce/xlam-function-calling-60k": (_calls, "validation"),
    "zai-org/LongAlign-10k": (_talk, "validation"),
    "trl-lib/ultrafeedback_binarized": (_preference, "test"),
}
"""Hub name -> what its row n is like, and how the split beside ``train`` is called."""


def write_stand_ins(directory: Path, recipe: str) -> list[str]:
    """Make those that the text of a recipe names, in *directory*; returns their names."""
    words = set(recipe.split())
    looks = sorted(words & VISION_MODELS.keys())
    for name in looks:
        if not (directory / name).exists():
            make_base(directory / name, VISION_MODELS[name], context=4096)
    if IMAGES in words:
        (directory / IMAGES).parent.mkdir(exist_ok=True)
        write_conversations((directory / IMAGES).parent, 40)
    if MEDPIX in words:
        write_medpix(directory / MEDPIX)
    models, data = sorted(words & MODELS.keys()), sorted(words & DATA.keys())
    for name in models:
        if not (directory / name).exists():
            write_model(directory / name, *MODELS[name])
    for name in data:
        if not (directory / name).exists():
            write_data(directory / name, *DATA[name])
    return [*looks, *models, *data]


def write_model(path: Path, config: dict[str, Any], chat_template: str | None) -> None:
    """A model with fresh weights and a tokenizer, as ``save_pretrained`` leaves them."""
    tokenizer = small_tokenizer(300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<eot>"]})
    tokenizer.chat_template = chat_template
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    sizes = _SIZES | {"vocab_size": len(tokenizer)} | ids | config
    torch.manual_seed(0)
    made = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


def write_trainer_checkpoint(path: Path, step: int) -> None:
    """A small Qwen3 with the optimizer's and the scheduler's state, in the files of transformers' Trainer.

    The Trainer has two groups of parameters: those with weight decay, and norms and biases.
    """
    write_model(path, *MODELS["Qwen/Qwen3-0.6B"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(path)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
        groups["norm" in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=2e-5, weight_decay=0.0)
    optimizer.step()
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / (2 * step))
    schedule.last_epoch = step
    torch.save(schedule.state_dict(), path / "scheduler.pt")
    state = {"global_step": step, "epoch": 1.0, "train_batch_size": 4, "max_steps": 2 * step}
    (path / "trainer_state.json").write_text(json.dumps(state))


def write_medpix(path: Path) -> None:
    """Tables with the columns of MedPix-VQA: an image, a question and an answer."""
    import datasets
    import numpy as np
    from PIL import Image

    path.mkdir(parents=True)
    for split, num_rows in (("train", 40), ("validation", 4)):
        levels = [10 + number for number in range(num_rows)]
        images = [Image.fromarray(np.full((16, 24, 3), level, np.uint8)) for level in levels]
        rows = {
            "image_id": images,
            "question": ["How bright is it?"] * num_rows,
            "answer": [f"The level is {level}." for level in levels],
        }
        table = datasets.Dataset.from_dict(rows).cast_column("image_id", datasets.Image())
        table.to_parquet(str(path / f"{split}.parquet"))


def write_data(path: Path, row: Callable[[int], dict[str, Any]], other_split: str) -> None:
    """140 rows to train on and 9 others."""
    path.mkdir(parents=True)
    for split, numbers in (("train", range(140)), (other_split, range(140, 149))):
        (path / f"{split}.jsonl").write_text(
            "".join(json.dumps(row(number)) + "\n" for number in numbers)
        )
