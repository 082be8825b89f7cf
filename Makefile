# Everything that a fresh Debian or Ubuntu with Python >= 3.11 and make needs: `make demo`, `make test`.
.DELETE_ON_ERROR:
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# SGLang's own environment. Elsewhere than beside .venv, say so to trials: sglang.python, or a link .venv-sglang.
SGLANG_VENV ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
# The one of environments of verifiers. Elsewhere: rollout.environment.python, or a link .venv-environments.
ENVIRONMENTS_VENV ?= .venv-environments
ENVIRONMENTS_STAMP := $(ENVIRONMENTS_VENV)/.installed
EXAMPLE_ENVIRONMENTS := $(wildcard examples/environments/*)
# `make recipes`: BACKEND=sglang has SGLang answer, RECIPES="tools program" runs those alone, and no algorithms.
BACKEND ?= hf
RECIPES ?=
RECIPES_NEED_sglang := sglang
MEGATRON_STAMP := $(VENV)/.installed-megatron
MLFLOW_STAMP := $(VENV)/.installed-mlflow
# `make gpu`: DEVICE=cpu tries its steps out; WHEELS=DIR runs it without a network on top of PYTHON, which has torch.
DEVICE ?= cuda
WHEELS ?=
WHEELS_PYTHON ?= 3.12
GPU_VENV := build/gpu-venv
# Tests wait for timers as much as they compute: six processes of them keep two cores busy.
TEST_PROCESSES ?= 6
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# A process has a pretended GPU or none: what is marked gpu runs by itself, in one process beside the others.
PYTEST_GPU := $(BIN)/python -m pytest --numprocesses 1 --dist loadfile -p tests.pretended_gpu.installed \
	tests/gpu tests/pretended_gpu tests/workers/backends/test_chunked_head.py
export OMP_NUM_THREADS ?= 1
# Some containers forbid byte code; then each of the test processes would compile all tests, at every run.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup sglang environments megatron mlflow lock setup-slurm demo recipes quantized test test-cpu test-pretended-gpu test-all test-slurm test-fast lint typecheck docs bench gpu wheels damage clean

setup: $(STAMP)  ## create .venv and install corral with its development tools

$(STAMP): pyproject.toml setup.py .ci/lock.txt
	@sh .ci/make-venv "$(PYTHON)" "$(VENV)"
	$(BIN)/pip install --quiet --constraint .ci/lock.txt --editable '.[dev]'
	@touch $@

sglang: $(SGLANG_STAMP)  ## install SGLang in an environment of its own, for its GPUs or without any

$(SGLANG_STAMP): .ci/make-sglang .ci/sglang-cpu.txt
	@sh .ci/make-sglang "$(PYTHON)" "$(SGLANG_VENV)"
	@touch $@

environments: $(ENVIRONMENTS_STAMP)  ## install verifiers in an environment of its own, with the example environments

$(ENVIRONMENTS_STAMP): .ci/make-environments .ci/environments.txt $(wildcard examples/environments/*/*.py)
	@sh .ci/make-environments "$(PYTHON)" "$(ENVIRONMENTS_VENV)" $(addprefix ./,$(EXAMPLE_ENVIRONMENTS))
	@touch $@

megatron: $(MEGATRON_STAMP)  ## add megatron-core to .venv, for layouts with megatron:

