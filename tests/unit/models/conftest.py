"""What the tests of models share."""

from harness.pipelines import scalar_code

__all__ = ["scalar_code"]
