# make demo, make test: each sets up a virtual environment first if there is none.
PYTHON ?= python3
VENV ?= .venv
# Installed before the rest, so that a CPU machine gets no CUDA packages. Override for a GPU: make setup TORCH=torch
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: setup demo test test-fast check format docs bench bench-overhead bench-retrieval bench-gpu test-gpu test-kernels test-vllm test-ray clean

setup: $(VENV)/.ready

# What users need: the library, its embedded model, and what is compiled once.
$(VENV)/.installed: pyproject.toml
	@echo "Setting up: fetches 500 MB of packages and the embedded model, compiles; two to five minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable .
	$(BIN)/slipstream prepare
	touch $@

# What tests and checks need besides.
$(VENV)/.ready: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/slipstream demo

# Two processes of one thread each: threads that wait for each other lose on small models, and most on a busy machine.
# In the order of the files' names, since those that take long are at the beginning: no process waits for the other.
# Bytecode is kept, also where the environment says otherwise: from the second run on it saves 6 s of each start.
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST)

# For the inner loop: tiny models alone.
test-fast: setup
	$(PYTEST) -m "not slow"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The API reference, as pages in build/api.
docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/python docs/api.py build/api

# Under 10 minutes on 2 cores. For the whole set: slipstream bench --html report.html
bench: setup
	HF_HUB_OFFLINE=1 $(BIN)/slipstream bench --limit 16 --max-new-tokens 64 --repeats 2 --html report.html

# The datastore on 100M tokens of code. The first time it fetches 300 MB of packages and tokenises them: some minutes.
bench-retrieval: setup
	$(BIN)/python bench/retrieval.py

bench-overhead: setup
	HF_HUB_OFFLINE=1 $(BIN)/python bench/overhead.py

# Like test-gpu, in the current Python.
bench-gpu:
	PYTHONPATH=src HF_HUB_OFFLINE=1 $(PYTHON) bench/gpu.py

# Runs in the current Python, since a GPU machine brings its own torch. `make test` leaves these tests out.
test-gpu:
	PYTHONPATH=src HF_HUB_OFFLINE=1 $(PYTHON) -m pytest --override-ini addopts="-q --tb=short" tests/gpu tests/kernels

# The kernels without a GPU, in Triton's interpreter: some minutes. It multiplies by numpy, whose OpenBLAS rounds a row by
# its place in the matrix on some CPUs, but not with its kernels for this one.
test-kernels: setup
	$(BIN)/pip install --quiet 'triton>=3.7'
	OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 $(PYTEST) --override-ini addopts="-q -rs" --dist worksteal tests/kernels

# The proposer inside vLLM, in a virtual environment of its own: 3.5 GB, some minutes the first time.
VLLM ?= .venv-vllm
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

$(VLLM)/.ready: tests/vllm/environment.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python tests/vllm/environment.py $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(VLLM)/bin/pip install --quiet 'pytest>=8' 'gguf>=0.17'
	$(VLLM)/bin/pip install --quiet --no-deps --editable .
	touch $@

# Without the suite's conftest.py, which is about what is not installed there. What numba compiles is kept apart, since
# its version is another one.
test-vllm: $(VLLM)/.ready
	HF_HUB_OFFLINE=1 NUMBA_CACHE_DIR=$(abspath $(VLLM))/numba $(VLLM)/bin/python -m pytest --noconftest --override-ini addopts="-q -rs" tests/vllm

# Clusters on this machine, in an environment of their own beside that of the other tests: two minutes.
test-ray: setup
	$(PYTHON) -m venv build/ray
	echo "$$(cd $(VENV) && pwd)/lib/python$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages" \
		> "$$(build/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/tests.pth"
	build/ray/bin/pip install --quiet 'ray>=2.40'
	PYTHONPATH=src:tests:tests/ray HF_HUB_OFFLINE=1 build/ray/bin/python -m pytest --override-ini addopts="-q" tests/ray

clean:
	rm -rf $(VENV) $(VLLM) build dist .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
