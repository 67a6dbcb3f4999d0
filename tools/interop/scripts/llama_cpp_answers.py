"""Runs in the environment of llama.cpp: what it makes of GGUF files. JOB RESULT

The job is a list of {"gguf": path, "texts": [...], "prompts": [[token, ...], ...], "num_tokens": N, "vocab": N}, and
the result a list of {"tokens": for each text, "greedy": for each prompt, "logprobs": of the first token there}.
"""

import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp


def serve(path):
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 256
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = -1
    params.cpuparams.n_threads = 1
    # As precise as transformers in single precision; the cache of keys and values is half precision by default.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def post(server, path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        server.listening_address + path, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


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
