"""Show what an assertion of the contract compared."""

import pytest

pytest.register_assert_rewrite("agent_runtime.testing.store_contract")
