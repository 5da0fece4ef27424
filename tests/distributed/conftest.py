"""What tests of several processes share."""

import pytest
from started_ranks import take_own_shared_memory


@pytest.fixture(scope="session", autouse=True)
def own_shared_memory() -> None:
    """Let no test find what another one, in another process, has left there; without the rights they share it."""
    take_own_shared_memory()
