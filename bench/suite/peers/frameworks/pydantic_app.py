"""The workflow as a graph of pydantic-graph whose steps are pydantic-ai agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_graph import GraphBuilder, StepContext, reduce_list_append

from bench.suite.peers.frameworks.served import INSTRUCTIONS, MERGE, NO_KEY, Models, Workflow, main, merging

Context: TypeAlias = StepContext[None, None, Any]


def build(models: Models) -> Workflow:
    """Build graph and agents once."""
    provider = OpenAIProvider(base_url=f"{models.url}/v1", api_key=NO_KEY)

    def agent(model: str, instructions: str) -> Agent[None, str]:
        return Agent(OpenAIChatModel(model, provider=provider), instructions=instructions)

    builder = GraphBuilder(input_type=str, output_type=str)
    steps = [
        builder.step(_step(agent(model, instruction)), node_id=f"step{number}")
        for number, (model, instruction) in enumerate(zip(models.steps, INSTRUCTIONS, strict=True))
    ]
    collected = builder.join(reduce_list_append, initial_factory=list[str], node_id="collect")
    merged = builder.step(_merge(agent(models.merge, MERGE)), node_id="merge")
    builder.add(
        builder.edge_from(builder.start_node).to(*steps),
        builder.edge_from(*steps).to(collected),
        builder.edge_from(collected).to(merged),
        builder.edge_from(merged).to(builder.end_node),
    )
    graph = builder.build()

    async def run(question: str) -> str:
        return str(await graph.run(inputs=question))

    return run


def _step(agent: Agent[None, str]) -> Callable[[Context], Awaitable[str]]:
    async def step(context: Context) -> str:
        return str((await agent.run(context.inputs)).output)

    return step


def _merge(agent: Agent[None, str]) -> Callable[[Context], Awaitable[str]]:
    async def merge(context: Context) -> str:
        return str((await agent.run(merging(context.inputs))).output)

    return merge


if __name__ == "__main__":
    main(build)
