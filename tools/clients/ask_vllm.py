"""Runs in a client's environment: vLLM on the CPU generates from the exports. JOB RESULT"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)


def main(job, result):
    import vllm

    checks = []
    for model in json.loads(Path(job).read_text())["models"]:
        prompts = model["prompts"]
        engine = vllm.LLM(
            model=model["fp32"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            disable_log_stats=True,
            seed=0,
        )
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=len(prompts[0]["greedy"]), ignore_eos=True
        )
        found = engine.generate(
            [{"prompt": prompt["text"]} for prompt in prompts], sampling, use_tqdm=False
        )
        equal = sum(
            list(answer.outputs[0].token_ids) == prompt["greedy"]
            and list(answer.prompt_token_ids) == prompt["ids"]
            for answer, prompt in zip(found, prompts, strict=True)
        )
        what = f"{model['name']}: greedy tokens equal"
        checks.append(["vLLM", what, f"{equal} of {len(prompts)} prompts", equal == len(prompts)])
        del engine
    Path(result).write_text(json.dumps({"versions": {"vLLM": vllm.__version__}, "checks": checks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
