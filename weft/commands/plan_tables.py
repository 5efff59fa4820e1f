"""Prints the planner's answer: the best plans in a table, the reason, rejected plans, and gains of better hardware."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from weft.cluster.hardware import describe
from weft.commands.console import format_seconds, say
from weft.planner.answer import Answer
from weft.planner.explain import GB
from weft.planner.report.page import exposed_seconds
from weft.planner.report.style import number

MAX_REFUSED = 2
NUMBERS_WIDTH = 62  # columns of the numbers of a plan
LEAST_SHOWN = 0.0005  # of a step; what saves less saves nothing


def show_answer(console: Console, answer: Answer) -> None:
    """Print the whole answer."""
    question, model = answer.question, answer.model
    console.print(f"[bold]machine[/]  {describe(model.cluster, question.precision)}", highlight=False)
    console.print(
        f"[bold]model[/]    {answer.name}, {model.numel / 1e9:,.4g} billion parameters in {model.num_blocks} blocks; "
        f"{question.describe()} a step in {question.precision}",
        highlight=False,
    )
    constraints = f"; {', '.join(one.text for one in question.constraints)}" if question.constraints else ""
    console.print(
        f"[bold]search[/]   {answer.found.num_considered:,} plans in "
        f"{format_seconds(answer.search_seconds)}{constraints}",
        highlight=False,
    )
    if answer.found.best:
        _show_plans(console, answer)
    say(console, f"[bold]why[/]      {answer.why}")
    for text in answer.assumptions:
        say(console, f"[yellow]assumed[/]  {text}")
    for one in answer.rejected:
        remedy = f"; {one.remedy}" if one.remedy else ""
        axes = f"{one.candidate.plan.describe_axes()}, micro-batch {one.candidate.plan.micro_batch}"
        faster = f" ({format_seconds(one.candidate.seconds)} a step)"
        say(console, f"[bold]rejected[/] {axes}{faster}: {one.reason}{remedy}")
    for what, reason in answer.found.refused[:MAX_REFUSED]:
        say(console, f"[bold]refused[/]  {what}: {reason}")
    if answer.sensitivities:
        console.print(_sensitivities(answer))


def _show_plans(console: Console, answer: Answer) -> None:
    """Print the plans with their numbers; on a narrow terminal the plans are listed below the table."""
    plans = [
        f"{one.plan.describe_axes()}, micro-batch {one.plan.micro_batch} × {one.num_micro_batches}"
        f"{one.plan.memory.words}"
        for one in answer.layouts()
    ]
    is_narrow = console.width < max(map(len, plans)) + NUMBERS_WIDTH
    console.print(_plans(answer, [str(number) for number in range(1, len(plans) + 1)] if is_narrow else plans))
    for index, plan in enumerate(plans if is_narrow else [], 1):
        say(console, f"plan {index}: {plan}")


def _plans(answer: Answer, names: list[str]) -> Table:
    table = Table(title="the best plan of each layout", title_justify="left", box=None, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    unit = answer.question.unit
    for name in ("step", f"{unit}/s", "MFU", "memory", "exposed", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    limit = answer.model.cluster.node.device.memory_bytes
    for index, (name, one) in enumerate(zip(names, answer.layouts(), strict=True)):
        rates, step = answer.rates(one), one.step
        assert step is not None
        table.add_row(
            name,
            format_seconds(one.seconds),
            number(rates[f"{unit}_per_second"]),
            "" if rates["mfu"] is None else f"{rates['mfu']:.1%}",
            f"{one.memory.total_bytes / GB:.1f}/{limit / GB:.4g} GB",
            f"{exposed_seconds(step.where) / one.seconds:.1%}",
            f"{step.wait_share:.1%}",
            style="bold" if index == 0 else "",
        )
    return table


def _sensitivities(answer: Answer) -> Table:
    table = Table(title="what more would change", title_justify="left", box=None, pad_edge=False)
    for name in ("change", "step", "saved", "best plan then"):
        table.add_column(name, overflow="fold")
    for one in answer.sensitivities:
        saved = one.saved_seconds / (one.seconds + one.saved_seconds)
        table.add_row(
            one.change, format_seconds(one.seconds), f"{saved:.1%}" if saved >= LEAST_SHOWN else "nothing", one.axes
        )
    return table
