"""Each key that a kind of training does not support is an error that names it, before data or models are read."""

from pathlib import Path

import pytest

from automodel_ckpt.cli.train import main

MODEL = "{model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2}"
DATA = "{{_target_: automodel_ckpt.data.{builder}, path: {path}, seq_length: 8}}"
BUILDERS = {
    "distill": "text.text",
    "vlm_distill": "vlm.conversations",
    "dpo": "preference.pairs",
    "orpo": "preference.pairs",
    "kto": "kto.judged_completions",
    "reward_model": "preference.pairs",
    "embedding": "text_pairs.text_pairs",
    "reranker": "text_pairs.text_pairs",
    "seq2seq": "seq2seq.source_target",
    "sequence_classification": "classification.texts",
}
VALUES = {
    "packed_sequence": "{size: 16}",
    "loss_fn": "{_target_: torch.nn.CrossEntropyLoss}",
    "generation": "{prompts: [a]}",
    "model.mtp": "{num_depths: 1}",
    "model.neftune_alpha": "5",
    "model._target_": "transformers.AutoModel.from_pretrained",
    "distributed.pp_size": "2",
    "distributed.cp_size": "2",
    "distributed.tp_size": "2",
    "compile.enabled": "true",
    "distill.top_k": "4",
}
OF_ANSWERS = ("packed_sequence", "loss_fn", "distributed.cp_size", "model.mtp")
WITH_HEAD = ("packed_sequence", "loss_fn", "generation", "distributed.pp_size")
OF_TEACHER = ("loss_fn", "distributed.pp_size", "distributed.cp_size", "model.mtp")
KEYS = {
    "distill": OF_TEACHER,
    "vlm_distill": (*OF_TEACHER, "distill.top_k"),
    "dpo": OF_ANSWERS,
    "orpo": OF_ANSWERS,
    "kto": OF_ANSWERS,
    "reward_model": (*OF_ANSWERS, "generation"),
    "embedding": (*WITH_HEAD, "distributed.cp_size", "model.mtp"),
    "reranker": (*WITH_HEAD, "distributed.cp_size"),
    "sequence_classification": (*WITH_HEAD, "distributed.cp_size"),
    "seq2seq": (
        "packed_sequence",
        "model.mtp",
        "model.neftune_alpha",
        "compile.enabled",
        "distributed.tp_size",
        "distributed.pp_size",
        "distributed.cp_size",
    ),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_that_a_recipe_does_not_support_is_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    data = DATA.format(builder=BUILDERS[kind], path=rows)
    text = f"recipe: {kind}\nmodel: {{from_config: {MODEL}}}\ndataset: {data}\n"
    text += f"validation_dataset: {data}\nstep_scheduler: {{max_steps: 1}}\n"
    if "distill" in kind:
        text += "distill: {teacher: {from_pretrained: absent}}\n"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    for key in KEYS[kind]:
        words = ["--dry-run", str(recipe), f"--{key}={VALUES[key]}"]
        if key.startswith("distributed"):
            words.append("--nproc-per-node=2")
        assert main(words) == 2
        problem = capsys.readouterr().err
        assert f"where:  {key}" in problem and "hint:" in problem, problem
