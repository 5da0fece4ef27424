"""What the tests of whole pipelines and runs share."""

from harness.pipelines import scalar_code
from harness.small_run import eight, run, saved_inputs, workplace

__all__ = ["eight", "run", "saved_inputs", "scalar_code", "workplace"]
