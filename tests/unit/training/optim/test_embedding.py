"""The recipe ``embedding``: its losses are those of sentence-transformers, and its exports compute its embeddings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModel, AutoTokenizer

from automodel_ckpt.cli.ckpt import main as run_ckpt
from automodel_ckpt.errors import RecipeError
from tests.fixtures.embedding import tiny_pairs as tiny
from tests.support.runs import pair_recipes
from tests.support.runs.pair_recipes import trained

RECORDED = Path(tiny.__file__).with_name("sentence_transformers_losses.json")
OFTEN = ("bert_cls_symmetric", "llama_last")
"""Cases of ``make test``."""
POOLING = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
FILES = {
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Normalize/config.json",
    "config_sentence_transformers.json",
}
TEXTS = ["find ba deing", "find ku", "rei so ting pa la fu go ku deing bing mo ra"]


def losses_in(run: Path) -> list[float]:
    lines = (run / "training.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "event" not in record]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in OFTEN else [pytest.mark.further])
        for case in json.loads(RECORDED.read_text())
    ],
)
def test_losses_are_those_of_sentence_transformers(tmp_path: Path, case: str) -> None:
    recorded = json.loads(RECORDED.read_text())[case]
    recipe = pair_recipes.write_embedding(
        tmp_path, recorded["kind"], recorded.get("num_negatives", 0)
    )
    trained(
        recipe,
        f"--embedding.pooling={POOLING[recorded['pooling']]}",
        f"--embedding.symmetric={str(recorded.get('symmetric', False)).lower()}",
        f"--embedding.temperature={1 / tiny.SCALE}",
        "--dataloader.shuffle=false",
        "--validation_dataset=null",
        # In two micro-batches, whose texts are each other's negatives.
        f"--step_scheduler.local_batch_size={tiny.BATCH // 2}",
    ).close()
    assert losses_in(tmp_path / "run") == pytest.approx(recorded["losses"], rel=1e-5)


def test_a_loss_of_own_negatives_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    recipe = pair_recipes.write_embedding(tmp_path, num_negatives=2)
    own = (
        "--embedding.negatives=own",
        "--step_scheduler.max_steps=3",
        "--dataloader.shuffle=false",
    )
    found = []
    for size in (6, 2):
        run = f"--checkpoint.checkpoint_dir={tmp_path / str(size)}"
        trained(recipe, *own, run, f"--step_scheduler.local_batch_size={size}").close()
        found.append(losses_in(tmp_path / str(size)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    with pytest.raises(RecipeError, match="the documents of a pair have one query"):
        trained(recipe, *own, "--embedding.symmetric=true")


# ---------------------------------------------------------------- exports


def embedded(model: Any, export: Path, texts: list[str]) -> torch.Tensor:
    """The embeddings of *texts*, by the files of an export and transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    limit = json.loads((export / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        hidden = model.eval()(**inputs).last_hidden_state
    pooling = json.loads((export / "1_Pooling" / "config.json").read_text())
    assert hidden.shape[-1] == pooling["word_embedding_dimension"]
    [mode] = [name for name, value in pooling.items() if name.startswith("pooling_mode") and value]
    rows = []
    for row, mask in zip(hidden, inputs["attention_mask"].bool(), strict=True):
        states = row[mask]
        pooled = {"mean_tokens": states.mean(0), "cls_token": states[0], "lasttoken": states[-1]}
        rows.append(pooled[mode.removeprefix("pooling_mode_")])
    paths = [each["path"] for each in json.loads((export / "modules.json").read_text())]
    found = torch.stack(rows)
    return torch.nn.functional.normalize(found, dim=-1) if "2_Normalize" in paths else found


def embedded_in_training(recipe: Any, texts: list[str]) -> torch.Tensor:
    """The embeddings of *texts* as the recipe computes them."""
    samples = []
    for text in texts:
        ids = recipe.tokenizer(text, truncation=True, max_length=12)["input_ids"]
        labels = [-100, *ids[1:]]
        samples.append({"input_ids": ids * 2, "labels": labels * 2})
    batch = recipe.build_collate_fn()(samples)
    recipe.model.eval()
    with torch.no_grad():
        found: torch.Tensor = recipe.objective.embed(batch)[0 : 2 * len(texts) : 2]
    return found


@pytest.mark.parametrize(
    ("kind", "with_head", "pooling"), [("bert", True, "cls"), ("llama", True, "last")]
)
def test_an_export_computes_the_embeddings_of_training(
    tmp_path: Path, kind: str, with_head: bool, pooling: str
) -> None:
    recipe_file = pair_recipes.write_embedding(tmp_path, kind, with_head=with_head)
    recipe = trained(
        recipe_file,
        "--step_scheduler.max_steps=2",
        f"--embedding.pooling={pooling}",
        "--embedding.document_prompt=ba ",
        "--checkpoint.save_consolidated=final",
    )
    expected = embedded_in_training(recipe, TEXTS)
    recipe.close()
    export = tmp_path / "run" / "LATEST" / "model" / "consolidated"
    found = embedded(AutoModel.from_pretrained(export), export, TEXTS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    prompts = json.loads((export / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts == {"query": "find ", "document": "ba "}
    assert run_ckpt(["export", str(tmp_path / "run"), "--output", str(tmp_path / "again")]) == 0
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (export / name).read_bytes(), name


BOTH_WAYS = "--embedding.attention=bidirectional"


@pytest.mark.parametrize(
    "implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.further)]
)
def test_attention_to_later_tokens_is_that_of_a_complete_mask(
    tmp_path: Path, implementation: str
) -> None:
    recipe = trained(
        pair_recipes.write_embedding(tmp_path, "llama", with_head=True),
        BOTH_WAYS,
        f"--model.attn_implementation={implementation}",
        "--step_scheduler.max_steps=2",
        "--checkpoint.save_consolidated=final",
    )
    in_training = embedded_in_training(recipe, TEXTS)
    recipe.close()
    export = tmp_path / "run" / "LATEST" / "model" / "consolidated"
    assert json.loads((export / "config.json").read_text())["is_causal"] is False
    options: Any = {"dtype": torch.float64}
    exported = AutoModel.from_pretrained(export, attn_implementation=implementation, **options)
    found = embedded(exported, export, TEXTS)
    torch.testing.assert_close(found.float(), in_training, rtol=1e-5, atol=1e-5)
    # The mask of each text replaces that of the model.
    options |= {"is_causal": True, "attn_implementation": "eager"}
    plain = AutoModel.from_pretrained(export, **options).eval()
    expected = []
    tokens = AutoTokenizer.from_pretrained(export)(TEXTS, max_length=12, truncation=True)
    for ids in tokens["input_ids"]:
        sees_all = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)
        with torch.no_grad():
            hidden = plain(torch.tensor([ids]), attention_mask=sees_all).last_hidden_state[0]
        expected.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
    # Eager attention computes the softmax in float32.
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=1e-7)


def test_a_model_that_does_not_follow_the_attention_is_rejected(tmp_path: Path) -> None:
    recipe = pair_recipes.write_embedding(tmp_path, "llama")
    text = recipe.read_text()
    sizes = "hidden_size: 16, num_layers: 2, num_heads: 2, attention_types: [[[global, local], 1]]"
    other = text.replace(
        f"from_pretrained: {tmp_path / 'base'}", f"from_config: {{model_type: gpt_neo, {sizes}}}"
    )
    recipe.write_text(other + f"tokenizer: {{from_pretrained: {tmp_path / 'base'}}}\n")
    with pytest.raises(RecipeError, match="does not support bidirectional attention") as caught:
        trained(recipe, BOTH_WAYS)
    assert "GPTNeoModel: tokens do not see later ones in layer 0, 1 of 2" in str(caught.value)
    recipe.write_text(text)
    with pytest.raises(RecipeError, match="adapters are loaded with the config of their base"):
        trained(recipe, BOTH_WAYS, "--peft.r=4")
    # Adapters of a base with such a config are loaded with it.
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_causal": False}))
    trained(recipe, BOTH_WAYS, "--peft.r=4", "--step_scheduler.max_steps=1").close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_adapters_have_the_files_too_and_are_merged_with_them(tmp_path: Path) -> None:
    recipe_file = pair_recipes.write_embedding(tmp_path, "llama", with_head=True)
    recipe = trained(
        recipe_file,
        "--step_scheduler.max_steps=2",
        "--peft.r=4",
        "--embedding.normalize=false",
        "--embedding.temperature=5.0",
    )
    expected = embedded_in_training(recipe, TEXTS)
    recipe.close()
    export = tmp_path / "run" / "LATEST" / "model"
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(tmp_path / "base"), export)
    torch.testing.assert_close(embedded(model, export, TEXTS), expected, rtol=1e-5, atol=1e-5)
    assert not (export / "2_Normalize").exists()
    assert json.loads((export / "adapter_config.json").read_text())["task_type"] == (
        "FEATURE_EXTRACTION"
    )
    # The base has a head, which the model with the adapters lacks.
    merged = tmp_path / "merged"
    assert run_ckpt(["export", str(tmp_path / "run"), "--merge", "--output", str(merged)]) == 0
    found = embedded(AutoModel.from_pretrained(merged), merged, TEXTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name in FILES - {"2_Normalize/config.json"}:
        assert (merged / name).read_bytes() == (export / name).read_bytes(), name
