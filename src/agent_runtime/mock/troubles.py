"""What can go wrong with a mock itself, apart from what it is told to play. Pure."""

from pathlib import Path


class MockTrouble(Exception):
    """A mock could not be started or told what to do; the message says what to do next."""


class CannotListen(MockTrouble):
    """The port cannot be had."""

    def __init__(self, host: str, port: int, *, in_use: bool, reason: str) -> None:
        problem = "is in use: stop the program that has it, or" if in_use else f"cannot be opened ({reason}):"
        super().__init__(f"port {port} on {host} {problem} give another port (0 picks a free one)")
        self.host = host
        self.port = port


class StateUnusable(MockTrouble):
    """The state file is not ours, or cannot be opened or set up."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"state file {path}: {reason}; give another path")
        self.path = path
