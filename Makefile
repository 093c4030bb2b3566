# `make serve` and `make test` set up everything they need: the first installs what serving needs,
# the second adds the tests' tools.
VENV := .venv
BIN := $(VENV)/bin
# Python code takes 1.4 times as long in a Python that pyenv built without optimizations, its default.
# Where python3 is such a build, the environment is made with the first of these that is not, if any;
# PYTHON= chooses another.
PYTHONS := python3 /usr/bin/python3 python3.13 python3.12 python3.11
ifeq ($(origin PYTHON)$(wildcard $(BIN)/python),undefined)
PYTHON := $(shell for python in $(PYTHONS); do \
	$$python engine/process/python_build.py 2>/dev/null && echo $$python && break; done)
endif
PYTHON := $(or $(PYTHON),python3)
ARGS ?=
CORES := $(shell getconf _NPROCESSORS_ONLN)
# How many test files run at a time: two more than cores, because tests with real servers often wait.
JOBS ?= $(shell expr $(CORES) + 2)

# Extras of pyproject.toml to install. Metal needs none. `make serve EXTRA=jit,mkl` adds MKL, which is a
# sixth faster than OpenBLAS.
ifeq ($(shell uname -s),Linux)
EXTRA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13,jit)
endif
comma := ,
CUDA := $(filter cuda12 cuda13,$(subst $(comma), ,$(EXTRA)))

# For the tests of dashboard and alerts: Debian's Prometheus, unpacked but not installed, so that no
# service starts. On other systems the tests use an installed Prometheus, or are skipped.
PROMETHEUS := $(if $(shell command -v apt-get),$(VENV)/prometheus)
# An allocator for the processes that run the tests, unpacked in the same way: MLX frees many small
# arrays in another thread than it allocated them in, which is slow in glibc.
TCMALLOC := $(if $(shell command -v apt-get),$(VENV)/tcmalloc)
APT := apt-get -qq -o APT::Sandbox::User=root

# For the tests of the page: Debian's Chromium, installed if we are root. Otherwise the tests use an
# installed Chromium, or are skipped.
ifeq ($(shell command -v chromium)$(filter-out 0,$(shell id -u)),)
CHROMIUM := $(if $(shell command -v apt-get),chromium)
endif
GET_CHROMIUM := DEBIAN_FRONTEND=noninteractive $(APT) install --yes --no-install-recommends \
	chromium fonts-dejavu-core >$(VENV)/chromium.log 2>&1

# Says in one line what the machine lacks. Older Pythons must be able to parse it.
define CHECK
import sys
if sys.version_info < (3, 11):
    sys.exit("Chairlift needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.13"
             % sys.version_info[:2])
import importlib.util
if importlib.util.find_spec("ensurepip") is None:
    sys.exit("$(PYTHON) makes no virtual environments: install python3-venv (Debian, Ubuntu)")
endef
export CHECK

# Installs the checkout with the extras $(1) by uv, with its flags $(2): it takes a fraction of pip's
# time. It does not read pip's settings, so where they are needed (a mirror of PyPI), pip installs.
# A plain install contains MLX's CPU backend, whose library has the same path as CUDA's: CUDA's has
# to be installed last, without the other.
define INSTALL
@$(BIN)/pip install --quiet uv || echo "there is no uv for this machine: pip installs, in minutes"
$(BIN)/uv pip install --quiet --python $(BIN)/python $(2) --editable '.$(if $(1),[$(1)])' \
	|| $(BIN)/pip install --quiet --editable '.$(if $(1),[$(1)])'
$(if $(CUDA),$(BIN)/pip uninstall --quiet --yes mlx-cpu)
$(if $(CUDA),$(BIN)/pip install --quiet --force-reinstall --no-deps $(CUDA:cuda%=mlx-cuda-%)==$$( \
	$(BIN)/python -c 'from importlib.metadata import version; print(version("mlx"))'))
endef

# Compiles the header of the kernels that MLX lets g++ compile for the CPU, with MLX's own flags: a
# kernel then takes a fifth of the time, and tests need a hundred.
define PRECOMPILE
for include in $(VENV)/lib/python3*/site-packages/mlx/include; do \
	header=$$include/mlx/backend/cpu/compiled_preamble.h; \
	if test -f $$header && command -v g++ >/dev/null; then \
		g++ -std=c++17 -O3 -Wall -fPIC -I $$include -x c++-header $$header \
			-o $$header.gch 2>/dev/null \
			|| echo "g++ cannot compile $$header in advance: the tests take a minute longer"; \
	fi; \
