"""The only package that communicates with other ranks: collectives over named axes, and the ledger that counts them."""

from weft.comm import collectives, hierarchical
from weft.comm.collectives import (
    Axis,
    Pending,
    barrier,
    broadcast,
    exchange,
    receive,
    send,
    sends_from_host,
    through_host,
    uses_nccl,
)
from weft.comm.hierarchical import expand
from weft.comm.keeping import keeping
from weft.comm.ledger import Key, Ledger, Traffic, Traffics, add_traffic

# Collectives inside of blocks, whose results recompute may take from memory.
all_gather = keeping(hierarchical.all_gather)
all_reduce = keeping(hierarchical.all_reduce)
all_to_all = keeping(hierarchical.all_to_all)
reduce_scatter = keeping(hierarchical.reduce_scatter)
shift = keeping(collectives.shift)

__all__ = [
    "Axis",
    "Key",
    "Ledger",
    "Pending",
    "Traffic",
    "Traffics",
    "add_traffic",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exchange",
    "expand",
    "receive",
    "reduce_scatter",
    "send",
    "sends_from_host",
    "shift",
    "through_host",
    "uses_nccl",
]
