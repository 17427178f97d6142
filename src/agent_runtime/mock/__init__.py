"""The two remotes of the provisioning agent, a cloud and a model: real HTTP servers that a kill never makes forget."""

from agent_runtime.mock.start import (
    CLOUD_PORT,
    LOOPBACK,
    MODEL_PORT,
    Mocks,
    MockServer,
    start_cloud,
    start_mocks,
    start_model,
)
from agent_runtime.mock.switches import Switches, SwitchRefused
from agent_runtime.mock.troubles import CannotListen, MockTrouble, StateUnusable

__all__ = [
    "CLOUD_PORT",
    "LOOPBACK",
    "MODEL_PORT",
    "CannotListen",
    "MockServer",
    "MockTrouble",
    "Mocks",
    "StateUnusable",
    "SwitchRefused",
    "Switches",
    "start_cloud",
    "start_mocks",
    "start_model",
]
