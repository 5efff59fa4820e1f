"""Serves tiny models on ranks of this machine, in float64, where sums in another order change no token."""

from __future__ import annotations

from typing import Any

from serving_for_tests import CONFIGS, serve_all, tiny_model, tokens_of
from torch import nn

from weft.mesh import Mesh
from weft.serve.engine import Engine
from weft.serve.follow_steps import follow_steps
from weft.serve.model_part import EngineOptions, ModelPart
from weft.serve.packed_linear import make_room
from weft.serve.rank_part import RankPlace, build_part, read_part
from weft.serve.ranks import ServingRanks
from weft.serve.replicas import ReplicaFront, serve_replica
from weft.serve.request import Request
from weft.serve.weight_formats import FORMATS

SCORED = Request("scored", (3, 1, 4, 1, 5), 1)  # how likely its tokens are is asked for


def whole_model(name: str) -> nn.Module:
    return tiny_model(name).double()


def part_of(name: str, place: RankPlace, weights: str | None = None) -> nn.Module:
    """The part of a tiny model at a place, with weights in a format if one is named."""
    values = dict(whole_model(name).named_parameters())
    model, cuts = build_part(CONFIGS[name], place)
    model.double()
    if weights is not None:
        make_room(model, FORMATS[weights])
    read_part(model, cuts, lambda one: values[one].detach(), "cpu")
    return model


def tokens_on_ranks(
    name: str,
    mesh: Mesh,
    requests: list[Request],
    options: EngineOptions,
    place: RankPlace | None = None,
    ranks: ServingRanks | None = None,
    weights: str | None = None,
) -> dict[str, Any] | None:
    """On each rank of a mesh: serve requests. Returns what rank 0 found; None on others. With a `place`, this rank
    holds the part of another.
    """
    ranks = ranks or ServingRanks(mesh)
    axis = mesh.with_own_group("data", "requests") if mesh.plan.data > 1 else mesh["data"]
    model = part_of(name, place or ranks.place, weights)
    mesh.ledger.clear()
    if not ranks.is_lead:
        follow_steps(ModelPart(model, options, ranks))
        return None
    own = Engine(model, options, ranks)
    if axis.index > 0:
        serve_replica(own, axis)
        return None
    engine = ReplicaFront(own, axis, 64) if axis.degree > 1 else own
    found = tokens_of(serve_all(engine, requests, every=1))  # type: ignore[arg-type]
    engine.add(Request("cancelled", (1, 2, 3), 20))
    engine.step()
    engine.cancel("cancelled")
    while engine.has_work():
        engine.step()
    engine.idle()
    state = engine.state()
    embedding = engine.embed((5, 6, 7), "mean").tolist()
    scores = [one.token for one in engine.score(SCORED)]
    engine.close()
    return {
        "tokens": found,
        "embedding": embedding,
        "scores": scores,
        "preempted": state.num_preempted,
        "prefix": state.num_prefix_tokens,
        "is_free": state.num_free_blocks == state.num_blocks,
    }
