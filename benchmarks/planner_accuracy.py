"""The planner's step model against published tables: error by table, and regret where plans were measured side by side.

    python benchmarks/planner_accuracy.py [--table FILE.csv] [--rows] [--json]

The tables lie in benchmarks/published, each with its source in its first line; `--table` takes another file in one of
their formats, or a folder of such files: benchmarks/published/heldout holds sets that nothing was ever fitted on. An
error is predicted over measured seconds of a step, less one. Regret: of rows that differ only in the plan, how much
longer the one predicted to be the best took than the best measured. Nothing is fitted here: constants stand in
weft/planner, one calibration for each device in weft/clusters, facts about frameworks in weft/planner/frameworks.py.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import harness
import torch
from published_memory import predict_memory_bytes
from published_models import Model
from published_tables import Case, read

from weft.architectures.experts import Capacity
from weft.cluster.hardware import load
from weft.errors import WeftError
from weft.models import DecoderConfig, GPT2Config, build, token_loss
from weft.plan import Plan
from weft.planner.step import StepModel
from weft.profiling import Profile, profile
from weft.profiling.workload import Workload, workload

PUBLISHED = Path(__file__).parent / "published"
ALLOWED_REGRET = 0.05
COMPUTED = 1e-7  # of a row: no clock repeats a training step so well


@dataclass(frozen=True)
class Result:
    """A case and what the model says."""

    case: Case
    plan: Plan
    seconds: float

    @property
    def error(self) -> float:
        """Positive: predicted to take longer than it did."""
        return self.seconds / self.case.seconds - 1


def profile_of(model: Model) -> Profile:
    """The profile of one sequence through the model with two blocks, which models of any depth share."""
    return _profile_of_two(replace(model, layers=2, gated=True))


@cache
def _profile_of_two(model: Model) -> Profile:
    config: GPT2Config | DecoderConfig
    if model.inner:
        experts = (
            {}
            if not model.experts
            else {
                "architecture": "qwen2_moe" if model.shared else "mixtral",
                "num_experts": model.experts,
                "num_experts_per_tok": model.chosen,
                "shared_expert_intermediate_size": model.shared,
                "moe_intermediate_size": model.inner,
                "capacity": Capacity(1.0),
            }
        )
        config = DecoderConfig(
            **experts,
            vocab_size=model.vocabulary,
            hidden_size=model.hidden,
            num_hidden_layers=2,
            num_attention_heads=model.heads,
            num_key_value_heads=model.key_value_heads,
            intermediate_size=model.inner,
        )
    else:
        config = GPT2Config(
            vocab_size=model.vocabulary,
            n_positions=model.sequence,
            n_embd=model.hidden,
            n_head=model.heads,
            n_layer=2,
            resid_pdrop=0.1 if model.dropout else 0.0,
        )
    with torch.device("meta"):
        module = build(config).to(torch.bfloat16)

    def tokens() -> torch.Tensor:
        return torch.zeros(1, model.sequence, dtype=torch.long)

    return profile(module, lambda: (tokens(),), lambda logits: token_loss(logits, tokens()))


@cache
def chain(model: Model) -> tuple[Workload, tuple[int, int, int]]:
    """The work of a model, deepened, and the parameters of its ends and blocks."""
    taken = profile_of(model)
    work = workload(taken)
    block, numel = work.blocks[1], taken.blocks[1].numel
    if not model.gated:  # without the second projection into the MLP
        second = next(i for i in reversed(range(len(block.products))) if block.products[i].outputs == model.inner)
        block = replace(block, products=block.products[:second] + block.products[second + 1 :])
        numel -= model.hidden * model.inner
    table = model.vocabulary * model.hidden
    ends = (table + (0 if model.inner else model.sequence * model.hidden), numel, table)
    return replace(work, blocks=(block,) * model.layers), ends


def predict(case: Case) -> Result:
    """The step's seconds under the case's plan; of several, the one that the model takes for the best."""
    work, (first, block, last) = chain(case.model)
    cluster, found = load(case.cluster), []
    if case.node_bytes_per_second is not None:
        inter = replace(cluster.node.inter, bandwidth_bytes_per_second=case.node_bytes_per_second)
        cluster = replace(cluster, node=replace(cluster.node, inter=inter))
    if case.calibration is not None:
        device = replace(cluster.node.device, calibration=case.calibration)
        cluster = replace(cluster, node=replace(cluster.node, device=device))
    for plan, count in case.plans:
        is_tied = not case.model.inner and plan.pipe.degree == 1  # one table serves both ends
        model = StepModel(
            work,
            cluster,
            case.software,
            (first, block, 0 if is_tied else last),
            expert_numel=work.blocks[0].expert_numel,
        )
        found.append(Result(case, plan, model.step(plan, count).seconds))
    return min(found, key=lambda result: result.seconds)


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Mean, median, 95th percentile and worst of the sizes of errors, and their mean with sign."""
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(sizes),
        "mean": statistics.mean(sizes),
        "median": statistics.median(sizes),
        "p95": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
        "worst": sizes[-1],
        "bias": statistics.mean(errors),
    }


