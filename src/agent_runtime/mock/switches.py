"""The switches of a remote: what trouble it plays, and how much of it. Pure.

Each remote has its own set. A count (`drop`, `refuse`) goes down by one for every request that it hits.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from agent_runtime.mock.troubles import MockTrouble

MOST = 1_000_000_000


class SwitchRefused(MockTrouble):
    """An unknown switch, or a value that it cannot have."""


@dataclass(frozen=True, slots=True)
class Switches:
    """One remote's switches; all off by default."""

    latency_ms: int = field(default=0, metadata={"help": "wait before acting"})
    late_ms: int = field(default=0, metadata={"help": "act, then wait, then answer"})
    drop: int = field(default=0, metadata={"help": "act on the next N requests, then hang up without an answer"})
    refuse: int = field(default=0, metadata={"help": "answer the next N requests with 503, before acting"})
    forget: bool = field(default=False, metadata={"help": "the cloud forgets its keys: a repeated key creates again"})
    keyless: bool = field(default=False, metadata={"help": "the cloud knows no keys: every request creates"})

    def __post_init__(self) -> None:
        for switch in fields(self):
            _check(switch.name, getattr(self, switch.name), type(switch.default))

    def changed(self, changes: Mapping[str, object]) -> "Switches":
        """These switches with the named ones set anew; an unknown name is refused."""
        unknown = sorted(set(changes) - set(DEFAULTS))
        if unknown:
            raise SwitchRefused(f"unknown switch {', '.join(unknown)}; known are {', '.join(DEFAULTS)}")
        # Each value is checked when the record is made, which the type checker cannot see.
        return replace(self, **changes)  # type: ignore[arg-type]

    def values(self) -> dict[str, int | bool]:
        """Every switch by its name."""
        return asdict(self)


def _check(name: str, value: object, kind: type) -> None:
    # `True` is an int to Python; a latency of True is a slip all the same, so types are compared exactly.
    if type(value) is not kind:
        expected = "true or false" if kind is bool else "a whole number"
        raise SwitchRefused(f"switch {name} takes {expected}, not {value!r}")
    if isinstance(value, int) and not 0 <= value <= MOST:
        raise SwitchRefused(f"switch {name} takes 0 to {MOST}, not {value}")


DEFAULTS: dict[str, int | bool] = Switches().values()
HELP: dict[str, str] = {switch.name: switch.metadata["help"] for switch in fields(Switches)}
