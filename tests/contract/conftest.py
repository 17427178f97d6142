"""Show what an assertion of the contract compared; the pooler behind which stores pass it too."""

from collections.abc import Iterator

import pytest

from tests.conftest import Servers
from tests.servers import Pooler, own_origins

pytest.register_assert_rewrite("agent_runtime.testing.store_contract")


@pytest.fixture(scope="session")
def pooler(servers: Servers) -> Iterator[Pooler]:
    before = Pooler(servers(own_origins()[0]))
    yield before
    before.close()
