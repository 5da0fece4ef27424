"""What the tests of benchmarks share."""

import pytest
from harness.launched import start_forked


@pytest.fixture
def forked_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks fork the processes of their runs; that they can start new ones is test_service.py's claim."""
    monkeypatch.setattr("launch.start_ranks", start_forked)
    monkeypatch.setattr("service.start_ranks", start_forked)