$(MEGATRON_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint .ci/lock.txt --editable '.[megatron]'
	@touch $@

mlflow: $(MLFLOW_STAMP)  ## add MLflow to .venv, for the tracker of this name

$(MLFLOW_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint .ci/lock.txt --editable '.[mlflow]'
	@touch $@

lock: setup megatron mlflow  ## write the versions in .venv, which the tests passed with, into .ci/lock.txt
	@sh .ci/write-lock $(BIN)/python >.ci/lock.txt.new && mv .ci/lock.txt.new .ci/lock.txt

setup-slurm:  ## install the SLURM daemons that the tests start, a compiler, bubblewrap and Chromium (Debian and Ubuntu)
	@sh .ci/install-slurm

demo: setup  ## train a tiny language model to add: SFT, then asynchronous GRPO, on this machine
	@BIN="$(BIN)" sh experiments/recipes/demo.sh

recipes: setup environments $(RECIPES_NEED_$(BACKEND))  ## train every recipe on this machine, and say in one table whether each moves what it should
	@$(BIN)/python benchmarks/run_recipes.py --backend $(BACKEND) $(RECIPES)

quantized: setup  ## train with makers that round their weights beside makers that do not: half an hour
	$(BIN)/python benchmarks/quantized_makers.py

test: setup sglang environments megatron setup-slurm lint  ## what must hold; what CI runs
	@$(MAKE) --no-print-directory -j2 test-cpu typecheck test-pretended-gpu

test-pretended-gpu: setup megatron
	$(PYTEST_GPU) -m 'gpu and not slow'

test-cpu: setup sglang environments megatron
	CORRAL_REQUIRE_SLURM=1 $(PYTEST) -m 'not slow and not gpu'

test-all: setup sglang environments megatron mlflow setup-slurm lint typecheck  ## also what takes long and shows little more
	CORRAL_REQUIRE_SLURM=1 $(PYTEST) -m 'not gpu'
	$(PYTEST_GPU) -m gpu

test-slurm: setup sglang $(if $(SLURM_ROOT),,setup-slurm)  ## the SLURM tests; SLURM_ROOT=DIR: by the SLURM of a Debian tree (see CONTRIBUTING)
	@if [ -n "$(SLURM_ROOT)" ]; then \
		tests/slurm/make_root.sh "$(SLURM_ROOT)" && set -- tests/slurm/in_root.sh "$(SLURM_ROOT)" || exit; \
	fi; \
	CORRAL_REQUIRE_SLURM=1; export CORRAL_REQUIRE_SLURM; "$$@" $(PYTEST) tests/slurm

test-fast: setup sglang environments megatron  ## without SLURM and without whole trials
	$(PYTEST) -m 'not slow and not slurm and not gpu' --ignore tests/integration
	@$(MAKE) --no-print-directory test-pretended-gpu

lint: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

typecheck: setup
	@MYPY="$(BIN)/mypy" sh tests/typecheck.sh

docs: setup  ## write docs/configuration.md from the schema
	$(BIN)/python -m tests.configuration_reference --write docs/configuration.md

bench: setup  ## the benchmarks; each prints ratios from one run
	$(BIN)/python benchmarks/generation_throughput.py
	$(BIN)/python benchmarks/ragged_batch.py --rounds 1
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/train_throughput.py
	$(BIN)/python benchmarks/head_memory.py --vocabulary 32000 --tokens 2048 8192 --limit-gb 2
	$(BIN)/python benchmarks/load_memory.py --ranks 2 --layers 4 --files 2
	$(BIN)/python benchmarks/sandbox.py --runs 100
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/bad_input.py
	$(BIN)/python benchmarks/status_latency.py --finished 50 --running 2
	$(BIN)/python benchmarks/redistribution.py
	$(BIN)/python benchmarks/trajectory_path.py
	$(BIN)/python benchmarks/manager_load.py --servers 64 --workers 64 --groups 1000 --life-s 10 --seconds 10
	$(BIN)/python benchmarks/restart_time.py --kills 3 --local
	$(BIN)/python benchmarks/memory_growth.py --steps 200
	$(BIN)/python benchmarks/commit.py
	$(BIN)/python benchmarks/books.py --samples 100000 --rows 30000 --commits 10000
	$(BIN)/python benchmarks/many_rows.py --rows 100000
	$(BIN)/python benchmarks/weight_update.py
	$(BIN)/python benchmarks/update_gap.py
	$(BIN)/python benchmarks/async_gain.py
	$(BIN)/python benchmarks/with_and_without.py --steps 10
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/timeline_cost.py
	$(BIN)/python benchmarks/staging.py --rounds 3
	$(BIN)/python benchmarks/control_plane.py --ranks 16 64 --samples 512 --steps 2 --idle-s 2
	$(BIN)/python benchmarks/split_placement.py

gpu:  ## on a GPU: tests, MFU, SGLang, the arithmetic trial, a page of each in gpu-reports/; ARGS="--only tests": one
	@sh .ci/need-gpu $(DEVICE)
	@if [ -n "$(WHEELS)" ]; then sh .ci/gpu-venv "$(PYTHON)" $(GPU_VENV) "$(WHEELS)" $(DEVICE); else $(MAKE) --no-print-directory megatron; fi
	@$(if $(WHEELS),$(GPU_VENV)/bin,$(BIN))/python -m benchmarks.gpu --device $(DEVICE) $(ARGS)

wheels:  ## fetch into wheels/ what `make gpu WHEELS=wheels` needs on a machine with WHEELS_PYTHON and without a network
	@$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest wheels --python-version $(WHEELS_PYTHON) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_26_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 --requirement .ci/gpu-wheels.txt

damage: setup  ## damage every file of a trial in every way, resume it each time, and print what follows
	$(BIN)/python -m tests.damage.table

clean:
	rm -rf $(VENV) build *.egg-info
