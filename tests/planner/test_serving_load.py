"""Questions about a service: rates within limits, devices and dollars, traces; and that answers agree."""

from __future__ import annotations

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest
from commands_for_tests import Weft

import weft.planner
from weft.cluster.hardware import load
from weft.errors import ConfigError
from weft.models import DecoderConfig, write_config
from weft.plan import Plan, Tensor
from weft.planner.serving import ServingModel
from weft.planner.serving_load import (
    Lengths,
    Limits,
    ReplicaLoad,
    ServedRate,
    ServiceQuestion,
    ServiceTraffic,
    Waits,
    answer,
    frontier,
)  # fmt: skip
from weft.serve.spec import ServingSpec

CONFIG = DecoderConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=4096,
)  # fmt: skip
TRAFFIC = ServiceTraffic.drawn(Lengths.of("~300", "prompt"), Lengths.of("20-120", "output"), 4096, number=60)


def replica(plan: Plan = Plan(), traffic: ServiceTraffic = TRAFFIC) -> ReplicaLoad:  # noqa: B008 (a frozen value)
    spec = ServingSpec(device="cuda", max_running=32, token_budget=512)
    return ReplicaLoad(ServingModel(CONFIG, load("h200:1x2"), plan, "bf16", spec), traffic)


@pytest.fixture(scope="module")
def loads() -> list[tuple[Plan, ReplicaLoad]]:
    return [(plan, replica(plan)) for plan in (Plan(data=2), Plan(tensor=Tensor(2)))]


def test_more_requests_never_need_fewer_devices_and_looser_limits_never_cost_more(
    loads: list[tuple[Plan, ReplicaLoad]],
) -> None:
    capacity = max(one.capacity for _, one in loads)
    rates = [capacity * share for share in (0.01, 0.3, 0.9, 1.7, 5.0)]
    limits = [Limits(first, following) for first in (0.02, 0.1, 1.0) for following in (0.002, 0.01, 0.1)]

    def best(rate: float, given: Limits) -> tuple[float, float]:
        """The fewest devices, and the least dollars."""
        found = [answer(one, plan, "", TRAFFIC, rate, given, 2.0) for plan, one in loads]
        kept = [one for one in found if one is not None]
        devices = min((one.num_devices for one in kept), default=float("inf"))
        return devices, min((one.dollars_per_million or 0.0 for one in kept), default=float("inf"))

    devices = {given: [best(rate, given)[0] for rate in rates] for given in limits}
    assert all(few <= many for row in devices.values() for few, many in pairwise(row))
    assert len({one for row in devices.values() for one in row}) > 3
    for tight in limits:
        for loose in limits:
            if loose.first_token_seconds >= tight.first_token_seconds and (  # type: ignore[operator]
                loose.next_token_seconds >= tight.next_token_seconds  # type: ignore[operator]
            ):
                assert all(best(rate, loose)[1] <= best(rate, tight)[1] for rate in rates)


def test_a_served_rate_keeps_its_limits_and_a_lower_load_waits_less(loads: list[tuple[Plan, ReplicaLoad]]) -> None:
    for _, one in loads:
        limits = Limits(0.5, 0.02)
        served = one.best(limits)
        assert served is not None
        assert limits.hold(served.waits)
        assert served.rate <= one.capacity
        assert one.waits(0).first < one.waits(31).first
        assert one.waits(0).following < one.waits(31).following
        unlimited = one.best(Limits())
        assert unlimited is not None
        assert unlimited.rate == pytest.approx(one.capacity)
        assert one.best(Limits(1e-9)) is None
        assert unlimited in one.tried()


def test_dollars_are_those_of_the_devices_that_are_used() -> None:
    one = replica(Plan())
    found = answer(one, Plan(), "", TRAFFIC, None, Limits(), 3.6)
    assert found is not None
    assert found.num_devices == 1
    tokens = found.served.rate * sum(each.output for each in TRAFFIC.arrivals) / len(TRAFFIC.arrivals)
    assert found.dollars_per_million == pytest.approx(1e6 * 3.6 / 3600 / tokens)
    three = answer(one, Plan(), "", TRAFFIC, 2.5 * found.served.rate, Limits(), 3.6)
    assert three is not None
    assert (three.num_replicas, three.num_devices) == (3, 3)
    assert three.dollars_per_million == pytest.approx(3 / 2.5 * (found.dollars_per_million or 0))


def test_prompts_that_begin_alike_are_computed_once() -> None:
    shared = ServiceTraffic(tuple(one._replace(num_shared=min(256, one.prompt)) for one in TRAFFIC.arrivals))
    assert replica(traffic=shared).capacity > 1.1 * replica().capacity


