"""What the tests of the runtime share."""

from harness.scalar_code import scalar_code

__all__ = ["scalar_code"]
