"""Admin routes of jobs: what one lacks, submit, list, show, read the log, cancel, resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator

from gateway.api.edge.bodies import Fields, Operators, query_number
from gateway.api.edge.stack import Router
from gateway.core.policies.jobs import NO_ARGUMENTS, JobSpec, check_train, read_policy
from gateway.errors import BadRequest
from gateway.service.policies.readiness import TrainingCheck
from gateway.service.ports.policies import Jobs

FIELDS: Fields = dict.fromkeys(("policy", "train", "gate", "auto", "arguments"), object)
POLICY = "conductor"
LIST_DEFAULT, LIST_MAX = 50, 200
LINES_MAX = 1_000
LINE_MAX = 10**18
SPEC_BYTES_MAX = 65_536
MESSAGE_CHARS_MAX = 300  # of the validator's message, which may quote the value


def read_spec(body: Mapping[str, Any]) -> JobSpec:
    """The spec of a body that fits the published schema. Raises BadRequest naming the field that does not."""
    if "arguments" in body:
        raise BadRequest(f"arguments: {NO_ARGUMENTS}", param="arguments")
    if len(json.dumps(body)) > SPEC_BYTES_MAX:
        raise BadRequest(f"the spec of a job is over {SPEC_BYTES_MAX} bytes")
    check_train(body.get("train"))
    wrong = best_match(_validator().iter_errors(body))
    if wrong is not None:
        path = ".".join(map(str, wrong.absolute_path)) or "spec"
        raise BadRequest(f"{path}: {wrong.message[:MESSAGE_CHARS_MAX]}", param=path)
    return JobSpec(**body)


@cache
def _validator() -> Validator:
    """Validates by the schema that `scripts/job_schema.py` writes from the models of policy."""
    text = files("gateway.api.operator").joinpath("job.schema.json").read_text(encoding="utf-8")
    return Draft202012Validator(json.loads(text))


@dataclass(frozen=True, slots=True)
class JobsApi:
    """What the routes need."""

    jobs: Jobs
    check: TrainingCheck
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin/jobs")
        router.add("POST", "", self.submit)
        router.add("GET", "", self.list)
        router.add("GET", "/readiness", self.readiness)
        router.add("POST", "/check", self.lacks)
        router.add("GET", "/{job_id}", self.show)
        router.add("GET", "/{job_id}/log", self.log)
        router.add("POST", "/{job_id}/cancel", self.cancel)
        router.add("POST", "/{job_id}/resume", self.resume)
        return router

    async def submit(self, request: Request) -> Response:
        """Queue a job: `train` and `gate` (specs, see docs/jobs.md), `policy` (conductor), `auto` (a canary of 1 %
        when the gate passes it). 409 while the policy has another, and, with all that is missing, where the log has
        too little for it."""
        act, body = await self.operators.change(request, FIELDS)
        policy = read_policy(body.pop("policy", POLICY))
        spec = read_spec(body)
        await self.check.require(policy, spec)
        return JSONResponse((await self.jobs.submit(policy, spec, act.actor)).as_json(), status_code=201)

    async def list(self, request: Request) -> Response:
        """The latest jobs, newest first: `policy`, `limit` (50)."""
        await self.operators.act(request)
        policy = request.query_params.get("policy") or None
        jobs = await self.jobs.list(policy, query_number(request, "limit", LIST_DEFAULT, 1, LIST_MAX))
        return JSONResponse({"object": "list", "data": [job.as_json() for job in jobs]})

    async def readiness(self, request: Request) -> Response:
        """How far the log is from a retraining of `policy` (conductor): judged requests, those to train on, questions
        for the gate, how many of each are needed, and when they are there at the present rate."""
        await self.operators.act(request)
        policy = read_policy(request.query_params.get("policy") or POLICY)
        return JSONResponse((await self.check.readiness(policy)).as_json())

    async def lacks(self, request: Request) -> Response:
        """The same for the spec of a job, as `POST /admin/jobs` takes it; nothing is queued."""
        _, body = await self.operators.change(request, FIELDS)
        policy = read_policy(body.pop("policy", POLICY))
        return JSONResponse((await self.check.readiness(policy, read_spec(body))).as_json())

    async def show(self, request: Request, job_id: str) -> Response:
        """One job: state, stage, progress, result."""
        await self.operators.act(request)
        return JSONResponse((await self.jobs.get(job_id)).as_json())

    async def log(self, request: Request, job_id: str) -> Response:
        """Lines of the job's log after line number `after` (0), oldest first, and the job's state at that time."""
        await self.operators.act(request)
        after = query_number(request, "after", 0, 0, LINE_MAX)
        job = await self.jobs.get(job_id)  # before its log: a job that has ended has written its last line
        lines = await self.jobs.log(job.id, after, LINES_MAX)
        more = {"state": job.state, "next": lines[-1]["n"] if lines else after, "whole": len(lines) < LINES_MAX}
        return JSONResponse({"object": "list", "data": lines, **more})

    async def cancel(self, request: Request, job_id: str) -> Response:
        """Cancel a job: a queued one ends, a running one stops after its checkpoint."""
        act = await self.operators.act(request)
        return JSONResponse((await self.jobs.cancel(job_id, act.actor)).as_json())

    async def resume(self, request: Request, job_id: str) -> Response:
        """Queue a failed or cancelled job again; `?gate_usd_max=` is another cap of its gate, in dollars."""
        act = await self.operators.act(request)
        cap = request.query_params.get("gate_usd_max", "")
        return JSONResponse((await self.jobs.resume(job_id, act.actor, cap)).as_json())