done
endef

# Unpacks Debian's package $(1) into the target's folder. If there is none, it says $(2).
define UNPACK
@rm -rf $@.deb && mkdir $@.deb
@(cd $@.deb && ($(APT) download $(1) || ($(APT) update && $(APT) download $(1))) \
	&& dpkg --extract $(1)_*.deb files && mv files ../$(@F)) || echo "$(2)"
@rm -r $@.deb
endef

# Each process takes whole files of tests. Python keeps what it compiles: the next run need not compile
# the tests again, which takes 6 s in each process.
PYTEST = LD_PRELOAD=$$(ls $(CURDIR)/$(VENV)/tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4 2>/dev/null) \
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --dist loadfile

# Stamp files. The one for serving is named after the extras, so that a change of EXTRA installs.
SERVE := $(VENV)/.serve$(if $(EXTRA),-$(EXTRA))
DEV := $(VENV)/.dev

.PHONY: serve test test-fast lint docs reference kernels dist conformance conformance-vision setup dev clean \
	chromium

setup: $(SERVE)

dev: $(DEV)

$(SERVE): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c "$$CHECK"
	@# An environment that works is kept: another Python would only replace half of it.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(call INSTALL,$(EXTRA),)
	@touch $@

$(DEV): $(SERVE)
	@# Hundreds of processes of the tests import the packages.
	$(call INSTALL,$(if $(EXTRA),$(EXTRA)$(comma))dev,--compile-bytecode)
	@$(if $(filter Linux,$(shell uname -s)),$(PRECOMPILE))
	@touch $@

serve: setup
	$(BIN)/chairlift serve $(ARGS)

test: dev $(PROMETHEUS) $(CHROMIUM) $(TCMALLOC)
	@# Hundreds of processes import these, and may not be allowed to keep what they compile.
	@$(BIN)/python -m compileall -q $(wildcard src/chairlift/*/) tests/support tests/conformance
	$(PYTEST) --numprocesses $(JOBS) $(ARGS)

# The inner loop: no servers, browsers or GPUs, and nothing that takes long.
test-fast: dev $(TCMALLOC)
	$(PYTEST) --numprocesses $(JOBS) -m 'not system and not slow and not gpu' $(ARGS)

$(VENV)/prometheus: | dev
	$(call UNPACK,prometheus,no Prometheus: tests of dashboard and alerts will be skipped)

$(VENV)/tcmalloc: | dev
	$(call UNPACK,libtcmalloc-minimal4,no tcmalloc: tests of the engine take a sixth longer)

chromium: | setup
	$(GET_CHROMIUM) || ($(APT) update && $(GET_CHROMIUM)) \
		|| echo "no Chromium: tests of the page will be skipped ($(VENV)/chromium.log)"

# Compares each of mlx-lm's model files, tiny and random, in a batch and alone. Takes minutes.
conformance: dev
	cd tests && ../$(BIN)/python -m conformance --out ../docs/reference/conformance.md $(ARGS)

# The same for mlx-vlm's types, with images.
conformance-vision: dev
	cd tests && ../$(BIN)/python -m conformance --vision --out ../docs/reference/vision-conformance.md $(ARGS)

# Generates the reference pages from the code's tables.
reference: dev
	$(BIN)/python -m chairlift.api.cli.reference >docs/reference/flags.md
	$(BIN)/python -m chairlift.api.server.reference >docs/reference/api.md
	$(BIN)/python -m chairlift.api.server.field_table >docs/reference/fields.md
	$(BIN)/python -m chairlift.engine.device.reference >docs/reference/defaults.md
	$(BIN)/python -m chairlift.metrics.reference >docs/reference/metrics.md

# Compiles all CUDA kernels, and writes what NVIDIA's compiler has made of each: the tests compile only
# those that have changed since. Takes minutes.
kernels: dev
	COMPILE_KERNELS=1 $(BIN)/pytest tests/engine/cuda/test_device_code.py

# Builds the documentation site into build/site; fails on a broken link.
docs: dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Builds an sdist, and a wheel from it, into dist.
dist: dev
	$(BIN)/python -m build

lint: dev docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=src $(BIN)/mypy -p chairlift
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) build dist *.egg-info
