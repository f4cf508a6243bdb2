# make demo    trains the example model (CPU: 8 virtual devices; GPUs: our kernels)
# make test    builds the package and runs the test suite, on the GPUs if MOE_A2A_TEST_GPU=1
# make test-processes  runs the suite in NUM_PROCESSES=2 processes that share the devices
# make test-hosts      runs tests of two levels on CPUs, with each process as a host; as root, over TCP
# make fuzz    compares random exchanges on the portable path with the oracle, for SECONDS=600 from SEED=1
# make faults  injects RUNS=200 faults from SEED=1 into processes that exchange tokens
# make emulate         runs the kernels on the CPU as C++, with every mutation; needs only g++
# make emulate-quick   runs some sequences of each kind and a third of the mutations, as CI does
# make mutations       applies each change of tests/mutations/list.toml to a copy, whose test must fail
# make test-maxtext    trains MaxText's model with and without enable(); needs Python 3.12 and PyPI
# make sanitize        runs the host code over a fake driver under sanitizers
# make compiled        compiles programs for H100 GPUs without a GPU, and writes tests/compiled/table.txt
# make lint    runs ruff, clang-format, mypy, import-linter
# make docs    builds the documentation site into build/site, with warnings as errors
# make bench   runs python -m benchmarks
# make wheels  builds the files of a release into dist, for PYTHONS="python3.11 python3.12"
# make test-wheels     installs the wheels of dist into empty environments and runs them on the CPU
# make clean   removes environments and build folders
#
# Everything runs in a separate virtual environment in $(VENV), which make creates at the first use.
# With another Python:       make test PYTHON=python3.12 VENV=.venv312
# With installed packages:   make test VENV_FLAGS=--system-site-packages \
#                                      PIP_FLAGS="--no-build-isolation --no-deps"

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
PIP_FLAGS ?=
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# Without a GPU and nvcc, test the portable path, and do not build kernels with nvcc from PyPI.
ifndef MOE_A2A_CUDA
ifeq ($(or $(filter-out 0,$(GPUS)),$(shell command -v nvcc),$(CUDACXX),$(CUDA_PATH)),)
export MOE_A2A_CUDA := OFF
endif
endif
JAX ?= $(if $(filter-out 0,$(GPUS)),jax[cuda13],jax)
# Two workers suit the two cores of a small machine. A module runs in one worker, so XLA compiles its
# programs once. Processes do not share GPUs.
PYTEST_FLAGS ?= $(if $(MOE_A2A_TEST_GPU),-n 0,-n 2 --dist loadfile)
SECONDS ?= 600
SEED ?= 1
RUNS ?= 200
NUM_PROCESSES ?= 2
PYTHONS ?= python3.11 python3.12
SITE ?= build/site

BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard tools/backend.py tools/nvcc.py cuda/*.cc cuda/*.h cuda/*/*)

.PHONY: demo test test-processes test-hosts test-maxtext fuzz faults emulate emulate-quick mutations sanitize compiled \
  lint docs bench wheels test-wheels clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python examples/train_moe.py

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-processes: $(VENV)/.test
	$(BIN)/python -m tests.processes $(NUM_PROCESSES) -- -q

test-hosts: $(VENV)/.test
	for form in '2 4' '2 8' '4 8'; do \
	  $(BIN)/python -m tests.processes $${form% *} --devices $${form#* } \
	    $(if $(filter 0,$(shell id -u)),--as-hosts) -- -q tests/test_two_level.py || exit 1; \
	done

fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

faults: $(VENV)/.test
	$(BIN)/python -m tests.faults --runs $(RUNS) --seed $(SEED)

emulate:
	$(PYTHON) -m tests.emulation

emulate-quick: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/test_emulation.py

mutations: $(VENV)/.test
	$(BIN)/python -m tests.mutations

sanitize:
	$(PYTHON) -m tests.emulation --host

compiled: $(VENV)/.test build/compiled/.installed
	$(BIN)/python -m tests.compiled --write

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find cuda tests/emulation tools benchmarks -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' \
	  | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/lint-imports

# mkdocs makes the API pages from the sources, so this target does not build the package.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --site-dir $(SITE)

wheels: $(VENV)/.release
	rm -rf dist
	$(BIN)/python tools/wheels.py $(PYTHONS)
	$(BIN)/python -m twine check --strict dist/*

test-wheels: $(VENV)/.test
	MOE_A2A_WHEELS=dist MOE_A2A_WHEEL_PYTHONS="$(PYTHONS)" $(BIN)/python -m pytest tests/test_wheels.py

# MaxText needs Python 3.12 or newer, and certain versions of its requirements.
MAXTEXT_VENV ?= .venv-maxtext
test-maxtext: $(MAXTEXT_VENV)/.made
	$(MAXTEXT_VENV)/bin/python -m pytest -q --noconftest tests/maxtext/training.py

$(MAXTEXT_VENV)/.made: tests/maxtext/requirements.txt
	$(PYTHON) -m venv $(MAXTEXT_VENV)
	$(MAXTEXT_VENV)/bin/python -m pip install -q --no-deps -r $<
	touch $@

bench: $(VENV)/.demo
	$(BIN)/python -m benchmarks

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	touch $@

# Without a GPU, the demo builds no kernels, even if the tests need them. If the tests have built
# kernels before, the demo keeps them.
ifeq ($(MOE_A2A_CUDA)$(filter-out 0,$(GPUS))$(wildcard $(VENV)/.test),)
$(VENV)/.demo: export MOE_A2A_CUDA := OFF
endif

# Each stamp means an editable install of the package with the extra of that name. For the demo, pip
# does not compile modules to bytecode, because the demo imports only some of them.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: $(SOURCES) | $(VENV)/.made
	$(BIN)/python -m pip install -q $(if $(filter demo,$*),--no-compile) $(PIP_FLAGS) '$(JAX)' -e '.[$*]'
	$(BIN)/python -c "import jax; from jax_moe_a2a._src.group import native; \
	  print(f'jax {jax.__version__}; CUDA kernels: {native.cuda_build() or None}')"
	touch $@

# The checkers also need the extra `test`, because mypy reads the types of imported packages.
$(VENV)/.dev: pyproject.toml | $(VENV)/.test
	$(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['dev'])" \
	  | xargs $(BIN)/python -m pip install -q
	touch $@

# XLA for GPUs needs a separate folder, because jax in $(VENV) would find it and look for GPUs.
build/compiled/.installed: pyproject.toml | $(VENV)/.made
	rm -rf $(@D)
	$(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['compiled'])" \
	  | xargs $(BIN)/python -m pip install -q --no-deps --target $(@D)
	touch $@

# These tools do not need the package, so make does not install it.
$(VENV)/.docs $(VENV)/.release: $(VENV)/.%: pyproject.toml | $(VENV)/.made
	$(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$*'])" \
	  | xargs $(BIN)/python -m pip install -q
	touch $@

clean:
	rm -rf build dist .venv .venv3?? .venv-maxtext .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
