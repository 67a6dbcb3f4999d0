"""What users do wrong with data, models and places: each run ends with one message that tells where and what to do.

All runs are set up in turn by one forked process, as a rank would set them up.
"""

import json
import os
import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from automodel_ckpt import load_recipe
from automodel_ckpt.errors import EXIT_SAVE_FAILED, EXIT_UNUSABLE, EXIT_USAGE, describe
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.training import RECIPE, build

DIGITS = Path(__file__).parents[2] / "examples/vlm_finetune/tiny_digits.yaml"
LLAMA = {
    "model_type": "llama",
    **model_sizes(hidden=32, inner=48, layers=1, heads=4, kv_heads=2, vocab=300),
}
SMALL_GPT2 = "{_target_: transformers.GPT2Config, n_layer: 1, n_embd: 8, n_head: 1, vocab_size: 304, pad_token_id: 0}"
TALK = (
    json.dumps(
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    )
    + "\n"
)
IMAGE = json.dumps(json.loads(TALK) | {"images": ["a.png"]}) + "\n"


@dataclass(frozen=True)
class Mistake:
    """Overrides (``@`` is the directory), files by name, and what the message has to say."""

    overrides: tuple[str, ...]
    said: str
    files: dict[str, bytes | str] = field(default_factory=dict)
    code: int = EXIT_USAGE
    recipe: Path | None = None


def texts(file: str, content: bytes | str, said: str, *more: str) -> Mistake:
    section = (
        f"--dataset={{_target_: automodel_ckpt.data.text.text, path: '@/{file}', seq_length: 16}}"
    )
    return Mistake((section, *more), said, {file: content})


def talks(template: str, said: str, **files: bytes | str) -> Mistake:
    section = "--dataset={_target_: automodel_ckpt.data.chat.messages, path: '@/talk.jsonl', seq_length: 16}"
    given = f"--dataset.chat_template='{template}'"
    return Mistake((section, given), said, {"talk.jsonl": TALK} | files)


def images(path: str, said: str, *more: str, **files: bytes | str) -> Mistake:
    section = f"--dataset={{_target_: automodel_ckpt.data.vlm.conversations, path: '@/{path}'}}"
    return Mistake(
        (section, *more),
        said,
        {name.replace("__", "."): text for name, text in files.items()},
        2,
        DIGITS,
    )


def pretrained(said: str, **files: bytes | str) -> Mistake:
    named = {
        f"base/{name}": text for name, text in ({"config.json": json.dumps(LLAMA)} | files).items()
    }
    return Mistake(("--model={from_pretrained: '@/base'}",), said, named)


def tokens(said: str, **files: str) -> Mistake:
    return Mistake(
        ("--tokenizer={from_pretrained: '@/tok'}",),
        said,
        {f"tok/{name}": v for name, v in files.items()},
    )


