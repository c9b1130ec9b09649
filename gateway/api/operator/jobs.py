"""Admin routes of jobs: submit, list, show, read the log, cancel, resume."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import Fields, Operators, query_number
from gateway.api.edge.stack import Router
from gateway.core.policies.jobs import read_policy, read_spec
from gateway.service.ports.policies import Jobs

FIELDS: Fields = dict.fromkeys(("policy", "arguments", "gate", "auto"), object)
POLICY = "conductor"
LIST_DEFAULT, LIST_MAX = 50, 200
LINES_MAX = 1_000
LINE_MAX = 10**18


@dataclass(frozen=True, slots=True)
class JobsApi:
    """What the routes need."""

    jobs: Jobs
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin/jobs")
        router.add("POST", "", self.submit)
        router.add("GET", "", self.list)
        router.add("GET", "/{job_id}", self.show)
        router.add("GET", "/{job_id}/log", self.log)
        router.add("POST", "/{job_id}/cancel", self.cancel)
        router.add("POST", "/{job_id}/resume", self.resume)
        return router

    async def submit(self, request: Request) -> Response:
        """Queue a job: `arguments` as `baton train` takes them, `policy` (conductor), `gate` (arguments of the gate),
        `auto` (a canary of 1 % when the gate passes it). 409 while the policy has another."""
        act, body = await self.operators.change(request, FIELDS)
        policy = read_policy(body.pop("policy", POLICY))
        return JSONResponse((await self.jobs.submit(policy, read_spec(body), act.actor)).as_json(), status_code=201)

    async def list(self, request: Request) -> Response:
        """The latest jobs, newest first: `policy`, `limit` (50)."""
        await self.operators.act(request)
        policy = request.query_params.get("policy") or None
        jobs = await self.jobs.list(policy, query_number(request, "limit", LIST_DEFAULT, 1, LIST_MAX))
        return JSONResponse({"object": "list", "data": [job.as_json() for job in jobs]})

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
        """Queue a failed or cancelled job again."""
        act = await self.operators.act(request)
        return JSONResponse((await self.jobs.resume(job_id, act.actor)).as_json())
