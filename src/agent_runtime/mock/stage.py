"""The course of every request that acts, at both remotes: count, refuse, wait, act, be late, answer or hang up."""

from collections.abc import Callable
from http import HTTPStatus

from agent_runtime.mock.listener import Answer, Request, Route, refusal
from agent_runtime.mock.pauses import Pauses
from agent_runtime.mock.state import Arrival, MockState
from agent_runtime.mock.switches import SwitchRefused


class Stage:
    """One remote's state, switches and waits."""

    def __init__(self, remote: str, state: MockState, pauses: Pauses) -> None:
        self.remote = remote
        self.state = state
        self._pauses = pauses

    def play(self, subject: str, act: Callable[[Arrival], Answer]) -> Answer | None:
        """Acts as the switches will have it. The request is on disk before it acts, the act before it is answered."""
        arrival = self.state.arrive(self.remote, subject)
        if arrival.is_refused:
            return _REFUSED
        self._pauses.wait(arrival.switches.latency_ms)
        answer = act(arrival)
        self._pauses.wait(arrival.switches.late_ms)
        return None if arrival.is_dropped else answer

    def switch_routes(self) -> dict[str, Route]:
        """`GET` and `POST /switches`."""
        return {"GET": self._show_switches, "POST": self._change_switches}

    def _show_switches(self, _: Request) -> Answer:
        return Answer(HTTPStatus.OK, self.state.switches(self.remote).values())

    def _change_switches(self, request: Request) -> Answer:
        try:
            return Answer(HTTPStatus.OK, self.state.change_switches(self.remote, request.fields()).values())
        except SwitchRefused as error:
            raise refusal(str(error)) from error


_REFUSED = Answer(
    HTTPStatus.SERVICE_UNAVAILABLE,
    {"error": "refused", "message": "switched to refuse this request; nothing was done, send it again"},
)
