"""Which place of the dial a trained policy is shown where a request sets none: the highest that a budget affords."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from gateway.core.loop.prompt import QUALITY_MAX, Profile
from gateway.core.pool.workers import NANO_PER_USD
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from policy.environments.sampling import sample
from policy.evaluate.inprocess import FREE
from policy.train.settings import Settings
from policy.train.sources.conductor import BatchConductor
from policy.train.sources.sampled import PLAN_TIMEOUT_S
from policy.train.sources.scene import Scene

QUESTIONS = 400  # training questions asked at each place
NEARLY_GREEDY = 0.05  # temperature: as it will be served, but for ties


async def affordable(
    scene: Scene, conductor: BatchConductor, profile: Profile, settings: Settings, usd_per_1k_max: float,
    say: Callable[[str], None],
) -> int:  # fmt: skip
    """The highest place whose plans cost no more on training questions; 0 where none does. Dearer places are not asked
    once two in a row were too dear."""
    asking = ConductorSettings(profile, FREE, PLAN_TIMEOUT_S, settings.plan_tokens, NEARLY_GREEDY)
    best, too_dear = 0, 0
    for quality in range(QUALITY_MAX + 1):
        posed = [
            replace(scene.posed(prompt, settings, -1).prompt, quality=quality) for prompt in scene.prompts[:QUESTIONS]
        ]
        planners = [ConductorPlanner(conductor.of("dial", quality, prompt.id), asking) for prompt in posed]
        work = [(prompt, [planner]) for prompt, planner in zip(posed, planners, strict=True)]
        found = (await sample(scene.environment, work, concurrency=len(work))).episodes
        usd = fmean(episode.cost_nano for episode in found) / NANO_PER_USD * 1000
        right = fmean(episode.outcome for episode in found)
        say(f"dial {quality}: right {right:.3f} of {len(found)} training questions, ${usd:.2f} per 1,000")
        best, too_dear = (quality, 0) if usd <= usd_per_1k_max else (best, too_dear + 1)
        if too_dear == 2:
            break
    return best
