"""The checkpoint that attacks change: every kind of file that a checkpoint can hold, a few bytes of each."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_ckpt.checkpoint.export.base_identity import identify_base
from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.jobs import jobs
from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets, peft_document
from automodel_ckpt.checkpoint.sources.source import BaseMaps
from automodel_ckpt.checkpoint.state.module_tensors import module_state, tensor_specs
from automodel_ckpt.models.layers.adapter import add_adapters
from automodel_ckpt.models.layers.lora import Lora
from tests.support.models import tiny
from tests.support.models.llamas import llama_checkpoint
from tests.support.models.shards import cut, write_assets, write_checkpoint

NAME, BASE = "epoch_0_step_20", "base"
_SESSION_DIR = Path(os.environ["AUTOMODEL_CKPT_CACHE"]).parent
"""The directory that tests/conftest.py removes at the end of the tests. Read here, because readers set the variable."""
Document = dict[str, Any]


class Scoped(tiny.Counter):
    """State that each data-parallel rank has its own of."""

    checkpoint_scope = "dp_rank"


class Generators(tiny.Counter):
    checkpoint_scope = "rank_rng"


class Model(tiny.Odd):
    """With a value that is no tensor, for objects-*.bin."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def recipe() -> SimpleNamespace:
    made = tiny.recipe(
        dataloader=Scoped({"epoch": 1}),
        rng=Generators(torch.arange(8)),
        step_scheduler=tiny.Counter({"step": 20}),
        tracker=tiny.Counter([1, 2]),
    )
    made.model = Model()
    made.optimizer = torch.optim.AdamW(
        [p for p in made.model.parameters() if p.requires_grad], lr=0.1
    )
    made.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(made.optimizer, milestones=[1, 3])
    return made


class _Assets:
    """The side files of an export, as small as they may be."""

    file_index_mapping: dict[str, int] = {}  # noqa: RUF012
    files: dict[str, bytes] = {  # noqa: RUF012
        "config.json": json.dumps({"model_type": "llama", "tie_word_embeddings": True}).encode(),
        "tokenizer.json": b"{}",
        "generation_config.json": b"{}",
    }
    nbytes = 60
    maps = BaseMaps()


@functools.cache
def pristine(form: str = "shards") -> Path:
    """The untouched checkpoint, made once per process: in shards, with an export; as Hugging Face files (``hf``); with
    ``tables`` of slices; an ``adapter``, with its base in the run directory; or a ``llama`` with a tokenizer."""
    holder = Path(tempfile.mkdtemp(prefix="hostile-", dir=_SESSION_DIR))
    if form == "adapter":
        return _adapter(holder)
    if form == "llama":
        llama_checkpoint(holder / NAME)
        return holder / NAME
    made = recipe()
    tiny.train(made)
    layouts = {"model_layout": "hf"} if form == "hf" else {}
    limit = 0 if form == "tables" else jobs.MIN_TABLE_ROWS
    with mock.patch.object(jobs, "MIN_TABLE_ROWS", limit):
        path = tiny.save(
            holder,
            made,
            losses={"step": 20, "val_loss": 2.5},
            validated=True,
            assets={"model": _Assets()},
            save_consolidated=False,
            **layouts,
        ).path
    if form == "shards":
        consolidate(path)
    return path


def _adapter(run: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(run / BASE)
    adapted = add_adapters(model, Lora(), task_type="CAUSAL_LM", num_base_rows=16)
    identity = identify_base(str(run / BASE), run / BASE, run=run)
    specs = tensor_specs(adapted.model)
    assets = AdapterAssets(
        peft_document(adapted.peft_config), adapted.description, tensors=specs, base=identity
    )
    write_assets(assets, run / NAME / "model" / layout.HF_METADATA)
    state, tied = module_state(adapted.model)
    pieces = [piece for name, tensor in state.items() for piece in cut(name, tensor, 2, 0)]
    write_checkpoint(run / NAME, state, pieces, tied=tied)
    shutil.move(run / BASE, run / f"{BASE}.moved")  # a copy must find its own base, not this one
    return run / NAME


class Attacked:
    """A copy of the checkpoint in a new run directory, and a directory outside that no command may touch."""

    def __init__(self, directory: Path, form: str = "shards") -> None:
        self.run, self.outside = directory / "run", directory / "outside"
        self.run.mkdir()
        self.outside.mkdir()
        self.checkpoint = self.run / NAME
        self.model = self.checkpoint / "model"
        self.secret, self.marker = self.outside / "secret.json", self.outside / "marker"
        self.secret.write_text('{"tie_word_embeddings": false, "secret": "never printed"}')
        shutil.copytree(pristine(form), self.checkpoint)
        if form == "adapter":
            shutil.copytree(pristine(form).with_name(f"{BASE}.moved"), self.run / BASE)
        (self.run / "LATEST").symlink_to(NAME)

    @property
    def shard(self) -> Path:
        return next(self.model.glob("shard-*.safetensors"))

    @property
    def manifest(self) -> Path:
        return self.checkpoint / layout.MANIFEST

    def document(self) -> Document:
        loaded: Document = json.loads(self.manifest.read_bytes())
        return loaded

    def reseal(self, change: Callable[[Document], object]) -> None:
        """Change the manifest, with a digest that fits."""
        document = self.document()
        change(document)
        document.pop("digest", None)
        self.seal(json.dumps(document, separators=(",", ":"))[:-1].encode())

    def seal(self, head: bytes) -> None:
        """Any text as the manifest, with a digest that fits."""
        head += b",\n"
        self.manifest.unlink()
        self.manifest.write_bytes(head + b'"digest": "%s"\n}\n' % digest_of(head).encode())

    def replace(self, path: str, data: bytes) -> None:
        """Another content of a file, with the manifest's word for it."""
        (self.checkpoint / path).parent.mkdir(exist_ok=True)
        (self.checkpoint / path).write_bytes(data)
        record = {"size": len(data), "digest": digest_of(data)}
        self.reseal(lambda document: document["files"].update({path: record}))

    def replace_blob(self, tree: str, data: bytes) -> None:
        """Another content of the first value of a tree that is no tensor, appended to its file."""
        document = self.document()
        for blob in document["trees"][tree]["objects"].values():
            content = (self.checkpoint / blob["file"]).read_bytes()
            self.replace(blob["file"], content + data)
            document["files"] = self.document()["files"]
            blob.update(start=len(content), nbytes=len(data), digest=digest_of(data))
            self.reseal(lambda now: now.update(trees=document["trees"]))
            return
        raise AssertionError(f"{tree} holds no such value")

    def slice_of(self, document: Document) -> Document:
        """The manifest's entry of a tensor's only slice."""
        found: Document = document["trees"]["model"]["tensors"]["embed"]["slices"][0]
        return found
