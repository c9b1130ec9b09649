"""The workflow with the OpenAI Agents SDK: four agents, three of them run together. Its tracing is off."""

from __future__ import annotations

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

from bench.suite.peers.frameworks.served import INSTRUCTIONS, MERGE, NO_KEY, Models, Workflow, main, merging


def build(models: Models) -> Workflow:
    """Make agents and client once."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{models.url}/v1", api_key=NO_KEY)
    steps = [
        Agent(name=f"step{number}", instructions=instruction, model=OpenAIChatCompletionsModel(model, client))
        for number, (model, instruction) in enumerate(zip(models.steps, INSTRUCTIONS, strict=True))
    ]
    merge = Agent(name="merge", instructions=MERGE, model=OpenAIChatCompletionsModel(models.merge, client))

    async def run(question: str) -> str:
        done = await asyncio.gather(*(Runner.run(agent, question) for agent in steps))
        merged = await Runner.run(merge, merging([question, *(str(one.final_output) for one in done)]))
        return str(merged.final_output)

    return run


if __name__ == "__main__":
    main(build)
