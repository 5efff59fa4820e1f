"""The table `[plan.communication]`: how collectives are carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from weft.cluster.wire_formats import Wire
from weft.errors import PlanError

Between = Literal["library", "ring", "doubling", "fastest"]


@dataclass(frozen=True)
class Communication:
    """How collectives are carried out.

    Between nodes, "library" uses the collectives of NCCL, Gloo or MPI. "ring" sends messages to the next node.
    "doubling" sends messages over doubling distances, as many as the logarithm of the number of nodes. Both add up in
    an order that does not depend on which message arrives first. "fastest" uses for each operation and size the fastest
    of these, or the collective without levels, by the times or links of the cluster.

    Fewer bits round numbers for the link: "bf16" has 2 bytes each; "int8" and "fp8" have 1, and a scale for every 256.
    """

    between: Annotated[Between, "what two-level collectives use between nodes"] = "library"
    gather: Annotated[Wire, "the bits of parameters that shard gathers; fewer need exact = false"] = "exact"
    scatter: Annotated[Wire, "the bits of gradients that are reduced over shard"] = "exact"
    reduce: Annotated[Wire, "the bits of gradients that are reduced over data"] = "exact"

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
