"""The table `[plan.communication]`: how collectives are carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.cluster.wire_formats import Wire
from weft.errors import PlanError

Between = Literal["library", "ring", "doubling", "fastest"]


@dataclass(frozen=True)
class Communication:
    """How collectives are carried out.

    `between`: what a hierarchical plan uses between nodes. "library": the collectives of NCCL, Gloo or MPI. "ring":
    messages to the next node. "doubling": messages over doubling distances, the logarithm of the number of nodes of
    them. Both add up in an order that does not depend on which message arrives first. "fastest": for each operation and
    size the fastest of these, or the collective without levels, by the times or links of the cluster.

    Numbers that are rounded for the link, which needs `plan.exact = false`: `gather` the parameters that shard stage 3
    gathers, `scatter` the gradients that are reduced over shard, and `reduce` those that are reduced over data. "bf16"
    has 2 bytes each; "int8" and "fp8" have 1, and a scale for every 256.
    """

    between: Between = "library"
    gather: Wire = "exact"
    scatter: Wire = "exact"
    reduce: Wire = "exact"

    @property
    def rounded(self) -> dict[str, Wire]:
        """The settings that round numbers, by name."""
        given: dict[str, Wire] = {"gather": self.gather, "scatter": self.scatter, "reduce": self.reduce}
        return {name: wire for name, wire in given.items() if wire != "exact"}

    def refuse(self, hierarchical: bool, exact: bool) -> None:
        """Raise PlanError if the settings do not fit the plan's `hierarchical` and `exact`."""
        for name, wire in self.rounded.items():
            if exact:
                raise PlanError(
                    f"plan.communication.{name} = '{wire}' rounds numbers for the link, and plan.exact = true; set "
                    f"plan.exact = false to accept it, or leave {name} out"
                )
        if self.between != "library" and not hierarchical:
            raise PlanError(
                f"plan.communication.between = '{self.between}' is for hierarchical plans, and plan.hierarchical = "
                f"false; set it to true, or leave between out"
            )