STREAMED = "--dataset.streaming"
OF_ONE_KEY = r"""
optimizer={_target_: torch.optim.SGD, lr: -3} | calling torch.optim.SGD failed[\s\S]*rate: -3
model={_target_: transformers.AutoModel.from_pretrained} | failed[\s\S]*pretrained_model_name
optimizer={_target_: torch.optim.LBFGS} | evaluates the loss several times[\s\S]*LBFGS.step\(closure\)
model.attn_implementation=flex_attention | no backward pass on the CPU[\s\S]*sdpa
model={from_config: {model_type: bert, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}} |
    is an encoder[\s\S]*a bert model[\s\S]*is_decoder: true
model.from_config={model_type: gemma3_text, use_bidirectional_attention: true} |
    is an encoder[\s\S]*use_bidirectional_attention: true\s+hint: [^{]*train encoders$
model.from_config={model_type: bert-generation} | is an encoder[\s\S]*a bert-generation model[\s\S]*is_decoder: true
model.from_config={model_type: xlnet} | is an encoder[\s\S]*attn_type: uni
optimizer={_target_: torch.optim.SparseAdam} | sparse gradients only[\s\S]*AdamW
optimizer={_target_: transformers.Adafactor} | sets its own learning rates[\s\S]*relative_step
lr_scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau} |
    needs more than the step[\s\S]*ReduceLROnPlateau.step\(metrics
optimizer={_target_: tests.support.runs.training_parts.part, name: relu} | is not a torch.optim.Optimizer
model={_target_: tests.support.runs.training_parts.part, name: config} | is not a torch.nn.Module
model={_target_: tests.support.runs.training_parts.part, name: lazy} | are not initialized[\s\S]*2 of 2, the first w
model={_target_: tests.support.runs.training_parts.part, name: shared} |
    share memory[\s\S]*0.weight, 1.weight[\s\S]*assign the parameter itself
dataset={_target_: tests.support.runs.training_parts.samples, kind: input_ids} |
    input_ids outside of the model's vocabulary[\s\S]*9999; [\s\S]*from 0 to \d
dataset={_target_: tests.support.runs.training_parts.samples, kind: labels} |
    labels outside of the model's vocabulary[\s\S]*-7; the model
dataset={_target_: tests.support.runs.training_parts.samples, kind: attention_mask} |
    already padded[\s\S]*1 of 4 tokens
dataset={_target_: tests.support.runs.training_parts.splits} | neither map-style nor iterable[\s\S]*value:  train
loss_fn={_target_: torch.nn.MSELoss} | does not accept logits[\s\S]*CrossEntropyLoss
distributed.backend=cpu:gloo,cuda:nccl | unknown torch.distributed backend, or one that this node has no device for
distributed.backend=mpi | unknown torch.distributed backend
distributed.backend=foo | unknown torch.distributed backend
loss_fn={_target_: torch.nn.CrossEntropyLoss, reduction: mean} | has to be the sum over the labels
loss_fn={_target_: tests.support.runs.training_parts.mean_loss} |
    the loss is a mean[\s\S]*training_parts.mean_loss: ([\d.]+) for \d+ labels, \1[\s\S]*return the sum
loss_fn={_target_: tests.support.runs.training_parts.detached_loss} | no gradient[\s\S]*where:  loss_fn\s
peft={r: 4, base_dir: /proc/x} | the base model cannot be written[\s\S]*peft.base_dir
processor={_target_: automodel_ckpt.examples.data.digits.processor} | has a tokenizer, not a processor
init_from={path: some-organisation/some-model} | not in the cache[\s\S]*hf download some-organisation/some-model
model.attn_implementation=flash_attention_2 | FlashAttention[\s\S]*attn_implementation to sdpa
"""
"""An override and what the message has to say: mistakes that need no files."""
MISTAKES = {
    "blank lines": texts("a.jsonl", "\n\n", r"the data file is empty[\s\S]*a.jsonl"),
    "a stream of nothing": texts("a.jsonl", "", "the data file is empty", STREAMED),
    "another encoding": texts(
        "a.jsonl", b'{"text": "\xff"}\n', r"not UTF-8[\s\S]*a.jsonl:1[\s\S]*0xff"
    ),
    "a table in another encoding": texts(
        "a.csv", b"text\n\xff\n", r"not UTF-8[\s\S]*a.csv:2[\s\S]*save the file"
    ),
    "a stream that is no JSON": texts(
        "a.jsonl", '{"text": "a"}\n{"te\n', r"not JSON[\s\S]*a.jsonl:2", STREAMED
    ),
    "a table of uneven rows": texts(
        "a.csv", "text,b\n1,2\n3,4,5\n", r"more or fewer values than[\s\S]*a.csv:3[\s\S]*3 val"
    ),
    "no parquet": texts(
        "a.parquet", "x", r"data set cannot be read[\s\S]*a.parquet[\s\S]*minimum file"
    ),
    "a kind of file": texts("a.dat", "x", r"unknown data file format[\s\S]*\*\.jsonl"),
    "no samples": texts(
        "a.jsonl", '{"text": "a"}\n', "max_samples must be 1 or more", "--dataset.max_samples=0"
    ),
    "no samples streamed": texts(
        "a.jsonl",
        '{"text": "a"}\n',
        "max_samples must be 1 or more",
        "--dataset.max_samples=0",
        STREAMED,
    ),
    "a template in another encoding": Mistake(
        (
            "--dataset={_target_: automodel_ckpt.data.chat.messages, path: '@/a.jsonl', chat_template: '@/t'}",
        ),
        r"chat template cannot be read[\s\S]*can't decode",
        {"a.jsonl": TALK, "t": b"\xff"},
    ),
    "a template that fails": talks(
        "{{ 1 / 0 }}", r"cannot render[\s\S]*ZeroDivisionError[\s\S]*template_kwargs"
    ),
    "images of nothing": images(
        "no.jsonl", r"a data file cannot be read[\s\S]*no.jsonl[\s\S]*ENOENT"
    ),
    "images of a subset": images(
        "a.jsonl", "no subsets and no revision", "--dataset.name=x", a__jsonl=IMAGE
    ),
    "no image there": images(
        "a.jsonl", r"image cannot be read[\s\S]*a.jsonl:\d[\s\S]*No such file", a__jsonl=IMAGE * 8
    ),
    "fewer than no images": Mistake(
        ("--dataset.max_samples=-3",), "max_samples must be 1 or more", {}, 2, DIGITS
    ),
    "weights of no kind": pretrained(
        r"weights is damaged[\s\S]*base/model.safetensors", **{"model.safetensors": "x"}
    ),
    "weights of Flax": pretrained(
        r"has Flax weights, which cannot be trained[\s\S]*from_flax", **{"flax_model.msgpack": "x"}
    ),
    "a checkpoint of another program": Mistake(
        ("--checkpoint.restore_from=@/trainer/checkpoint-5",),
        r"another program: transformers Trainer[\s\S]*ckpt import",
        {
            "trainer/checkpoint-5/trainer_state.json": "{}",
            "trainer/checkpoint-5/pytorch_model.bin": "x",
        },
        EXIT_UNUSABLE,
    ),
    "pointers in place of weights": pretrained(
        r"weights is damaged[\s\S]*base/pytorch_model.bin[\s\S]*git lfs pull",
        **{"pytorch_model.bin": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
    ),
    "weights cut short": pretrained(
        r"weights is damaged[\s\S]*base\n", **{"pytorch_model.bin": ""}
    ),
    "a model of no type": pretrained(
        "configuration cannot be read", **{"config.json": '{"model_type": ["llama"]}'}
    ),
    "a truncated config": tokens(
        r"config.json cannot be read[\s\S]*tok/config.json \(", **{"config.json": '{"model_type": '}
    ),
    "a config that is a list": pretrained(
        r"config.json cannot be read[\s\S]*base/config.json \(not a JSON", **{"config.json": "[1]"}
    ),
    "a tokenizer of no kind": tokens(
        "the tokenizer cannot be read", **{"tokenizer.json": '{"model": {"type": "x"}}'}
    ),
    "a pointer in place of a tokenizer": tokens(
        r"tokenizer is damaged[\s\S]*tok/tokenizer.json[\s\S]*git lfs pull",
        **{"tokenizer.json": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
    ),
    "a model without a tokenizer": tokens(
        r"no tokenizer[\s\S]*tok has config.json, tokenizer_config.json\n[\s\S]*tokenizer: null",
        **{"config.json": "{}", "tokenizer_config.json": "{}"},
    ),
    "a directory of models": Mistake(
        ("--model={from_pretrained: '@/models'}", "--tokenizer={from_pretrained: null}"),
        r"the directory has no model: config.json[\s\S]*models has llama",
        {"models/llama/config.json": "{}"},
    ),
    "a model of a target, and no tokenizer": Mistake(
        (
            f"--model={{_target_: transformers.AutoModelForCausalLM.from_config, config: {SMALL_GPT2}}}",
            "--tokenizer={from_pretrained: null}",
            "--dataset={_target_: automodel_ckpt.data.text.text, path: '@/a.txt', seq_length: 16}",
        ),
        r"requires a tokenizer[\s\S]*not a model with _target_",
        {"a.txt": "a"},
    ),
    "a collator that does not pad": Mistake(
        (
            "--dataset={_target_: automodel_ckpt.data.text.text, path: '@/a.txt', seq_length: 32}",
            "--dataloader.collate_fn={_target_: transformers.DefaultDataCollator}",
        ),
        r"could not be collated[\s\S]*expected sequence of length[\s\S]*the default pads",
        {"a.txt": "".join(f"{'a ' * n}\n" for n in range(1, 9))},
        1,
    ),
    "an optimizer for whole parameters": Mistake(
        ("--optimizer={_target_: torch.optim.Adafactor}", "--distributed.strategy=fsdp2"),
        r"cannot update sharded parameters[\s\S]*Adafactor: aten",
    ),
    "an encoder and a decoder": pretrained(
        r"does not support this kind of model[\s\S]*a t5 model \(T5Model\), which AutoModelForCausalLM",
        **{"config.json": '{"model_type": "t5", "architectures": ["T5Model"]}'},
    ),
    "an attention that the model does not support": Mistake(
        ("--model.from_config={model_type: gpt_oss}", "--model.attn_implementation=sdpa"),
        r"GptOssForCausalLM does not support[\s\S]*set model.attn_implementation to sdpa or eager",
    ),
    "a model for classes": Mistake(
        (
            f"--model={{_target_: transformers.AutoModelForSequenceClassification.from_config, config: {SMALL_GPT2}}}",
        ),
        r"no logits for each token[\s\S]*shape \[4, 2\] for \[4, \d+\] tokens",
    ),
    "padded samples to be packed": Mistake(
        (
            "--dataset={_target_: tests.support.runs.training_parts.samples, kind: attention_mask}",
            "--packed_sequence.size=16",
        ),
        r"already padded",
    ),
    "a tokenizer for images": Mistake(
        ("--tokenizer={from_pretrained: x}",), "is part of its processor", {}, 2, DIGITS
    ),
    "packs of images": Mistake(
        ("--packed_sequence.size=8",), "a sample is longer than a pack", {}, 2, DIGITS
    ),
    "no processor": Mistake(
        ("--processor={from_pretrained: null}",), "there is no processor", {}, 2, DIGITS
    ),
    "a processor of no kind": Mistake(
        ("--processor={from_pretrained: '@/p'}",),
        r"processor cannot be read[\s\S]*p \(",
        {"p/x": ""},
        2,
        DIGITS,
    ),
    "checkpoints in a file": Mistake(
        ("--checkpoint.checkpoint_dir=@/file",),
        r"ENOTDIR[\s\S]*to a writable directory",
        {"file": ""},
    ),
    "a log that is a directory": Mistake(
        ("--checkpoint.checkpoint_dir=@/run",),
        r"log of the run cannot be truncated[\s\S]*training.jsonl",
        {"run/training.jsonl/x": ""},
        EXIT_SAVE_FAILED,
    ),
    "a file to begin with": Mistake(
        ("--init_from={path: '@/a.safetensors'}",),
        "not a usable safetensors",
        {"a.safetensors": ""},
        EXIT_UNUSABLE,
    ),
    "weights to begin with": Mistake(
        ("--init_from={path: '@/no'}",), "there are no weights here", {}, EXIT_UNUSABLE
    ),
    **{
        override: Mistake((f"--{override}",), said)
        for override, said in (
            line.split(" | ") for line in OF_ONE_KEY.replace("|\n    ", "| ").strip().splitlines()
        )
    },
}


def said_to(mistake: Mistake, directory: Path) -> tuple[int, str]:
    """Exit code and message of a run; a traceback where it ends with anything else."""
    directory.mkdir()
    for name, content in mistake.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe = mistake.recipe or directory / "recipe.yaml"
    if mistake.recipe is None:
        recipe.write_text(RECIPE)
    places = (
        f"--checkpoint.checkpoint_dir={directory}/checkpoints",
        "--step_scheduler.max_steps=1",
    )
    words = [word.replace("@", str(directory)) for word in (*places, *mistake.overrides)]
    made = None
    try:
        made = build(recipe, *words)
        made.setup()
        made.run()
    except BaseException as error:
        code, message = describe(error)
        return code, message if code > 1 else "".join(traceback.format_exception(error))
    finally:
        if made is not None:
            made.close()
    return 0, "nothing was said"


@pytest.mark.slow
def test_each_mistake_ends_the_run_with_a_message_of_ours(tmp_path: Path) -> None:
    def all_of_them() -> dict[str, tuple[int, str]]:
        return {
            name: said_to(mistake, tmp_path / str(i))
            for i, (name, mistake) in enumerate(MISTAKES.items())
        }

    (ended,) = ranks.run(all_of_them, 1, init=False, timeout=240)
    wrong = {
        name: (code, message)
        for name, (code, message) in ended.items()
        if code != MISTAKES[name].code
        or not re.search(MISTAKES[name].said, message)
        or "where:" not in message.split()
    }
    assert wrong == {}


def test_a_recipe_of_somebody_else_cannot_be_read(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    recipe.chmod(0)
    tmp_path.chmod(0o755)

    def as_nobody() -> str:
        os.chdir(tmp_path)
        os.seteuid(65534)
        try:
            load_recipe("recipe.yaml")
        except Exception as error:
            return describe(error)[1]
        return "nothing was said"

    (said,) = ranks.run(as_nobody, 1, init=False)
    assert "the recipe cannot be read" in said and "recipe.yaml" in said and "EACCES" in said
