"""The model: a script that decides the provisioning steps, and writes its own count into every name it picks.

The count is that of the run's requests, so a step that is decided twice shows: the names of the second answer
end in 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from agent_runtime.mock.listener import Answer, Request, Routes, refusal, shown
from agent_runtime.mock.pauses import Pauses
from agent_runtime.mock.stage import Stage
from agent_runtime.mock.state import MockState

MODEL = "model"
UNKNOWN_SERVER = "srv"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool call that was answered; the result is None where only the name was given."""

    tool: str
    result: object = None


@dataclass(frozen=True, slots=True)
class Question:
    """A request to decide, checked."""

    run: str
    goal: str
    history: tuple[ToolResult, ...]


def decide(question: Question, count: int) -> dict[str, object]:
    """The next step, by how many steps were answered. Pure."""
    match len(question.history):
        case 0:
            return _call("create_server", {"name": f"srv-{count}", "size": "small"}, count)
        case 1:
            return _call("create_database", {"name": f"db-{count}", "engine": "postgres"}, count)
        case 2:
            target = _server_id(question.history)
            return _call("create_dns_record", {"name": f"www-{count}", "target": target}, count)
        case _:
            return {"text": f"done: {question.goal}", "count": count}


def model_routes(state: MockState, pauses: Pauses) -> Routes:
    """Everything that the model answers to."""
    model = Model(Stage(MODEL, state, pauses))
    return {
        "/decide": {"POST": model.decide},
        "/calls": {"GET": model.show_calls},
        "/switches": model.stage.switch_routes(),
    }


class Model:
    """The routes of the model."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def decide(self, request: Request) -> Answer | None:
        """`POST /decide`"""
        question = _read_question(request)
        return self.stage.play(question.run, lambda arrival: Answer(HTTPStatus.OK, decide(question, arrival.number)))

    def show_calls(self, _: Request) -> Answer:
        """`GET /calls`"""
        by_run = {run: count.requests for run, count in self.stage.state.calls(MODEL).items()}
        return Answer(HTTPStatus.OK, {"total": sum(by_run.values()), "by_run": by_run})


def _call(tool: str, args: dict[str, str], count: int) -> dict[str, object]:
    # The count makes the id unique within the run.
    return {"text": "", "tool_calls": [{"id": f"call_{count}", "name": tool, "args": args}], "count": count}


def _server_id(history: Sequence[ToolResult]) -> str:
    """The id in the answer to `create_server`, which may be the id itself or what the cloud answered."""
    for step in history:
        if step.tool == "create_server":
            found = step.result.get("id") if isinstance(step.result, dict) else step.result
            return found if isinstance(found, str) else UNKNOWN_SERVER
    return UNKNOWN_SERVER


def _read_question(request: Request) -> Question:
    fields = request.fields()
    run = _read_text(fields, "run")
    return Question(run=run, goal=_read_text(fields, "goal"), history=_read_history(fields.get("history")))


def _read_text(fields: dict[str, object], name: str) -> str:
    value = fields.get(name)
    if not (isinstance(value, str) and value and _is_unicode(value)):
        raise refusal(f'field "{name}" must be a text that is not empty, not {shown(value)}')
    return value


def _is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON can spell and nothing can store."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_history(history: object) -> tuple[ToolResult, ...]:
    if not isinstance(history, list):
        raise refusal(f'field "history" must be a list of the tool calls answered so far, not {shown(history)}')
    return tuple(_read_tool_result(step) for step in history)


def _read_tool_result(step: object) -> ToolResult:
    match step:
        case str():
            return ToolResult(step)
        case {"tool": str(tool), "result": result}:
            return ToolResult(tool, result)
        case _:
            raise refusal(
                f'each step of "history" must be {{"tool": name, "result": value}}, or the name alone, not {shown(step)}'
            )