def ranked(results: Iterable[Result]) -> dict[tuple[object, ...], tuple[Result, Result]]:
    """By group of at least two plans: the one that the model ranks first, and the best measured."""
    groups: dict[tuple[object, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.case.group:
            groups[result.case.group].append(result)
    return {
        group: (min(members, key=lambda one: one.seconds), min(members, key=lambda one: one.case.seconds))
        for group, members in groups.items()
        if len(members) > 1
    }


def regrets(results: Iterable[Result]) -> dict[tuple[object, ...], float]:
    """By group: the measured time of the plan ranked first, over the best measured, less one."""
    return {group: first.case.seconds / best.case.seconds - 1 for group, (first, best) in ranked(results).items()}


def off_lines(cases: Iterable[Case]) -> list[float]:
    """Of rows that differ in nothing but the number of micro-batches: how far one between others lies from the straight
    line through the outermost, as a share of it. What was measured scatters.
    """
    series: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    for case in cases:
        if len(case.plans) == 1:
            ((plan, count),) = case.plans
            series[case.model, case.cluster, case.software, plan][count] = case.seconds
    found = []
    for each in series.values():
        first, *between, last = sorted(each) if len(each) > 1 else (0, 0)
        for count in between:
            line = each[first] + (each[last] - each[first]) * (count - first) / (last - first)
            found.append(abs(each[count] / line - 1))
    return found


def report(results: Sequence[Result], show_rows: bool) -> dict[str, object]:
    """Prints what is found, and returns it."""
    tables: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        tables[result.case.table].append(result)
    print(f"{'table':28s} rows   mean  median    p95  worst   bias  worst row")
    out: dict[str, object] = {}
    for table, members in tables.items():
        found = summary([member.error for member in members])
        worst = max(members, key=lambda member: abs(member.error))
        figures = "  ".join(f"{100 * found[name]:5.1f}" for name in ("mean", "median", "p95", "worst", "bias"))
        print(f"{table:28s} {found['rows']:4.0f}  {figures}  {worst.case.label} ({worst.plan.describe_axes()})")
        out[table] = {**found, "worst_row": worst.case.label}
        for member in members if show_rows else ():
            print(f"    {member.error:+6.1%}  {member.case.seconds:9.4f} s  {member.case.label}")
        off = off_lines(member.case for member in members)
        if off and max(off) < COMPUTED:
            print(f"    computed, not measured: {len(off)} rows lie on lines over micro-batches to {max(off):.0e}")
        by_group = regrets(members)
        for first, best in ranked(members).values() if show_rows else ():
            value = first.case.seconds / best.case.seconds - 1
            print(f"    regret {value:6.1%}  {first.case.label} ({first.error:+.1%})")
            if value > ALLOWED_REGRET:
                print(f"{'best':>17s}  {best.case.label} ({best.error:+.1%})")
        regret = list(by_group.values())
        if regret:
            share = sum(value <= ALLOWED_REGRET for value in regret) / len(regret)
            values = [statistics.median(regret), statistics.mean(regret), max(regret), share]
            print(
                f"    regret of {len(regret)} groups: median {values[0]:.1%}, mean {values[1]:.1%}, "
                f"worst {values[2]:.1%}; within 5 %: {values[3]:.0%}"
            )
            out[f"{table} regret"] = dict(
                zip(("groups", "median", "mean", "worst", "within_5_percent"), (len(regret), *values), strict=True)
            )
    out.update(_memory(results, show_rows))
    return out


def memory_error(result: Result) -> float:
    """Positive: predicted to hold more than it did."""
    case = result.case
    assert case.memory_gib
    held = predict_memory_bytes(case, result.plan, profile_of(replace(case.model, dropout=False)))
    return held / 2**30 / case.memory_gib - 1


def _memory(results: Sequence[Result], show_rows: bool) -> dict[str, object]:
    """Errors of memory, where tables give it."""
    tables: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.case.memory_gib:
            tables[result.case.table.split()[0]].append(result)
    out: dict[str, object] = {}
    for table, members in tables.items():
        errors = [memory_error(member) for member in members]
        found = summary(errors)
        figures = "  ".join(f"{100 * found[name]:5.1f}" for name in ("mean", "median", "p95", "worst", "bias"))
        print(f"{'memory ' + table:28s} {found['rows']:4.0f}  {figures}")
        for error, member in zip(errors, members, strict=True) if show_rows else ():
            print(f"    {error:+6.1%}  {member.case.memory_gib:7.2f} GiB  {member.case.label}")
        out[f"memory {table}"] = found
    return out


def _predict(case: Case, path: Path) -> Result:
    try:
        return predict(case)
    except WeftError as error:
        raise SystemExit(f"{path}, {case.label}: {error}") from error


def main() -> None:
    """The command."""
    parser = harness.options(__doc__, "planner-accuracy.json")
    parser.add_argument("--table", type=Path, help="a CSV file in a format of benchmarks/published, or a folder")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--json", action="store_true", help="write --out")
    options = parser.parse_args()
    where = options.table or PUBLISHED
    paths = sorted(where.glob("*.csv")) if where.is_dir() else [where]
    results = [_predict(case, path) for path in paths for case in read(path)]
    found = report(results, options.rows)
    if options.json:
        harness.write(options.out, found, device="cpu")


if __name__ == "__main__":
    main()
