"""How often a node of LangGraph begins that asks a person once: `python bench/peers/langgraph_interrupt.py`."""

from typing import TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt


class State(TypedDict, total=False):
    answer: str


begun: list[str] = []


def ask(state: State) -> State:
    begun.append("ask")
    return {"answer": interrupt({"amount": 20})}


builder = StateGraph(State)
builder.add_node("ask", ask)
builder.add_edge(START, "ask")
builder.add_edge("ask", END)
graph = builder.compile(checkpointer=InMemorySaver())
config = {"configurable": {"thread_id": "order-7"}}
graph.invoke({}, config)
print(graph.invoke(Command(resume="yes"), config), "the node began", len(begun), "times")
