"""The schedule: one ordered list of typed actions per rank, built in small passes and checked before it runs."""

from mobius.schedule.action import Action, ActionKind, source_stage, target_stage
from mobius.schedule.build import build_schedule
from mobius.schedule.check import check
from mobius.schedule.schedule import Schedule

__all__ = ["Action", "ActionKind", "Schedule", "build_schedule", "check", "source_stage", "target_stage"]
