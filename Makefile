# The commands of this repository; `make help` lists them. They use .venv, made on first need; the tests of the lowest
# supported versions have separate environments.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OLDEST := .venv-oldest
QUICK := .venv-oldest-quick
NEWEST := .venv-newest
TRITON := .venv-triton
TORCHAO := .venv-torchao
HARNESS := .venv-harness
TRAINERS := .venv-trainers
PYTEST_ARGS ?=
BENCH_ARGS ?=
AUTOMODEL_TOOL ?=
MUTANTS_ARGS ?= automodel_ckpt/data tests/unit/data
INTEROP_ARGS ?=
RECIPES_ARGS ?=
PART ?=
GPU_ARGS ?=
QUICK_TESTS := tests/unit/config tests/unit/data tests/unit/models tests/unit/parallel tests/unit/cli tests/unit/hub
# Older versions of transformers load the adapters of classifiers differently.
QUICK_TESTS += tests/contract/test_classification.py
# The processors of images in these tests need torchvision with the oldest transformers, and its wheels need torch with CUDA.
QUICK_TESTS += $(patsubst %,--ignore=%,tests/unit/data/builders/test_vlm.py tests/unit/data/builders/test_audio.py tests/unit/models/building/test_vision.py tests/unit/models/building/test_processor.py tests/unit/models/building/test_image_rows.py)

# Trainings on several ranks are left to `make test`, apart from those of the recipe itself.
DOORS := tests/contract tests/golden tests/hostile tests/unit tests/distributed/kinds/test_training.py

# Each file's tests in one process: those of a module share what its fixtures make. Many tests wait for processes that
# sleep, hang or time out, so that four processes keep two cores busy.
WORKERS := -n 4 --dist loadfile --no-loadscope-reorder

# Every target here is a command, no file.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt tools/setup_venv.sh
	@echo "preparing $(VENV) (the first time this downloads torch and transformers)"
	@PYTHON="$(PYTHON)" tools/setup_venv.sh $(VENV)
	@touch $@

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt tools/setup_venv.sh
	@echo "preparing $(OLDEST) (downloads the lowest supported versions; torch of several GB where only its CUDA build is found)"
	@PYTHON="$(PYTHON)" tools/setup_venv.sh $(OLDEST) constraints-oldest.txt test,archive,compressed-tensors,gguf,s3,vision torchvision
	@touch $@

# torch is the one of constraints.txt: the oldest one would be most of the download.
$(QUICK)/.ready: pyproject.toml constraints.txt constraints-oldest.txt tools/setup_venv.sh
	@echo "preparing $(QUICK) (downloads the lowest supported versions of all but torch)"
	@{ grep -v '^torch' constraints-oldest.txt; grep '^torch==' constraints.txt; } > $(QUICK).txt
	@PYTHON="$(PYTHON)" tools/setup_venv.sh $(QUICK) $(QUICK).txt test,archive,compressed-tensors,gguf,s3,vision
	@touch $@

# No file of it is a prerequisite: new versions appear without a change here. Remove the environment to install them.
$(NEWEST)/.ready:
	@echo "preparing $(NEWEST) (downloads the newest versions that pyproject.toml allows; torch of several GB where only its CUDA build is found)"
	@: > $(NEWEST).txt
	@PYTHON="$(PYTHON)" tools/setup_venv.sh $(NEWEST) $(NEWEST).txt test,archive,compressed-tensors,gguf,s3,vision
	@touch $@

install: $(STAMP)  ## ckpt-train and ckpt in .venv, with the tested versions: source .venv/bin/activate

demo: $(STAMP)  ## train, kill, resume, export: about three minutes
	@$(BIN)/python -m tools.demo

demo-vlm: $(STAMP)  ## train a small LLaVA to read digits, and ask its export: a few minutes
	@$(BIN)/python -m tools.demo_vlm

picture: demo  ## draw the loss of the demo's run for the README
	@$(BIN)/ckpt plot runs/demo/killed -o docs/images/loss.svg

test: $(STAMP)  ## the tests, offline, about eight minutes on two cores
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m "not further" $(WORKERS) $(PYTEST_ARGS)

