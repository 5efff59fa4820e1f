"""`weft plan --like`: a famous run beside weft's best plan for the same model, batch and machine."""

from __future__ import annotations

from rich.console import Console

from weft.commands.console import print_json, say
from weft.commands.plan_tables import show_answer
from weft.planner.famous_runs import compare, famous_run, famous_runs


def plan_like(name: str, console: Console, as_json: bool) -> None:
    """Predict a famous run's plan, search for weft's best, and print both with the difference in words; or, for the
    name "list", print the names of the runs.
    """
    if name == "list":
        names = list(famous_runs())
        print_json(names) if as_json else console.print("\n".join(names), highlight=False)
        return
    run = famous_run(name)
    with console.status("planning") as status:
        found = compare(run, status.update)
    if as_json:
        print_json(found.to_json())
        return
    for title, sentence in found.lines:
        say(console, f"[bold]{title:8}[/] {sentence}")
    show_answer(console, found.answer)
