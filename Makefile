# Plato's commands. Each does all its own set-up; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup up down status doctor test lint types imports proto proto-check ci clean

help:
	@echo "make up      start Plato on this machine (Ctrl-C stops it; the data stays)"
	@echo "make test    run the tests on real processes"
	@echo "make lint types imports proto-check   what CI checks besides"

setup: $(VENV)/.done

$(VENV)/.done: requirements.lock pyproject.toml tools/setup.sh
	@bash tools/setup.sh $(VENV)

up: setup
	@exec $(BIN)/plato up $(ARGS)

down: setup
	@$(BIN)/plato down $(ARGS)

status: setup
	@$(BIN)/plato status $(ARGS)

doctor: setup
	@$(BIN)/plato doctor $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

imports: setup
	@$(BIN)/lint-imports

proto: setup
	@$(BIN)/python tools/proto.py

proto-check: setup
	@$(BIN)/python tools/proto.py --check

ci:
	@bash .ci/run

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
