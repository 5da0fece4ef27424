"""What the tests of models share."""

from harness.scalar_code import scalar_code

__all__ = ["scalar_code"]
