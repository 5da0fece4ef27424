"""The planner decides, from numbers alone, which layers form which stage and whether the machine can hold the run."""
