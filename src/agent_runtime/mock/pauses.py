"""The one place in which the mocks wait: played slowness, which ends early when the server closes."""

import threading
import time


class Closing(BaseException):
    """The server closes while a request waits: hang up, without acting further and without an answer."""


class Pauses:
    """Waits of one server."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def wait(self, ms: int) -> None:
        """Returns after `ms` milliseconds; raises `Closing` if the server closes first."""
        if ms and self._ended.wait(ms / 1000):
            raise Closing

    def end(self) -> None:
        """Ends the waits under way, and those to come."""
        self._ended.set()


def rest(seconds: float) -> None:
    """A short rest before something is tried again."""
    time.sleep(seconds)
