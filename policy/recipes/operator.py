"""What an operator does in a round of learning: every step is a command of `baton`."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
from sqlalchemy import func, select

from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.tables import gradings
from policy.recipes.questions import QuestionSource
from policy.recipes.stack import ROOT, Gateway, RecipeFailed, clean_environment
from policy.recipes.traffic import GradedQuestion, PolicyScore, StageBar, Traffic

EXIT_REFUSED = 4
GRADED_S = 120.0  # for the next outcome to appear
ROLLBACK_S = 30.0
STEADY_PER_S = 1.0  # requests while a job trains and is judged
SHADOW_S = 4.0
CANARY_PERCENT = 25
PROGRESS: tuple[tuple[re.Pattern[str], str, float, float, int], ...] = (
    # of a job's log: its stage, where in the stage it begins, what share of it it is, and how often it is gone through
    (re.compile(r"\b(\d+) plans of (\d+) requests"), "train", 0.0, 0.0, 1),
    (re.compile(r"\bstep (\d+)/(\d+)"), "train", 0.0, 1.0, 1),
    (re.compile(r"\bcandidate: \S+@(\d+), (\d+) rollouts"), "gate", 0.0, 0.0, 1),
    (re.compile(r"\bplanning logged prompts anew: (\d+)/(\d+)"), "gate", 0.0, 0.1, 1),
    (re.compile(r"\bscoring logged plans: (\d+)/(\d+)"), "gate", 0.1, 0.1, 1),
    (re.compile(r"\[(\d+)/(\d+)\]"), "gate", 0.2, 0.4, 1),
    (re.compile(r"\binjection set: (\d+)/(\d+)"), "gate", 0.6, 0.4, 3),
)
CHECKS = re.compile(r"\b(?:refused|undecided|cannot say|not worse|passed) +[a-z_\[\]]+ +\S")


class Gradings:
    """Requests of a gateway's log that named a grader, read only."""

    def __init__(self, database_url: str) -> None:
        self._engine = sync_engine(database_url)

    def count(self) -> int:
        """Number of them."""
        with self._engine.connect() as connection:
            return int(connection.scalar(select(func.count()).select_from(gradings)) or 0)

    def ended(self) -> int:
        """Number of them that have their grade, or will never have one."""
        ended = select(func.count()).select_from(gradings).where(gradings.c.state != "waiting")
        with self._engine.connect() as connection:
            return int(connection.scalar(ended) or 0)

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()


@dataclass(frozen=True, slots=True)
class LearningRound:
    """One round. `version` serves at its end; `job` is how its training ended; seconds are of the clock."""

    round: int
    version: str
    job: str
    held_out: PolicyScore
    traffic: PolicyScore | None = None
    rollouts: int = 0
    train_s: float = 0.0
    swap_s: float = 0.0
    refusal: str = ""
    name: str = ""  # in the table; empty: by its number


class JobBars:
    """The stages of a job as bars, read off its log; of the other lines the gate's checks alone are shown."""

    def __init__(self) -> None:
        self._stage, self._share = "select", 0.0
        self._bar, self._checks = StageBar(self._stage), list[str]()
        self._ended: Counter[str] = Counter()

    def line(self, text: str) -> None:
        """One more line of the log."""
        for pattern, stage, begin, share, times in PROGRESS:
            if found := pattern.search(text):
                done, total = map(int, found.groups())
                gone = min(times, self._ended[pattern.pattern] + done / max(1, total))
                self._ended[pattern.pattern] += done == total
                return self._at(stage, begin + share * gone / times, found[0])
        self._checks += [text] if CHECKS.search(text) else []
        return None

    def end(self) -> None:
        """The job is finished."""
        self._bar.end()
        for check in self._checks:
            print(f"    {check}", file=sys.stderr, flush=True)

    def _at(self, stage: str, share: float, note: str) -> None:
        if stage != self._stage:
            self._bar.end()
            self._stage, self._share, self._bar = stage, 0.0, StageBar(stage)
        self._share = max(self._share, share)  # a part that is asked again takes nothing back
        self._bar.at(self._share, note)


