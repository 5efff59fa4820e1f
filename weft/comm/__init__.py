"""The only package that communicates with other ranks: collectives over named axes, and the ledger that counts them."""

from weft.comm.collectives import (
    Axis,
    Pending,
    barrier,
    broadcast,
    exchange,
    receive,
    send,
    sends_from_host,
    shift,
    through_host,
    uses_nccl,
)
from weft.comm.hierarchical import all_gather, all_reduce, all_to_all, expand, reduce_scatter
from weft.comm.ledger import Key, Ledger, Traffic, Traffics, add_traffic

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