def test_lengths_and_traces_are_read_and_wrong_ones_refused(tmp_path: Path) -> None:
    assert Lengths.of("512", "prompt").is_one
    assert [
        one.prompt for one in ServiceTraffic.drawn(Lengths.of("7", ""), Lengths.of("9", ""), 99, number=2).arrivals
    ] == [
        7,
        7,
    ]
    drawn = [
        one.prompt
        for one in ServiceTraffic.drawn(Lengths.of("~100", ""), Lengths.of("5-9", ""), 4096, number=2000).arrivals
    ]
    assert sum(drawn) / 2000 == pytest.approx(100, rel=0.1)
    for wrong in ("0", "9-5", "~5-9", "x", "5-", "1.5"):
        with pytest.raises(ConfigError, match=f"--prompt {wrong} must be a number of tokens"):
            Lengths.of(wrong, "prompt")
    rows = [(10.0, 5, 3), (14.0, 6, 2), (12.0, 7, 1)]
    (tmp_path / "a.csv").write_text("seconds,prompt,output\n" + "\n".join(",".join(map(str, row)) for row in rows))
    lines = [json.dumps(dict(zip(("seconds", "prompt", "output"), row, strict=True))) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    found = ServiceTraffic.read(tmp_path / "a.csv")
    assert found == ServiceTraffic.read(tmp_path / "a.jsonl")
    assert [one[:3] for one in found.arrivals] == [(5, 3, 0.0), (7, 1, 1.0), (6, 2, 2.0)]  # one a second
    assert [one.seconds for one in found.at(4.0)] == [0.0, 0.25, 0.5]
    for text in (
        "seconds,prompt\n1,2\n",
        "seconds,prompt,output\n1,2,3\n",
        "seconds,prompt,output\n1,0,3\n2,1,1\n",
        "{",
    ):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(ConfigError, match=r"--trace .*b\.csv (cannot be read|needs two requests)"):
            ServiceTraffic.read(tmp_path / "b.csv")
    with pytest.raises(ConfigError, match="has a request of 8 tokens, and the model is made for 7"):
        ServiceQuestion(Lengths(1, 1), Lengths(1, 1), trace=tmp_path / "a.csv").traffic(7)


def test_the_frontier_has_what_no_other_point_beats() -> None:
    points = [(name, 1, ServedRate(1.0, Waits(0.0, following, tokens))) for name, following, tokens in (
        ("fast", 0.01, 5.0), ("both", 0.02, 9.0), ("worse", 0.03, 8.0), ("much", 0.04, 12.0), ("equal", 0.04, 12.0),
    )]  # fmt: skip
    assert [name for name, *_ in frontier(points)] == ["fast", "both", "much"]


def test_the_command_answers_a_service_and_writes_its_page(weft: Weft, tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    given = ("plan", "--serve", "--model", tmp_path, "--cluster", "h200:1x2", "--prompt", "~60", "--output", "6-16")
    service = ("--rate", 500, "--first-token", 1, "--next-token", 0.02, "--price", 3)
    found = weft(*given, *service, "--report", tmp_path / "page.html", "--json").json
    best = found["answers"][0]
    assert best["num_devices"] == min(one["num_devices"] for one in found["answers"])
    assert best["num_replicas"] * best["served"]["rate"] >= 500
    assert all(one["served"]["waits"]["following"] <= 0.02 for one in found["answers"])
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert page.count("<circle") > 4
    alone = (*given[:5], "h200:1x1", *given[6:])
    shown = weft(*alone, *service, "--formats")
    assert "--weights fp8" in shown.out
    assert "Tokens/s for a user" in shown.out
    assert "Tokens/s for a user" not in weft(*alone, "--rate", 1, "--output", 1).out  # there is no next token
    for more, words in (
        (("--rate", 1, "--requests", 2), "--requests is for requests that arrive at once, and --rate asks about"),
        (("--next-token", 1e-9), "no layout on h200 keeps the limits; the last one"),
        (("--rate", -1), "--rate -1.0 must be a number above 0"),
        (("--first-token", 1e-9, "--output", 1), "no layout on h200 keeps the limits"),
        (("--rate", 1, "--prompt", 5000), "are more than the 4096 tokens of the model"),
    ):
        refused = weft(*alone, *more)
        assert refused.status == 2
        assert words in " ".join(refused.err.split())


def test_the_planner_knows_little_of_serving() -> None:
    """What it prices is stated by `weft/serve/costs.py`."""
    names = set[str]()
    for path in Path(weft.planner.__path__[0]).rglob("*.py"):
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("weft.serve"):
                names |= {each.name for each in one.names}
            assert not (isinstance(one, ast.Import) and any(each.name.startswith("weft.serve") for each in one.names))
    assert 0 < len(names) <= 10, sorted(names)
