"""A flow's graph as boxes and arrows with places, and the way that a run has gone. Pure.

It is made from the graph as plain data, which every run of a flow keeps: a face needs no code of the flow. Nodes stand in
layers, each as far down as the longest way to it; in a layer they are ordered by where their arrows come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BOX_WIDTH = 150
BOX_HEIGHT = 44
ACROSS = 30
DOWN = 46
MOST_NODES = 200
"""A larger graph is drawn without its order: its first nodes."""


@dataclass(frozen=True, slots=True)
class Box:
    """A node, with its upper left corner."""

    name: str
    under: str
    """What it does: its tool, or its kind."""
    x: float
    y: float
    visits: int
    """How often the run has been there."""
    is_next: bool
    """Whether the run goes on here from its last checkpoint."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """An edge, as the path of an SVG."""

    path: str
    label: str
    x: float
    y: float
    is_walked: bool
    """Whether the run has been at both of its ends."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph with places, in a frame of `width` by `height`."""

    width: float
    height: float
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]


def draw_graph(graph: Mapping[str, Any], visits: Mapping[str, int], frontier: Sequence[str]) -> Drawing | None:
    """The drawing of a flow's graph; None where it describes no nodes."""
    nodes = _objects(graph.get("nodes"))
    names = [name for name in _texts(graph.get("order")) if name in nodes][:MOST_NODES]
    if not names:
        return None
    edges = _edges(graph, nodes, set(names))
    places, width = _place(_layers(names, edges), edges)
    boxes = [Box(name, _under(nodes[name]), *places[name], visits.get(name, 0), is_next=name in frontier) for name in names]
    deepest = max(box.y for box in boxes) + BOX_HEIGHT
    arrows = [_arrow(places, edge, visits, width + 30) for edge in edges]
    return Drawing(width + 60, deepest + 8, boxes, arrows)


Edge = tuple[str, str, str]
"""From, to, and what is written on it."""


def _edges(graph: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]], known: set[str]) -> list[Edge]:
    found = []
    for text in _texts(graph.get("edges")):
        source, _, rest = text.partition(" → ")
        target, when = (rest.removesuffix(" when"), "when") if rest.endswith(" when") and rest not in known else (rest, "")
        found.append((source, target, when))
    found += [(name, str(node["on_error"]), "error") for name, node in nodes.items() if node.get("on_error")]
    return [edge for edge in found if edge[0] in known and edge[1] in known]


def _layers(names: Sequence[str], edges: Sequence[Edge]) -> list[list[str]]:
    """Each node as far down as the longest way to it; an arrow that leads back is not counted."""
    at = {name: number for number, name in enumerate(names)}
    forward = [(source, target) for source, target, _ in edges if at[source] < at[target]]
    depth = dict.fromkeys(names, 0)
    for name in names:
        for source, target in forward:
            if source == name:
                depth[target] = max(depth[target], depth[name] + 1)
    layers: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in names:
        layers[depth[name]].append(name)
    return layers


def _place(layers: Sequence[list[str]], edges: Sequence[Edge]) -> tuple[dict[str, tuple[float, float]], float]:
    """The corner of every box, layers centred; and how wide it all is."""
    places: dict[str, tuple[float, float]] = {}
    widest = max(len(layer) for layer in layers)
    width = widest * BOX_WIDTH + (widest - 1) * ACROSS
    for number, layer in enumerate(layers):
        layer.sort(key=lambda name: _pull(name, edges, places))
        left = (width - len(layer) * BOX_WIDTH - (len(layer) - 1) * ACROSS) / 2
        for index, name in enumerate(layer):
            places[name] = (left + index * (BOX_WIDTH + ACROSS) + 4, number * (BOX_HEIGHT + DOWN) + 4)
    return places, width


def _pull(name: str, edges: Sequence[Edge], places: Mapping[str, tuple[float, float]]) -> float:
    """Where the arrows of a node come from, on average."""
    above = [places[source][0] for source, target, _ in edges if target == name and source in places]
    return sum(above) / len(above) if above else 0.0


def _arrow(places: Mapping[str, tuple[float, float]], edge: Edge, visits: Mapping[str, int], outside: float) -> Arrow:
    """Down, or back up outside of all boxes."""
    source, target, label = edge
    (x0, y0), (x1, y1) = places[source], places[target]
    is_walked = visits.get(source, 0) > 0 and visits.get(target, 0) > 0
    if y1 > y0:
        start, end = (x0 + BOX_WIDTH / 2, y0 + BOX_HEIGHT), (x1 + BOX_WIDTH / 2, y1)
        middle = (start[1] + end[1]) / 2
        path = (
            f"M{start[0]:.0f},{start[1]:.0f} C{start[0]:.0f},{middle:.0f} {end[0]:.0f},{middle:.0f} {end[0]:.0f},{end[1]:.0f}"
        )
        return Arrow(path, label, (start[0] + end[0]) / 2 + 6, middle, is_walked)
    start, end = (x0 + BOX_WIDTH, y0 + BOX_HEIGHT / 2), (x1 + BOX_WIDTH, y1 + BOX_HEIGHT / 2)
    path = (
        f"M{start[0]:.0f},{start[1]:.0f} C{outside:.0f},{start[1]:.0f} {outside:.0f},{start[1]:.0f} {outside:.0f},"
        f"{(start[1] + end[1]) / 2:.0f} S{outside:.0f},{end[1]:.0f} {end[0]:.0f},{end[1]:.0f}"
    )
    return Arrow(path, label, outside - 12, (start[1] + end[1]) / 2, is_walked)


def _under(node: Mapping[str, Any]) -> str:
    match node.get("kind"):
        case "call":
            return str(node.get("tool", ""))
        case "map":
            return f"{_under(_object(node.get('each')))} × n"
        case "flow":
            return f"flow {_object(node.get('flow')).get('name', '')}"
        case kind:
            return str(kind or "")


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> Mapping[str, Mapping[str, Any]]:
    return {name: _object(each) for name, each in _object(value).items()}
