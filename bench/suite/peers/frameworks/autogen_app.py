"""The workflow as an AutoGen GraphFlow of four assistants."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

from bench.suite.peers.frameworks.served import INSTRUCTIONS, MERGE, NO_KEY, Models, Workflow, main

INFO = ModelInfo(
    vision=False, function_calling=False, json_output=False, family=ModelFamily.UNKNOWN, structured_output=False
)


def build(models: Models) -> Workflow:
    """Make the model clients once; agents and team hold a conversation, so each request has its own."""
    steps = [_client(models, model) for model in models.steps]
    merge = _client(models, models.merge)

    async def run(question: str) -> str:
        graph = DiGraphBuilder()
        last = AssistantAgent("merge", model_client=merge, system_message=MERGE)
        graph.add_node(last)
        for number, (client, instruction) in enumerate(zip(steps, INSTRUCTIONS, strict=True)):
            agent = AssistantAgent(f"step{number}", model_client=client, system_message=instruction)
            graph.add_node(agent).add_edge(agent, last)
        team = GraphFlow(graph.get_participants(), graph.build())
        done = await team.run(task=question)
        replies = [message for message in done.messages if message.source == "merge"]
        return str(replies[-1].to_text()) if replies else ""

    return run


def _client(models: Models, model: str) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model=model, base_url=f"{models.url}/v1", api_key=NO_KEY, model_info=INFO)


if __name__ == "__main__":
    main(build)
