# Both commands set themselves up: they need Python 3.11 to 3.13, pip, make and git.
PYTHON ?= python3
BIN := .venv/bin
# two at a time, each from its half of the files: tests of a file share what they built
TWO := -n 2 --dist worksteal

.PHONY: demo quick test test-survival test-models test-page test-plans test-gpu soak prove lint bench clean

demo: .venv/.server  ## build SmolLM2-135M and its drafter, serve them with Triton, show who wrote which token
	$(BIN)/python examples/demo.py

quick: .venv/.dev  ## tests of every room, about a minute
	$(BIN)/python -m pytest $(TWO) @tests/quick.txt

test: .venv/.dev  ## run the tests, against a real Triton server
	$(BIN)/python -m pytest $(TWO)

test-models: .venv/.dev  ## every model family and drafter format, and broken files
	$(BIN)/python -m pytest $(TWO) -m models

test-page: .venv/.page  ## the page in a real browser; Debian's chromium and chromedriver have to be there
	$(BIN)/python -m pytest -m page -rs tests/page

test-plans: .venv/.rtx  ## TensorRT plans, built without a GPU; installs NVIDIA's library
	$(BIN)/python -m pytest -m plans

test-gpu:  ## every test that needs an NVIDIA GPU; installs NVIDIA's libraries; writes build/gpu.xml, to send back
	@nvidia-smi -L || { echo 'make test-gpu needs an NVIDIA GPU with its driver, and here is none' >&2; exit 1; }
	$(MAKE) .venv/.rtx
	$(BIN)/python -m pytest -m gpu tests/gpu --junitxml build/gpu.xml

test-survival: .venv/.dev  ## what shows that the server survives: killed, hung and updated parts, restarts, draining
	$(BIN)/python -m pytest -m soak tests/serving

soak: .venv/.dev  ## the long tests: load, killed processes, hostile requests, clients of others, the pages
	$(BIN)/python -m pytest -m soak

prove: .venv/.dev  ## 20,000 texts of random pairs against their target, about an hour, and 2,000 requests to real servers; PROVE=2000 make prove: fewer texts
	$(BIN)/python -m tests.support.losslessness $${PROVE:-20000}
	$(BIN)/python -m tests.support.traffic 2000

lint: .venv/.dev  ## style, types and which room imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.server  ## measure the demo pair on this machine
	$(BIN)/dflash-trt build build_configs/pycode.yaml --output build/pycode
	$(BIN)/dflash-trt bench engine build/pycode

clean:
	rm -rf .venv build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.server: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[server,gguf]'
	touch $@

# torch on its own first: where pip knows a CPU build of it, the pinned version takes that one
.venv/.dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[server,dev]'
	touch $@

.venv/.page: .venv/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[page-tests]'
	touch $@

.venv/.rtx: .venv/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[rtx]'
	touch $@

