"""Settings of planning and learning: the conductor, its versions, and the jobs that train new ones."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator

from gateway.config.serving import Bytes, Count, Seconds, Share, Usd
from gateway.core.log.outcome import parse_labels
from gateway.core.pool.workers import SecretRef

HASHING, MINILM = "hashing", "minilm"
WORKER = "worker:"


class PlanningSettings(BaseModel):
    """Planning: the pool, the conductor, and who plans when"""

    pool: Path | None = Field(None, description="Pool file; unset or empty: the arena's simulated workers")
    default_pool_name: str | None = Field(None, description="Pool of keys that name none; unset: the file's `default`")
    conductor: str = Field(
        "auto",
        description="`auto` (the shipped one on the arena, else none), `none`, `embedded`, a policy directory, "
        "`worker:NAME` or `http://host:port/v1#model`",
    )
    conductor_api_key: SecretRef | None = Field(
        None, description="Key of a conductor by URL, `env:NAME` or `file:PATH`"
    )
    conductor_input_usd_per_mtok: Decimal | None = Field(
        None, ge=0, le=100_000, description="Dollars per million prompt tokens; 0 when embedded, required for a URL"
    )
    conductor_output_usd_per_mtok: Decimal | None = Field(
        None, ge=0, le=100_000, description="Dollars per million plan tokens; 0 when embedded, required for a URL"
    )
    conductor_structured: Literal["auto", "vllm", "json_schema", "json_object", "none"] = Field(
        "auto", description="How plans are constrained; embedded: `vllm`"
    )
    conductor_timeout_s: Seconds | None = Field(
        None,
        description="Limit of one planning call; then the fallback router plans. Unset: 10 for trained weights, "
        "60 for a model that plans by prompt",
    )
    conductor_patience_s_min: Seconds = Field(
        2.0,
        description="Least time that a plan is waited for. Once 20 plans came, the limit is 4 times what 19 of 20 of "
        "the latest took, from this to `BATON_CONDUCTOR_TIMEOUT_S`; then the rule plans",
    )
    conductor_rounds: int | None = Field(
        None,
        ge=1,
        le=16,
        description="Plans per request, unless request or manifest ask for more; with 1 every reply streams. Unset: 1, "
        "or up to 3 where more looks of a prompted planner cost less than they may save; see conductor.md",
    )
    conductor_temperature: float = Field(
        0.0, ge=0, le=2, description="Sampling temperature of planning, outside the exploring share"
    )
    explore_share: Share = Field(
        0.1, description="Share of requests planned at temperature 1, for training; never with `train: false`"
    )
    explore_share_max: Share = Field(
        0.3,
        description="What `BATON_EXPLORE_SHARE` of the conductor and `BATON_CONDUCTOR_TRIAL_SHARE` rise to, unless "
        "they are 0, while too few judged requests are there to retrain on; see jobs.md",
    )
    plan_prompt: Literal["auto", "compact", "full", "guided"] = Field(
        "auto", description="Prompt profile; auto: that of the conductor's manifest, else guided"
    )
    plan_tokens_max: Count | None = Field(
        None,
        description="Tokens of one plan, thinking included. Unset: 512 for trained weights, 4096 for a model that "
        "plans by prompt, at most the worker's `output_tokens_max`",
    )
    plan_examples_max: int = Field(
        3, ge=0, le=8, description="Plans of the same key that did well on similar requests, in a `guided` prompt"
    )
    plan_bytes_max: Bytes = Field(262_144, description="Bytes of one plan; a longer one is refused unread")
    default_policy: Literal["auto", "conductor", "rule"] = Field(
        "auto", description="Policy named `baton`; auto: the rule, and the conductor where it has earned it"
    )
    conductor_outcomes_min: int = Field(
        30,
        ge=0,
        le=1_000_000,
        description="Judged requests of a task type, of rule and conductor each, before `auto` compares them; "
        "0: `auto` is the conductor",
    )
    conductor_trial_share: Share = Field(
        0.1, description="Share of requests that `auto` gives to the other of the two; never with `train: false`"
    )
    right_usd: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Dollars that a right answer is worth, unless the key says; unset: what ten calls of the "
        "pool's dearest model cost on tasks like this one",
    )
    right_seconds: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Seconds that a right answer is worth, unless the key says; unset: 60, and a tenth of a right "
        "answer at most",
    )
    candidates_max: int = Field(
        12, ge=2, le=1000, description="Workers and tools that one plan is made over; of a larger pool the likeliest"
    )
    candidates_drawn: int = Field(
        2, ge=0, le=100, description="How many of them are drawn at random, so that unknown workers are tried"
    )
    summarizer: str = Field(
        "none",
        description="Worker that sums up the oldest turns where a prompt has no room for them: `none`, `auto` (the "
        "cheapest model that the request may be planned with) or a name; see plans.md",
    )
    summary_tokens_max: int = Field(
        512, ge=16, le=100_000, description="Tokens of a summary; never above an eighth of the context that it is for"
    )
    summary_timeout_s: Seconds = Field(
        20.0, description="Limit of one summary, at most half of the request's time left; then the turns are dropped"
    )
    experience_timeout_s: Seconds = Field(
        0.1,
        description="Wait of a request for what is not in memory yet: its organisation's experience, a vector, plans",
    )
    experience_neighbours: Count = Field(200, description="Past steps per worker that experience is computed from")
    experience_bytes_max: Bytes = Field(
        256 * 2**20, description="Bytes of experience in the memory of each process, about 1.6 kB a judged step"
    )
    experience_stale_s: Seconds = Field(
        10.0, description="Age above which the memory of experience is called stale, in the reply, the log and a metric"
    )
    embedder: str = Field(
        MINILM,
        description="`minilm` (by meaning and words) or `hashing` (by words), both built in; or an embeddings endpoint "
        "`http://host:port/v1#model`, which is not priced",
    )
    embedder_api_key: SecretRef | None = Field(None, description="Key of an embedder by URL, `env:NAME` or `file:PATH`")

    @property
    def conductor_kind(self) -> Literal["embedded", "none", "worker", "url", "directory"]:
        """The form of `conductor`. `auto` is the embedded one; on a pool that it was not trained for, none starts."""
        if self.conductor in ("auto", "embedded"):
            return "embedded"
        if self.conductor == "none":
            return "none"
        if self.conductor.startswith("worker:"):
            return "worker"
        return "url" if self.conductor.startswith(("http://", "https://")) else "directory"

    @property
    def conductor_worker(self) -> str | None:
        """The name of the worker that plans, if one does."""
        return self.conductor.removeprefix("worker:") if self.conductor_kind == "worker" else None

    @field_validator("pool", mode="before")
    @classmethod
    def _is_empty(cls, path: object) -> object:
        return path or None  # compose passes a variable that is not set as an empty one

    @field_validator("embedder")
    @classmethod
    def _is_embedder(cls, text: str) -> str:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.fragment
        if text not in (HASHING, MINILM) and not is_url:
            raise ValueError(f"write {MINILM}, {HASHING}, or http://host:port/v1#model")
        return text

    @model_validator(mode="after")
    def _has_model_and_price(self) -> PlanningSettings:
        if self.conductor_kind == "url":
            parts = urlsplit(self.conductor)
            if not parts.hostname or not parts.fragment:
                raise ValueError(f"conductor `{self.conductor}` names no model; write http://host:port/v1#model")
            if self.conductor_input_usd_per_mtok is None or self.conductor_output_usd_per_mtok is None:
                raise ValueError(
                    "a conductor by URL needs its price, or it would be free: set "
                    "BATON_CONDUCTOR_INPUT_USD_PER_MTOK and BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK (0 is allowed)"
                )
        return self


class VersionsSettings(BaseModel):
    """Policy versions: where they lie, which engines hold them, shadow plans and automatic rollback"""

    policies_dir: Path | None = Field(
        None, description="Directory of versions, one for all gateways of a database; unset: `policies` in the data one"
    )
    policies_url: str = Field(
        "", description="URL where versions lie for other hosts too, such as s3://bucket/policies; empty: PostgreSQL"
    )
    policies_stored_bytes_max: Bytes = Field(
        2**30, description="Bytes of one version that PostgreSQL stores for other hosts; a larger one needs a URL"
    )
    policy_wait_s: float = Field(
        15.0,
        ge=0,
        le=600,
        description="Time that `canary` and `promote` wait until every running gateway holds the version; 0: none",
    )
    policy_engine: Literal["auto", "none", "vllm-lora", "vllm-reload"] = Field(
        "auto", description="Engine of versions; auto: the embedded one, if any"
    )
    policy_engine_urls: str | None = Field(
        None, description="All replicas of the conductor's server, comma-separated; unset: the conductor's URL"
    )
    policy_engine_base: Path | None = Field(None, description="Local directory of the weights that a vLLM started with")
    policy_versions_max: int = Field(16, ge=2, le=1000, description="Versions that a vLLM holds: its `--max-cpu-loras`")
    policy_rank_max: int = Field(16, ge=1, le=512, description="Largest rank of an adapter: vLLM's `--max-lora-rank`")
    policy_poll_s: float = Field(0.5, gt=0, le=10, description="Interval at which changes of versions are read")
    policy_engine_check_s: Seconds = Field(1.0, description="Interval at which engines are checked for a restart")
    shadow_share: Share = Field(0.1, description="Share of requests that the shadow version plans too")
    shadow_parallel_max: int = Field(1, ge=1, le=64, description="Shadow plans at the same time; others are dropped")
    shadow_usd_max: Usd = Field("0", description="Dollars that all shadow plans may cost, where planning has a price")
    watch_look_s: Seconds = Field(5.0, description="Interval at which a canary, or a new live version, is compared")
    watch_window_s: Seconds = Field(3600.0, description="Age of the oldest request that is compared")
    watch_requests_max: Count = Field(2000, description="Latest requests of each version that are compared")
    watch_requests_min: Count = Field(30, description="Requests of each version before anything is compared")
    watch_outcomes_min: Count = Field(30, description="Outcomes of each version before outcomes are compared")
    watch_validity_margin: Share = Field(0.02, description="Largest loss in the share of plans that are used")
    watch_errors_margin: Share = Field(0.02, description="Largest rise in the share of requests that fail")
    watch_outcome_margin: Share = Field(0.03, description="Largest loss in the mean outcome")
    watch_cost_margin: float = Field(0.5, ge=0, le=100, description="Largest rise in the cost of a request; 0.5: half")
    watch_z: float = Field(3.3, ge=1, le=10, description="Standard errors by which a margin must be exceeded")
    watch_probation_s: Seconds = Field(
        3600.0, description="Time for which a new live version is compared with the last one"
    )


class LearningSettings(BaseModel):
    """Learning: the worker that carries out jobs and grades replies, and when it trains a policy again"""

    jobs_worker: bool = Field(True, description="`baton serve` starts a worker; off: `baton worker` runs elsewhere")
    jobs_url: str = Field(
        "", description="URL where jobs' directories are kept too, for workers without a common disk; empty: nowhere"
    )
    train_python: Path | None = Field(
        None, description="Python interpreter that has the train extra; unset: the gateway's own"
    )
    retrain_outcomes_min: int = Field(
        0, ge=0, le=1_000_000, description="New outcomes that start a training job; 0: their number starts none"
    )
    retrain_every_s: float = Field(
        0, ge=0, le=366 * 86_400, description="Time since the last job that starts one, if outcomes came; 0: none"
    )
    retrain_arguments: str = Field("--env logged", description="Arguments of `baton train` in those jobs")
    gate_usd_max: Usd = Field(
        "5.00", description="Dollars that the gate of a job may spend on real workers, unless the job names its own cap"
    )
    retrain_auto: bool = Field(False, description="A version of theirs that passes the gate becomes a canary of 1 %")
    outcome_labels: str = Field(
        "", description="`label=value` pairs, comma-separated, beside the standard labels of outcomes; see outcomes.md"
    )
    judge: str | None = Field(
        None, description="`worker:NAME`: the model that judges a share of the requests; unset: nobody does"
    )
    judge_share: Share = Field(
        0.1,
        description="Share of the requests that it judges beside those that name the grader `judge`; never with "
        "`train: false`",
    )
    judge_usd_a_day: Usd = Field("1.00", description="Dollars that the judge may spend on a day (UTC)")
    judge_rubrics: Path | None = Field(
        None, description="YAML file, `task type: what a good reply has`; `default` for all others; see outcomes.md"
    )

    @property
    def judge_worker(self) -> str | None:
        """The name of the worker that judges; None: nobody does."""
        return None if self.judge is None else self.judge.removeprefix(WORKER)

    @field_validator("judge")
    @classmethod
    def _is_worker(cls, text: str | None) -> str | None:
        if (text is not None and not text.removeprefix(WORKER).strip()) or not (text or WORKER).startswith(WORKER):
            raise ValueError(f"write {WORKER}NAME, a worker of the pool file")
        return text

    @field_validator("outcome_labels")
    @classmethod
    def _are_labels(cls, text: str) -> str:
        parse_labels(text)
        return text
