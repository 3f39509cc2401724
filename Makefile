# make setup   .venv with everything (VENV=... another place, TORCH_SPEC=... another torch)
# make demo    the whole job on this machine, offline after setup
# make demo-islands  two coordinators train one model together (Linux x86-64: torchft for the lighthouse)
# make test    lint, types and the whole suite
# make lines   how many lines each room of the package has
# make faults  what breaks, with its figures
# make long    all other tests that take longer, and where torchft is more of those of islands
# make islands real islands with torchft's lighthouse: kills at every point (Linux x86-64)
# make lowest   the unit tests and the demo with the oldest versions that pyproject.toml permits
# make emulated  the CUDA code on an emulated device (Linux, a C++ compiler)
# make dist    sdist and wheel, checked; the demo of the installed wheel, in an environment of its own
# make docs    the documentation's site, under build/site
# make bench   the benchmarks, 10 minutes; results under benchmarks/results

PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
PYTEST_ARGS ?=

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
STAMP := $(VENV)/.hetero-setup

.PHONY: setup demo demo-islands test lint lines faults long islands lowest emulated dist docs bench clean

setup: $(STAMP)

# torch first: with it installed, nothing that follows pulls another (and larger) build of it.
$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH_SPEC)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(BIN)/python -c "import pathlib; pathlib.Path('$(STAMP)').touch()"

demo: setup
	$(BIN)/python examples/demo.py

# The optional engine of membership; it brings packages that nothing else here needs.
ISLANDS := $(VENV)/.hetero-islands
$(ISLANDS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[islands]"
	$(BIN)/python -c "import pathlib; pathlib.Path('$(ISLANDS)').touch()"

demo-islands: $(ISLANDS)
	$(BIN)/python examples/demo_islands.py

lines: setup
	$(BIN)/python docs/lines.py

lint: setup lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(PYTEST_ARGS)

faults: setup
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m "faults and not alone" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "faults and alone" $(PYTEST_ARGS)

long: setup
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m long $(PYTEST_ARGS)

islands: $(ISLANDS)
	$(BIN)/python -m pytest -m "islands and not long" $(PYTEST_ARGS)

# pip has no way to ask for the oldest versions; uv has.
LOWEST := $(VENV)-lowest
LOWEST_BIN := $(LOWEST)/$(notdir $(BIN))
lowest:
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST_BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST_BIN)/python -m uv pip install --python $(LOWEST) --resolution lowest-direct --editable ".[dev]"
	$(LOWEST_BIN)/python -m pytest -n 2 --dist loadgroup tests/unit $(PYTEST_ARGS)
	$(LOWEST_BIN)/python examples/demo.py

emulated: setup
	$(BIN)/python -m pytest -m "emulated or not emulated" tests/unit/test_emulated_device.py $(PYTEST_ARGS)

# The demo runs elsewhere, since Python would import the sources of the current directory.
DIST := $(VENV)-dist
DIST_BIN := $(abspath $(DIST)/$(notdir $(BIN)))
dist:
	$(PYTHON) -c "import shutil; shutil.rmtree('dist', ignore_errors=True)"
	$(PYTHON) -m venv --clear $(DIST)
	$(DIST_BIN)/python -m pip install --quiet --disable-pip-version-check build twine "$(TORCH_SPEC)"
	$(DIST_BIN)/python -m build
	$(DIST_BIN)/python -m twine check --strict dist/*
	$(DIST_BIN)/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd dist && HF_HUB_OFFLINE=1 $(DIST_BIN)/hetero demo --output ../runs/dist --overwrite

# Without torch: the site is made of the pages alone.
DOCS := $(VENV)-docs
DOCS_BIN := $(DOCS)/$(notdir $(BIN))
docs:
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS)/requirements.txt
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check -r $(DOCS)/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build

bench: setup
	$(BIN)/python -m benchmarks.suite

clean:
	$(PYTHON) -c "import shutil; [shutil.rmtree(p, ignore_errors=True) for p in ('runs', 'build', 'dist', '.pytest_cache', '.mypy_cache', '.ruff_cache')]"
