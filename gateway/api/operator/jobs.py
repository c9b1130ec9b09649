"""Admin routes of jobs: submit, list, look, read the log, cancel, resume."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.stack import read_json
from gateway.core.policies.jobs import read_policy, read_spec
from gateway.errors import BadRequest
from gateway.service.ports.jobs import Jobs
from gateway.service.request.auth import Authenticator

FIELDS = frozenset({"policy", "arguments", "gate", "auto"})
POLICY = "conductor"
LIST_DEFAULT, LIST_MAX = 50, 200
LINES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class JobsApi:
    """What the routes need."""

    jobs: Jobs
    authenticator: Authenticator
    body_bytes_max: int

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/admin/jobs")
        router.add_api_route("", self.submit, methods=["POST"], response_model=None)
        router.add_api_route("", self.list, methods=["GET"], response_model=None)
        router.add_api_route("/{job_id}", self.show, methods=["GET"], response_model=None)
        router.add_api_route("/{job_id}/log", self.log, methods=["GET"], response_model=None)
        router.add_api_route("/{job_id}/cancel", self.cancel, methods=["POST"], response_model=None)
        router.add_api_route("/{job_id}/resume", self.resume, methods=["POST"], response_model=None)
        return router

    async def submit(self, request: Request) -> Response:
        """Queue a job: `arguments` as `baton train` takes them, `policy` (conductor), `gate` (arguments of the gate),
        `auto` (a canary of 1 % when the gate passes it). 409 while the policy has another."""
        by = await self._who(request)
        body = await read_json(request, self.body_bytes_max)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object", code="invalid_type")
        unknown = sorted(set(body) - FIELDS)
        if unknown:
            raise BadRequest(f"Unknown parameter: '{unknown[0]}'.", param=unknown[0], code="unknown_parameter")
        policy = read_policy(body.pop("policy", POLICY))
        return JSONResponse((await self.jobs.submit(policy, read_spec(body), by)).as_json(), status_code=201)

    async def list(self, request: Request) -> Response:
        """The latest jobs, newest first: `policy`, `limit` (50)."""
        await self._who(request)
        policy = request.query_params.get("policy") or None
        found = await self.jobs.list(policy, _whole(request, "limit", LIST_DEFAULT, 1, LIST_MAX))
        return JSONResponse({"object": "list", "data": [job.as_json() for job in found]})

    async def show(self, request: Request, job_id: str) -> Response:
        """One job: state, stage, progress, result."""
        await self._who(request)
        return JSONResponse((await self.jobs.get(job_id)).as_json())

    async def log(self, request: Request, job_id: str) -> Response:
        """Lines of its log after line number `after` (0), oldest first, and the job's state at that time."""
        await self._who(request)
        after = _whole(request, "after", 0, 0, 10**18)
        job = await self.jobs.get(job_id)  # first: a job that has ended has written its last line
        lines = await self.jobs.log(job.id, after, LINES_MAX)
        more = {"state": job.state, "next": lines[-1]["n"] if lines else after, "whole": len(lines) < LINES_MAX}
        return JSONResponse({"object": "list", "data": lines, **more})

    async def cancel(self, request: Request, job_id: str) -> Response:
        """End a queued job; a running one stops after its checkpoint."""
        by = await self._who(request)
        return JSONResponse((await self.jobs.cancel(job_id, by)).as_json())

    async def resume(self, request: Request, job_id: str) -> Response:
        """Queue a failed or cancelled job again."""
        by = await self._who(request)
        return JSONResponse((await self.jobs.resume(job_id, by)).as_json())

    async def _who(self, request: Request) -> str:
        principal = await self.authenticator.authenticate(request.headers.get("authorization"), "admin")
        return f"key:{principal.public_id}"


def _whole(request: Request, name: str, default: int, least: int, most: int) -> int:
    given = request.query_params.get(name) or str(default)
    if not (given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most):
        raise BadRequest(f"`{name}` must be a whole number from {least} to {most}", param=name)
    return int(given)
