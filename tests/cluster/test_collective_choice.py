"""Rounds of messages between nodes, and the choice of the fastest algorithm for each operation and size."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from weft.cluster.collective_choice import ALGORITHMS, OPERATIONS, Levels, calls_of, describe_choices
from weft.cluster.communication import Communication
from weft.cluster.hardware import AxisLink, MeasuredCollective
from weft.cluster.rounds import blocks_sent, exchange_rounds, gather_rounds
from weft.errors import ConfigError, PlanError
from weft.plan import Plan

NODES = range(1, 34)
SHAPES = [(2, 2), (3, 2), (4, 1), (8, 4), (5, 8), (64, 8)]


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_rounds_bring_every_block_once(algorithm: str) -> None:
    for num_nodes in NODES:
        held = [{node} for node in range(num_nodes)]  # absolute blocks of each node
        for distance, first, count in gather_rounds(algorithm, num_nodes):  # type: ignore[arg-type]
            before = [set(one) for one in held]
            for node in range(num_nodes):
                arrives = {(node + first + place) % num_nodes for place in range(count)}
                assert arrives <= before[(node + distance) % num_nodes], "the sender has them"
                assert not arrives & held[node], "nothing comes twice"
                held[node] |= arrives
        assert held == [set(range(num_nodes))] * num_nodes
        moved = dict.fromkeys(range(num_nodes), 0)
        for distance, offsets in exchange_rounds(algorithm, num_nodes):  # type: ignore[arg-type]
            for offset in offsets:
                moved[offset] += distance
        assert all(offset == distance for offset, distance in moved.items()), "a block ends at its receiver"


def test_numbers_of_messages() -> None:
    for num_nodes in NODES:
        log = math.ceil(math.log2(num_nodes))
        for operation in OPERATIONS:
            twice = 2 if operation == "all_reduce" else 1
            assert len(blocks_sent("doubling", operation, num_nodes)) == twice * log
            assert len(blocks_sent("ring", operation, num_nodes)) == twice * (num_nodes - 1)
            if operation != "all_to_all":  # a gather by doubling sends no more bytes than a ring
                assert sum(blocks_sent("doubling", operation, num_nodes)) == twice * (num_nodes - 1)


def levels(num_nodes: int, num_local: int, alpha: float, beta: float, **changes: object) -> Levels:
    """Levels of an axis on links with `alpha` seconds and `beta` seconds per byte between nodes, a tenth inside."""
    links = {
        "": AxisLink(1 / beta, alpha, True),
        "node": AxisLink(1 / (beta * num_local), alpha, True),
        "local": AxisLink(10 / beta, alpha / 10, False),
    }
    return Levels(num_nodes, num_local, "fastest", "data", links, **changes)  # type: ignore[arg-type]


def simulated_seconds(
    algorithm: str, operation: str, size: int, shape: tuple[int, int], alpha: float, beta: float
) -> float:
    """What a network takes that delays each message by `alpha` and carries a byte in `beta` seconds, with a fixed time
    for each call of the library. It knows nothing of the formulas by which links are priced.
    """
    degrees = {"": math.prod(shape), "node": shape[0], "local": shape[1]}
    total = 0.0
    for level, name, num_bytes in calls_of(algorithm, operation, size, *shape):  # type: ignore[arg-type]
        degree, slower = degrees[level], {"": 1.0, "node": float(shape[1]), "local": 0.1}[level]
        messages = [num_bytes / degree] * (degree - 1) * (2 if name == "all_reduce" else 1)
        if name == "send":
            messages = [num_bytes]
        total += sum(alpha * min(1.0, slower) + one * beta * slower for one in messages)
        total += 0.0 if name == "send" else 3 * alpha
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_with_injected_latency_the_choice_is_within_a_tenth_of_the_best(shape: tuple[int, int]) -> None:
    rng = random.Random(repr(shape))
    sizes = tuple(4**power for power in range(3, 14))
    for alpha, beta in product((1e-6, 1e-4, 5e-3), (1e-11, 1e-9)):
        table = tuple(
            MeasuredCollective(
                operation,  # type: ignore[arg-type]
                algorithm,
                *shape,
                sizes,
                tuple(simulated_seconds(algorithm, operation, size, shape, alpha, beta) for size in sizes),
            )
            for operation, algorithm in product(OPERATIONS, ALGORITHMS)
        )
        chooser = levels(*shape, alpha, beta, measured=table)
        for operation in OPERATIONS:
            assert chooser.is_measured(operation)
            for _ in range(20):
                unit = math.prod(shape) * 16 * shape[0]
                size = unit * max(1, round(4 ** rng.uniform(3, 13) / unit))
                times = {one: simulated_seconds(one, operation, size, shape, alpha, beta) for one in ALGORITHMS}
                assert times[chooser.algorithm(operation, size)] <= 1.1 * min(times.values()), (operation, size, times)


def test_a_table_of_the_wrong_operation_misleads() -> None:
    """The control of the test above: times that belong to another algorithm give a choice that is not the best."""
    shape, alpha, beta, sizes = (8, 4), 5e-3, 1e-11, (64, 4096, 1 << 20)
    swapped = dict(zip(ALGORITHMS, reversed(ALGORITHMS), strict=True))
    table = tuple(
        MeasuredCollective(
            "all_gather",
            algorithm,
            *shape,
            sizes,
            tuple(simulated_seconds(swapped[algorithm], "all_gather", size, shape, alpha, beta) for size in sizes),
        )
        for algorithm in ALGORITHMS
    )
    chosen = levels(*shape, alpha, beta, measured=table).algorithm("all_gather", 4096)
    times = {one: simulated_seconds(one, "all_gather", 4096, shape, alpha, beta) for one in ALGORITHMS}
    assert times[chosen] > 1.1 * min(times.values())


def test_long_latency_favours_doubling_and_one_node_nothing() -> None:
    far = levels(16, 8, 1e-3, 1e-11)
    assert far.algorithm("all_gather", 1 << 16) == "doubling"
    assert far.algorithm("all_reduce", 8) == "flat"  # too small for parts
    assert far.algorithm("broadcast", 1 << 16) == "flat"
    assert Levels(4, 2, "fastest", "expert", far.links).algorithm("all_to_all", 1 << 16) == "flat"
    assert Levels(4, 2, "fastest").algorithm("all_gather", 1 << 16) == "library"  # nothing is known of the links
    assert Levels(4, 2, "ring").algorithm("reduce_scatter", 1 << 16) == "ring"
    ranges = describe_choices(far, "all_gather", [4**power for power in range(3, 15)])
    assert ranges[0][0] == "doubling"
    assert [one[1] for one in ranges] == sorted(one[1] for one in ranges)


def test_prices_follow_the_calls() -> None:
    found = levels(4, 2, 1e-3, 1e-9)
    # Doubling: 2 messages of 1 and 2 blocks of 1/8; inside, one hop of the whole.
    block = 8000 / 8
    assert found.seconds("doubling", "all_gather", 8000) == pytest.approx(
        2 * 1e-3 + 3 * block * 2e-9 + 1e-4 + 8000 / 2 * 1e-10
    )
    assert found.seconds("flat", "all_gather", 8000) == pytest.approx(7 * (1e-3 + block * 1e-9))


def test_refuses_settings_and_tables_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match=r"between = 'ring' is for hierarchical plans, and plan.hierarchical = false"):
        Plan(data=4, communication=Communication("ring"))
    with pytest.raises(ConfigError, match="2 sizes and 1 times; give a time for each size"):
        MeasuredCollective("all_gather", "flat", 2, 2, (1, 2), (0.1,))
    with pytest.raises(ConfigError, match="sizes that grow"):
        MeasuredCollective("all_gather", "flat", 2, 2, (2, 1), (0.1, 0.2))
    with pytest.raises(ConfigError, match="must be greater than 0"):
        MeasuredCollective("all_gather", "flat", 2, 2, (1, 2), (0.1, 0.0))