test-doors: $(STAMP)  ## the tests through command lines, public names and files that take seconds: three minutes on two cores
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m "doors and not further and not slow" $(WORKERS) $(DOORS) $(PYTEST_ARGS)

test-all: $(STAMP)  ## the tests of `make test`, with further cases of some: seven minutes more
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q $(WORKERS) $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.ready  ## every test with the lowest versions that pyproject.toml allows: needs a registry once
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest -q $(WORKERS) $(PYTEST_ARGS)

test-oldest-quick: $(QUICK)/.ready  ## unit tests, and those of classifiers, with the lowest versions of all but torch: four minutes
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(QUICK)/bin/python -m pytest -q $(WORKERS) $(QUICK_TESTS)

test-newest: $(NEWEST)/.ready  ## every test with the newest versions that pyproject.toml allows: needs a registry once
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(NEWEST)/bin/python -m pytest -q $(WORKERS) $(PYTEST_ARGS)

check: $(STAMP)  ## formatting, lint and strict types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(STAMP)  ## format the code and sort its imports
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(STAMP)  ## time to the first step; cost of saving, loading and consolidating beside plain reads, writes and cp (12 GB of disk)
	@$(BIN)/python -m tools.bench.startup
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.checkpoint --docs $(BENCH_ARGS)
	@$(MAKE) --no-print-directory bench-async

bench-async: $(STAMP)  ## what asynchronous saves cost the training beside them, ours and torch's (6 GB of disk)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.async_saves --docs $(BENCH_ARGS)

bench-loop: $(STAMP)  ## the training loop beside a bare one, accelerate and Trainer: about 40 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.loop --docs $(BENCH_ARGS)

bench-loss: $(STAMP)  ## time and memory of the loss head beside full logits: three minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench.loss_head --docs $(BENCH_ARGS)

# Only CUDA builds of torch depend on Triton. The interpreter of Triton 3.6 fails with numpy 2.4.
$(TRITON)/.ready: $(STAMP)
	@$(BIN)/python -m pip install --quiet --target $(TRITON) --no-deps "triton>=3.7"
	@touch $@

kernels: $(TRITON)/.ready  ## the Triton kernels, interpreted on the CPU and compiled for GPUs: a minute
	@TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/unit/models/loss/test_loss_kernels.py tests/unit/models/layers/test_gate_kernels.py tests/unit/models/layers/test_rotary_kernels.py tests/unit/training/optim/test_adamw_kernel.py tests/unit/training/optim/test_adam8bit_kernel.py

# Without $(STAMP): the machine may have no network (tools/gpu/README.md).
gpu:  ## tests and measurements on one GPU, 30 minutes; a part alone: make gpu PART=lora
	@bash tools/gpu/run.sh $(PART) $(GPU_ARGS)

gpu-dry-run: $(STAMP)  ## the same code with tiny models on the CPU: a minute
	@PYTHON=$(BIN)/python bash tools/gpu/run.sh --dry-run $(PART) $(GPU_ARGS)

gpu-wheels: $(STAMP)  ## download what the reference machine lacks into .gpu-wheels
	@PYTHON=$(BIN)/python bash tools/gpu/wheels.sh

$(TORCHAO)/.ready: $(STAMP)
	@$(BIN)/python -m pip install --quiet --target $(TORCHAO) --no-deps "torchao>=0.18"
	@touch $@

fp8: $(TORCHAO)/.ready  ## training in FP8 and 8-bit moments with torchao, emulated on the CPU: two minutes
	@PYTHONPATH=$(TORCHAO) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -W ignore \
	    tests/distributed/models/test_fp8.py tests/unit/training/optim/test_adam8bit.py tests/unit/training/runs/test_param_groups.py

# Prints the line of a .pth file by which another environment has the packages of .venv, and the editable one.
PACKAGES_OF_VENV := import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')

$(HARNESS)/.ready: $(STAMP)
	@$(BIN)/python -m venv $(HARNESS)
	@$(BIN)/python -c "$(PACKAGES_OF_VENV)" > $$(echo $(HARNESS)/lib/python*/site-packages)/trainer.pth
	@$(HARNESS)/bin/python -m pip install --quiet "lm_eval>=0.4.13"
	@touch $@

