"""Runs in the environment of llama.cpp: what it makes of GGUF files. JOB RESULT

The job is a list of {"gguf": path, "texts": [...], "prompts": [[token, ...], ...], "num_tokens": N, "vocab": N}, and
the result a list of {"tokens": for each text, "greedy": for each prompt, "logprobs": of the first token there}.
"""

import json
import sys
from pathlib import Path

# This script runs in the environment of llama.cpp, from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "clients"))
from ask_llama_cpp import post, serve


def ask(job):
    server = serve(job["gguf"])
    found = {"tokens": [], "greedy": [], "logprobs": []}
    for text in job["texts"]:
        body = {"content": text, "add_special": True, "parse_special": True}
        found["tokens"].append(post(server, "/tokenize", body)["tokens"])
    for prompt in job["prompts"]:
        body = {
            "prompt": prompt,
            "n_predict": job["num_tokens"],
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": False,
        }
        found["greedy"].append(post(server, "/completion", body)["tokens"])
        body |= {"n_predict": 1, "n_probs": job["vocab"], "ignore_eos": False}
        answer = post(server, "/completion", body)
        # There is none where the first token ends the text.
        logprobs = {}
        for first in answer.get("completion_probabilities", []):
            logprobs = {entry["id"]: entry["logprob"] for entry in first["top_logprobs"]}
        found["logprobs"].append([logprobs.get(index) for index in range(job["vocab"])])
    return found


def main(job, result):
    found = [ask(each) for each in json.loads(Path(job).read_text())]
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
