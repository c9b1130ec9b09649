.DEFAULT_GOAL := help
.PHONY: help serve test check fix test-vllm lock docs clean
# passed on to scripts/serve and scripts/install
export POOL CONDUCTOR PYTHON

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: ## a running gateway with everything it needs; POOL=file, CONDUCTOR=… and ARGS=… are optional
	@scripts/serve $(ARGS)

test: ## install, check, test: what CI runs
	@scripts/install dev
	@scripts/check
	@scripts/test

check: ## ruff, mypy, import contracts
	@scripts/install dev
	@scripts/check

fix: ## format, and mend what ruff can mend
	@scripts/install dev
	@scripts/check --fix

test-vllm: ## the conductor's contract suite against real vLLM on this CPU (its own .venv-vllm)
	@scripts/test-vllm

lock: ## write requirements/*.lock anew
	@scripts/install dev
	@scripts/lock

docs: ## write the generated reference pages anew
	@scripts/install dev
	@.venv/bin/python -m scripts.reference

clean: ## remove caches and the environments; never the data directory
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
