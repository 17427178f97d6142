"""What an error of a call says: that the way to the remote failed, or that the remote knows the key with other arguments."""

import asyncio

from agent_runtime.errors import KeyConflict

_TRANSPORT = frozenset(
    {
        ("http", "HTTPException"),
        ("httpx", "TransportError"),
        ("httpx2", "TransportError"),
        ("httpcore", "NetworkError"),
        ("aiohttp", "ClientError"),
        ("urllib3", "HTTPError"),
        ("requests", "RequestException"),
        ("grpc", "RpcError"),
        ("websockets", "ConnectionClosed"),
    }
)
"""Errors by which well-known clients say that the way to the remote failed: (top module, class). None is an OSError."""


def find_conflict(error: BaseException) -> KeyConflict | None:
    """The conflict that a group of errors holds, as tasks side by side raise them."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, KeyConflict) else None
    return next((found for each in error.exceptions if (found := find_conflict(each)) is not None), None)


def is_transport(error: BaseException) -> bool:
    """Whether the error speaks of the way to the remote, and so says nothing about what the remote did."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_transport(each) for each in error.exceptions)
    if isinstance(error, OSError | EOFError | asyncio.CancelledError):
        return True
    return any((kind.__module__.split(".", 1)[0], kind.__name__) in _TRANSPORT for kind in type(error).__mro__)
