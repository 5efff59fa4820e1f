"""Pipeline schedules as lists of actions: made, checked, simulated and drawn. This package does not need torch."""

from weft.schedule.actions import Action, Edge, Message, Schedule, with_messages
from weft.schedule.check import check
from weft.schedule.draw import to_svg, to_text, write
from weft.schedule.schedules import SCHEDULES, make_schedule
from weft.schedule.simulate import Span, Timeline, simulate, simulate_like, timeline_of

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