harness: $(HARNESS)/.ready  ## `ckpt eval` and `evaluation.harness` with lm-evaluation-harness and local tasks: two minutes
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(HARNESS)/bin/python -m pytest -q tests/unit/cli/test_eval.py tests/contract/test_benchmarks.py

$(TRAINERS)/.ready: $(STAMP)
	@$(BIN)/python -m venv $(TRAINERS)
	@$(BIN)/python -c "$(PACKAGES_OF_VENV)" > $$(echo $(TRAINERS)/lib/python*/site-packages)/trainer.pth
	@$(TRAINERS)/bin/python -m pip install --quiet -c constraints.txt trl lightning
	@touch $@

trainers: $(TRAINERS)/.ready  ## what kills cost in Trainer, TRL and Lightning, with their checkpoints and ours, and the guide's examples: an hour
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TRAINERS)/bin/python -m pytest -q tests/unit/integrations/test_lightning_callback.py
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TRAINERS)/bin/python -m pytest -q tests/contract/repository/test_docs.py -k library
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TRAINERS)/bin/python -m tools.trainers --write

crash: $(STAMP)  ## kills, power cuts (as root), faults, flipped bits, endurance, signals, and what others keep: about an hour and a half
	@for campaign in "kill --points 2500" "kill-async --points 300" "kill-incremental --points 300" "power-incremental --points 200" "power --points 2000" "faults --points 5000" "flips --points 10000" "endurance --points 50" \
	    "signals --points 120" "baseline --points 300"; do $(BIN)/python -m tools.crash $$campaign || failed=1; done; \
	    ASYNC_SAVES=200 $(BIN)/python -m pytest -q -k many_saves tests/unit/checkpoint/jobs/test_background.py || failed=1; exit $${failed:-0}

remote-points: $(STAMP)  ## kill and fault at every request of uploads to stores and to the Hub: half an hour
	@REMOTE_POINTS=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q --timeout 3600 \
	    tests/unit/hub/test_kills.py tests/unit/checkpoint/remote/test_remote.py tests/unit/checkpoint/remote/test_remote_writers.py

hostile: $(STAMP)  ## every attack on every reader of a checkpoint, and every callable as `_target_`: half an hour
	@HOSTILE=all OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 3 --dist worksteal --timeout 1800 tests/hostile

reference: $(STAMP)  ## write docs/reference from the code
	@$(BIN)/python -m tools.make_reference

reshard: $(STAMP)  ## every layout of 1, 2 and 4 ranks loads what every other saved, in each format; 3000 random layouts: ten minutes
	@RESHARD=full RESHARD_LAYOUTS=3000 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q --timeout 1800 \
	    tests/distributed/resume/test_reshard.py tests/distributed/saves/test_planner.py

random-recipes: $(STAMP)  ## recipes with random options: trained, stopped, resumed on as many ranks and others, exported: two hours
	@$(BIN)/python -m tools.random_recipes $(RECIPES_ARGS)

trees: $(STAMP)  ## every kind of training in every format and layout, on one rank and two: files and resumes; all image families: ten minutes
	@AUTOMODEL_CKPT_ALL_TREES=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q --timeout 1800 \
	    tests/contract/repository/test_trees.py tests/distributed/kinds/test_vlm.py

mutants: $(STAMP)  ## change the code in 40 places and count what no test notices: MUTANTS_ARGS="automodel_ckpt/data tests/unit/data"
	@$(BIN)/python -m tools.mutants $(MUTANTS_ARGS)

clients: $(STAMP)  ## vLLM, llama.cpp and AutoModel load our exports: part of `make interop`, half an hour, 8 GB in .peers
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.interop automodel compressed_tensors llama_cpp

interop: $(STAMP)  ## Trainer, Lightning, DeepSpeed and others write checkpoints that we read, and read ours: an hour, 20 GB in .peers
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.interop $(INTEROP_ARGS)

clean:  ## remove .venv, caches and what the demo wrote
	rm -rf $(VENV) $(OLDEST)* $(NEWEST)* $(TRITON) $(TORCHAO) $(HARNESS) $(TRAINERS) .peers .gpu-wheels runs bases build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
