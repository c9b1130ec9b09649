"""The workflow as a LangGraph StateGraph, its models called by langchain-openai."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

from bench.suite.peers.frameworks.served import INSTRUCTIONS, NO_KEY, Models, Workflow, main, merging


class State(TypedDict):
    """What flows through the graph."""

    question: str
    answers: Annotated[list[str], operator.add]
    reply: str


Node = Callable[[State], Awaitable[dict[str, Any]]]


def build(models: Models) -> Workflow:
    """Compile the graph once; it is run for each request."""
    graph = StateGraph(State)
    names = []
    for number, (model, instruction) in enumerate(zip(models.steps, INSTRUCTIONS, strict=True)):
        names.append(f"step{number}")
        graph.add_node(names[-1], _step(_chat(models, model), instruction))
        graph.add_edge(START, names[-1])
    graph.add_node("merge", _merge(_chat(models, models.merge)))
    graph.add_edge(names, "merge")
    graph.add_edge("merge", END)
    compiled = graph.compile()

    async def run(question: str) -> str:
        state = await compiled.ainvoke({"question": question, "answers": [], "reply": ""})
        return str(state["reply"])

    return run


def _chat(models: Models, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{models.url}/v1", api_key=SecretStr(NO_KEY))


def _step(chat: ChatOpenAI, instruction: str) -> Node:
    async def step(state: State) -> dict[str, Any]:
        reply = await chat.ainvoke([SystemMessage(instruction), HumanMessage(state["question"])])
        return {"answers": [str(reply.content)]}

    return step


def _merge(chat: ChatOpenAI) -> Node:
    async def merge(state: State) -> dict[str, Any]:
        reply = await chat.ainvoke([HumanMessage(state["question"]), HumanMessage(merging(state["answers"]))])
        return {"reply": str(reply.content)}

    return merge


if __name__ == "__main__":
    main(build)
