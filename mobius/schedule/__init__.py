"""The plan of a run and the schedule that follows from it: ordered lists of typed actions, checked before they run."""

from mobius.schedule.action import Action, ActionKind, source_stage, target_stage
from mobius.schedule.build import build_schedule
from mobius.schedule.check import check
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ScheduleSpec

__all__ = [
    "Action",
    "ActionKind",
    "Schedule",
    "ScheduleSpec",
    "build_schedule",
    "check",
    "source_stage",
    "target_stage",
]
