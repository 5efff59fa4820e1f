"""The pipeline, its pure half: schedules as lists of actions, their proof, simulation and drawings. Needs no torch."""

from weft.pipeline.actions import Action, Edge, Message, Schedule, with_messages
from weft.pipeline.check import check
from weft.pipeline.draw import to_svg, to_text
from weft.pipeline.schedules import SCHEDULES, make_schedule
from weft.pipeline.simulate import Timeline, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Edge",
    "Message",
    "Schedule",
    "Timeline",
    "check",
    "make_schedule",
    "simulate",
    "to_svg",
    "to_text",
    "with_messages",
]
