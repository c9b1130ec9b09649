"""A policy on torch, in this process: any causal language model that transformers loads, its adapter on top.

Plans that are asked for at the same time are decoded as one batch, and logged plans are scored as few forward passes as
hold TOKENS_MAX tokens each. Everything is float32, so that scores equal those of the embedded runtime.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from random import Random

import torch

from gateway.core.money.amounts import Usage
from gateway.errors import ConfigError, VersionRefused
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from policy.engines.directory import ConductorDirectory
from policy.engines.port import LoggedPlan, Pace, PlanEngine, PlanReading, check_sampling, reading
from policy.serve.lora import read_config, read_pairs
from policy.serve.tokens import Tokens
from policy.train.sources.conductor import BatchConductor, Sampler
from policy.train.step.masks import Masks
from policy.train.step.parcels import Parcel, parcels
from policy.train.weights.large import LargeWeights
from policy.train.weights.lora import adapt, load_adapter
from policy.train.weights.small import Weights

TOKENS_MAX = 8192  # of one forward pass, padding included
CALLS_MAX = 16
FORGET_EVERY = 64  # plans


def open_torch(directory: ConductorDirectory) -> TorchEngine:
    """The engine of a directory, on a GPU where there is one. Raises VersionRefused, ConfigError without
    transformers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = directory.shape()
    weights = LargeWeights.load(directory.home, shape.context, "float32", device)
    if directory.base is not None:
        _add_adapter(weights, directory)
    return TorchEngine(weights, Tokens(directory.home, shape), directory.manifest.id)


def _add_adapter(weights: Weights, directory: ConductorDirectory) -> None:
    """Put the adapter of the directory on its base. Raises VersionRefused."""
    place = directory.policy.directory
    rank, scale = read_config(place)
    pairs = read_pairs(place)
    try:
        adapt(weights.model, rank, scale * rank, sorted({name.rpartition(".")[2] for name in pairs}), seed=0)
        load_adapter(weights.model, pairs)
    except (ConfigError, RuntimeError) as error:  # torch: matrices of other shapes
        raise VersionRefused("base", f"{place}: not an adapter of {directory.home}: {error}") from None


class TorchEngine(PlanEngine):
    """`PlanEngine` over `weights`. `name` is what rollouts call the version."""

    def __init__(self, weights: Weights, tokens: Tokens, name: str) -> None:
        self.calls_max = CALLS_MAX
        self._weights = weights
        self._tokens = tokens
        self._name = name
        self._masks = Masks(tokens)
        sampler = Sampler(weights, tokens, self._masks, TOKENS_MAX)
        self._batch = BatchConductor(sampler, tokens, self._masks, weights.context, name)
        self._batch.apart = True
        self._scoring = asyncio.Lock()
        self._pace = Pace()

    @property
    def plan_ms(self) -> float | None:
        return self._pace.mean_ms

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says; the plan comes in one piece. Raises ConductorError(refused) as for a prompt without room,
        and for a nucleus."""
        check_sampling(call.sampling, top_p=False)
        prompt_ids = self._batch.prompt_ids(call.messages)
        began_s = time.perf_counter()
        row = await self._batch.decode(call, prompt_ids, Random(call.sampling.seed))
        if self._pace.add(time.perf_counter() - began_s) % FORGET_EVERY == 0:
            self._masks.forget()
        yield self._batch.chunk(row)
        yield ConductorEnd(self._name, Usage(len(prompt_ids), len(row.ids)), prompt_ids, row.finish or "stop")

    async def score(self, plans: Sequence[LoggedPlan]) -> list[list[float]]:
        """As the port says, several plans a forward pass."""
        async with self._scoring:
            return await asyncio.to_thread(self._scored, plans)

    def _scored(self, plans: Sequence[LoggedPlan]) -> list[list[float]]:
        readings = [reading(self._tokens, plan) for plan in plans]
        scores = [read.logprobs([]) if not read.decisions else [] for read in readings]
        open_rows = [index for index, read in enumerate(readings) if read.decisions]
        prompts = [plans[index].prompt_ids for index in open_rows]
        lengths = [len(plans[index].plan_ids) for index in open_rows]
        with torch.inference_mode():
            for parcel in parcels(prompts, lengths, TOKENS_MAX, self._weights.shares_prompts):
                rows = [open_rows[row] for row in parcel.rows]
                for row, own in zip(rows, self._pass(parcel, [readings[row] for row in rows]), strict=True):
                    scores[row] = own
        return scores

    def _pass(self, parcel: Parcel, readings: Sequence[PlanReading]) -> list[list[float]]:
        """One forward pass: the scores of its rows."""
        weights, plans = self._weights, [read.plan.plan_ids for read in readings]
        states = weights.states(parcel.prompts, parcel.owners, plans).split([len(plan) for plan in plans])
        results = []
        for own, read in zip(states, readings, strict=True):
            at = torch.tensor([decision.index for decision in read.decisions], device=own.device)
            results.append(read.of_logits(weights.logits(own[at]).float().cpu().numpy()))
        return results

    async def ready(self) -> bool:
        """Return True: the weights are loaded."""
        return True

    async def close(self) -> None:
        """Nothing runs between calls; the weights go with the engine."""