@dataclass(slots=True)
class Operator:
    """Gives the commands. `served` and `traffic` are of the running gateway; `data` is its data directory. `bars`: jobs
    are shown as bars, not line by line."""

    served: Gateway
    data: Path
    traffic: Traffic
    questions: QuestionSource
    gradings: Gradings
    train: Sequence[str]  # arguments of `baton train submit`
    live: str = ""
    steady: int = 500  # questions that go on being asked while a job runs
    per_s: float = STEADY_PER_S
    bars: bool = False

    async def baton(
        self, *words: str, good: Sequence[int] = (0,), show: Callable[[str], None] | None = None
    ) -> tuple[int, str]:
        """Run a command and show its output, each line by `show`; its status and output. Raises RecipeFailed unless the
        status is in `good`."""
        print(f"$ baton {shlex.join(words)}", file=sys.stderr, flush=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *words,
            cwd=ROOT, env={**clean_environment(), "BATON_DATA_DIR": str(self.data)},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        lines: list[str] = []
        try:
            async for line in cast(asyncio.StreamReader, process.stdout):
                lines.append(line.decode(errors="replace").rstrip())
                if show is not None:
                    show(lines[-1])
                elif "--json" not in words:
                    print(f"    {lines[-1]}", file=sys.stderr, flush=True)
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if status not in good:
            raise RecipeFailed(
                f"baton {' '.join(words)} ended with status {status}: {lines[-1] if lines else 'no word'}"
            )
        return status, "\n".join(lines)

    async def find_live(self) -> str:
        """The live version."""
        _, output = await self.baton("policy", "list", "--json")
        [self.live] = [row["version"] for row in json.loads(output)["data"] if row["state"] == "live"]
        return self.live

    async def newest(self) -> str:
        """The version that was published last."""
        _, output = await self.baton("policy", "list", "--json")
        return str(max(json.loads(output)["data"], key=lambda row: int(row["version"].rpartition("@")[2]))["version"])

    async def wait_for_grades(self) -> None:
        """Wait until every request that named a grader is judged. Raises RecipeFailed when none more was judged within
        GRADED_S."""
        judged, until_s = -1, 0.0
        while (n := await asyncio.to_thread(self._judged)) < self.traffic.tally.graded:
            if n > judged:
                judged, until_s = n, time.monotonic() + GRADED_S
            if time.monotonic() > until_s:
                raise RecipeFailed(
                    f"{n} of {self.traffic.tally.graded} requests are graded, none more in {GRADED_S:g} s"
                )
            await asyncio.sleep(0.2)

    def _judged(self) -> int:
        return self.gradings.ended()

    async def round(
        self, number: int, rollouts: int, canary: int, suite: Sequence[GradedQuestion], was: PolicyScore
    ) -> LearningRound:
        """Traffic → outcomes → train → gate → shadow → canary → live → the held-out questions again. A candidate that
        the gate refuses changes nothing: what was live goes on, and the next round has more to learn from."""
        questions = self.questions.graded("train", rollouts, 10 * number)
        earned = await self.traffic.ask_to_learn(f"traffic for {self.live}", questions)
        await self.wait_for_grades()
        words = ("--env", "logged", "--policy-version", self.live, *self.train)
        summary = await self.job_round(number, words, canary, suite, was)
        return replace(summary, traffic=earned, rollouts=rollouts)

    async def job_round(
        self, number: int, words: Sequence[str], canary: int, suite: Sequence[GradedQuestion], was: PolicyScore
    ) -> LearningRound:
        """A round without the traffic that it learns from: a job with the arguments `words`, and its release."""
        async with self.traffic.keep_asking(self.questions.graded("train", self.steady, 10 * number + 1), self.per_s):
            began_s = time.monotonic()
            status, job = await self.follow(await self.submit(words))
            train_s = time.monotonic() - began_s
            if status == EXIT_REFUSED:
                return LearningRound(number, self.live, "refused", was, train_s=train_s, refusal=job["error"])
            swap_s = await self._release(job["version"], number, canary)
        held_out = await self.traffic.score(f"live, held-out: {self.live}", suite)
        return LearningRound(number, self.live, "done", held_out, train_s=train_s, swap_s=swap_s)

    async def submit(self, words: Sequence[str]) -> str:
        """Queue a job with those arguments; its id."""
        _, output = await self.baton("train", "submit", "--json", "--policy", "conductor", *words)
        return str(json.loads(output)["id"])

    async def follow(self, job: str) -> tuple[int, dict[str, Any]]:
        """Follow a job to its end: its exit status (0, or 4 when the gate refused it) and the job. Raises
        RecipeFailed."""
        stages = JobBars() if self.bars else None
        status, _ = await self.baton(
            "train", "logs", "-f", job, good=(0, EXIT_REFUSED), show=stages.line if stages else None
        )
        if stages:
            stages.end()
        _, output = await self.baton("train", "status", job, "--json")
        return status, dict(json.loads(output))

    async def _release(self, version: str, number: int, canary: int) -> float:
        """From the shadow to live; seconds that the promotion took as its command is timed. Raises RecipeFailed."""
        await asyncio.sleep(SHADOW_S)  # it plans beside the live one meanwhile
        await self.baton("policy", "canary", version, str(CANARY_PERCENT), "--why", f"round {number}")
        before = self.traffic.tally.versions[version]
        questions = self.questions.graded("train", canary, 10 * number + 2)
        await self.traffic.ask_to_learn(f"canary, {CANARY_PERCENT} % for {version}", questions)
        planned = self.traffic.tally.versions[version] - before
        print(f"    {planned} of these requests were planned by {version}", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        await self.baton("policy", "promote", version, "--why", f"round {number}")
        swap_s = time.monotonic() - began_s
        if await self.find_live() != version:
            raise RecipeFailed(f"{version} was promoted and {self.live} is live")
        return swap_s

    async def roll_back(self, spare: Sequence[GradedQuestion]) -> tuple[str, float]:
        """Take the live version back while requests go on: the one that serves then, and seconds from the command's
        call of the admin API to the beginning of the first request that it plans. Raises RecipeFailed."""
        url = f"{self.served.admin_url}/admin/policies/conductor/rollback"
        headers = {"authorization": f"Bearer {self.served.admin_key}"}
        live = self.live
        async with self.traffic.keep_asking(spare, 5 * STEADY_PER_S), httpx.AsyncClient(timeout=ROLLBACK_S) as admin:
            await asyncio.sleep(1.0)
            began_s = time.monotonic()
            reply = await admin.post(url, json={"why": "shown in the demo"}, headers=headers)
            if not reply.is_success:
                raise RecipeFailed(f"the rollback was refused: {reply.text[:200]}")
            version, took_s = live, 0.0
            while version in (live, ""):
                took_s = time.monotonic() - began_s
                if took_s > ROLLBACK_S:
                    raise RecipeFailed(f"{live} still plans {ROLLBACK_S:g} s after its rollback")
                _, version = await self.traffic.ask(spare[0], spare[0].graded)
        await self.find_live()
        return version, took_s
