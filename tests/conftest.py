"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, each of which took a quarter of a second with it."""
    gc.collect()
    gc.freeze()
