# Each target sets up .venv by itself: all that is needed is Python 3.11 or newer, with pip (`make PYTHON=python3.12`).
PYTHON ?= python3
PY := .venv/bin/python
# Marks of what .venv has: what trains, and all that tests and rules need.
TRAINS := .venv/.trains
READY := .venv/.ready
# uv, where it is there, or else pip, which also goes on where uv fails: it does not read pip's configuration. Neither
# compiles what no run imports, most of it.
UV := $(shell command -v uv)
install = { $(if $(UV),$(UV) pip install --quiet --python $(PY) $(1) || )$(PY) -m pip install --quiet --no-compile $(1); }
export OMP_NUM_THREADS := 1
# Where it is set, each of many processes compiles all modules anew.
export PYTHONDONTWRITEBYTECODE :=
# A worker for each of two cores: each one collects all tests and imports torch by itself, half a minute of a processor,
# more where nothing is compiled yet. Each group of tests goes to one of them, the longest first (tests/conftest.py).
PARALLEL := --numprocesses 2 --dist loadgroup --no-loadscope-reorder

.PHONY: train test test-all gpu-rules chat-oracle test-slurm test-ray-chaos test-image image lint house
# buildah and docker read the same file; IMAGE_OPTIONS="--build-arg DEVICE=cpu", say
BUILDER ?= $(firstword $(foreach tool,docker buildah,$(if $(shell command -v $(tool)),$(tool))))
IMAGE ?= elastic-platform:0.1.0
CHAT_ORACLE := trl==1.16.0 transformers==5.23.0

train: $(TRAINS)  ## a small GPT on real text, 4 workers, about two minutes
	$(PY) -m platform.launch +experiment=gpt_quick run.dir=runs/gpt_quick

test: $(READY)  ## a pairwise cover of every matrix
	$(PY) -m pytest $(PARALLEL) -m "not full"

test-all: $(READY)  ## the whole product of every matrix
	$(PY) -m pytest $(PARALLEL)

gpu-rules: $(READY)  ## all that GPUs demand and a machine without one can show; Triton is installed under build/
	test -d build/triton || $(PY) -m pip install --quiet --no-deps --target build/triton "$$(sed -n 's/^gpu-rules = \["\([^"]*\)"\].*/\1/p' pyproject.toml)"
	PYTHONPATH=build/triton $(PY) -m pytest $(PARALLEL) -rs tests/gpu_rules

chat-oracle: $(READY)  ## what transformers makes of trl's chat templates, written anew under tests/; both under build/
	test -d build/chat_oracle || $(PY) -m pip install --quiet --no-deps --target build/chat_oracle $(CHAT_ORACLE)
	$(PY) -m tests.data.chat_oracle build/chat_oracle

test-slurm: $(READY)  ## jobs in a real Slurm in namespaces; installs nothing, and says what is missing
	$(PY) -m pytest -n0 -rs tests/testbed/test_slurm_nodes.py tests/testbed/test_slurm_runs.py

image:  ## the image of jobs
	$(if $(BUILDER),,$(error needs docker or buildah))
	$(BUILDER) build -t $(IMAGE) $(IMAGE_OPTIONS) .

test-ray-chaos: $(READY)  ## a run in a real Ray cluster that is struck a hundred times; about an hour (RAY_FAULTS, RAY_SEED)
	RAY_FAULTS=$${RAY_FAULTS:-100} $(PY) -m pytest -n0 -rs -s tests/testbed/test_ray_chaos.py

test-image: $(READY)  ## nightly: the image of jobs, built by buildah on a base of debootstrap, without a registry
	$(PY) -m pytest -n0 -rs tests/jobs/test_image.py

lint: $(READY)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	.venv/bin/lint-imports

house: $(READY)  ## figures of the tree: files, lines, names
	$(PY) -m tests.house.figures

# torch by pip, whose configuration says where its wheel is: with CUDA or without.
$(TRAINS): pyproject.toml requirements.txt $(wildcard platform/_startup.*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@echo "installing what trains into .venv: a minute or two, once"
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --no-compile "$$(grep ^torch== requirements.txt)"
	$(call install,$$(grep -E '^(editables|hatchling)==' requirements.txt))
	$(call install,--constraint requirements.txt --no-build-isolation --editable .)
	touch $@

$(READY): $(TRAINS)
	@echo "installing what tests need into .venv: about a minute, once"
	$(call install,--constraint requirements.txt --no-build-isolation --editable '.[dev]')
	touch $@
