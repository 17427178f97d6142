"""A graph of LangGraph: ask for the price, charge it. `start` begins its thread, anything else goes on with it."""

import sys
from typing import TypedDict

import bank
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    price: str
    receipt: str


def quote(state: State) -> State:
    return {"price": bank.quote()}


def charge(state: State) -> State:
    return {"receipt": bank.charge(state["price"])}


builder = StateGraph(State)
builder.add_node("quote", quote)
builder.add_node("charge", charge)
builder.add_edge(START, "quote")
builder.add_edge("quote", "charge")
builder.add_edge("charge", END)

with SqliteSaver.from_conn_string("runs.db") as saver:
    graph = builder.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "order-7"}}
    print(graph.invoke({} if sys.argv[1] == "start" else None, config, durability="sync"))
