"""All that a run can be told: options, their reading and judging, and the command that starts it."""
