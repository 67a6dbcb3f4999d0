"""Runs in a client's environment: llama.cpp (xllamacpp) tokenizes and generates from the GGUF files. JOB RESULT"""

import json
import sys
import urllib.request
from importlib.metadata import version
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


def agrees(answer, wanted):
    """Whether the tokens are the wanted ones, up to the end of the text, where llama.cpp stops."""
    found = answer["tokens"]
    ended = len(found) == len(wanted) or answer["stop_type"] == "eos"
    return ended and len(found) > 0 and found == wanted[: len(found)]


def main(job, result):
    checks = []
    for model in json.loads(Path(job).read_text())["models"]:
        server, prompts, tokens, equal = serve(model["gguf"]), model["prompts"], 0, 0
        for prompt in prompts:
            found = post(server, "/tokenize", {"content": prompt["text"], "add_special": True})[
                "tokens"
            ]
            tokens += found == prompt["ids"]
            body = {
                "prompt": prompt["ids"],
                "n_predict": len(prompt["greedy"]),
                "temperature": 0,
                "top_k": 1,
            }
            answer = post(
                server, "/completion", body | {"return_tokens": True, "cache_prompt": False}
            )
            equal += agrees(answer, prompt["greedy"])
        count = len(prompts)
        for what, number in (("tokenization equal", tokens), ("greedy tokens equal", equal)):
            checks.append(
                [
                    "llama.cpp",
                    f"{model['name']}: {what}",
                    f"{number} of {count} prompts",
                    number == count,
                ]
            )
    versions = {"llama.cpp": f"xllamacpp {version('xllamacpp')}"}
    Path(result).write_text(json.dumps({"versions": versions, "checks": checks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
