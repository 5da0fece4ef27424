"""What the tests of whole pipelines share."""

from harness.pipelines import scalar_code

__all__ = ["scalar_code"]
