"""Runs in vLLM's environment: log probabilities of the tokens of some prompts, for each model. JOB RESULT"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)


def main(job, result):
    import vllm

    wanted = json.loads(Path(job).read_text())
    found = {}
    for name, directory in wanted["models"].items():
        engine = vllm.LLM(
            model=directory,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            seed=0,
        )
        sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in wanted["prompts"]]
        found[name] = []
        for answer in engine.generate(prompts, sampling, use_tqdm=False):
            # The first token has no probability.
            pairs = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
            found[name].append([entry[token].logprob for token, entry in pairs])
        del engine
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
