"""The pipeline, its pure half: schedules as lists of actions, their proof, simulation and drawings. Needs no torch."""

from weft.pipeline.actions import Action, Edge, Message, Schedule, with_messages
from weft.pipeline.check import check
from weft.pipeline.draw import to_svg, to_text, write
from weft.pipeline.schedules import SCHEDULES, make_schedule
from weft.pipeline.simulate import Span, Timeline, simulate, simulate_like, timeline_of

__all__ = [
    "SCHEDULES",
    "Action",
    "Edge",
    "Message",
    "Schedule",
    "Span",
    "Timeline",
    "check",
    "make_schedule",
    "simulate",
    "simulate_like",
    "timeline_of",
    "to_svg",
    "to_text",
    "with_messages",
    "write",
]
