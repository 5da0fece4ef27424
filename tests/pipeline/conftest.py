"""What the tests of whole pipelines share."""

from harness.scalar_code import scalar_code

__all__ = ["scalar_code"]
