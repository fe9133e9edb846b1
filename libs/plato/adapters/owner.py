"""Whose a database schema and a store's key prefix are: each carries a mark, "<namespace>/<name>" of one PlatoCluster.

    schema_pg.migrate      row `cluster` of table meta
    ValkeyStore.claim      key <prefix>{cluster}

Set by `plato db migrate --cluster`, which the operator's Job runs before anything else of that cluster may touch the two. A
second cluster over the same ones would have greater fences and take the first one's slots. The mark is a name and no uid:
who deletes a PlatoCluster and creates it again goes on where it was. Without --cluster nothing is marked, and nothing asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from plato.api.names import ANNOTATION_ADOPT
from plato.runtime.settings import NotAlone


@dataclass(frozen=True, slots=True)
class Owner:
    """Who claims."""

    cluster: str
    """"<namespace>/<name>" of the PlatoCluster."""
    adopts: str = ""
    """Whose marks it may replace, in the same form, with commas between; empty: nobody's. The schema and the store may be
    those of two clusters."""

    @property
    def adopted(self) -> tuple[str, ...]:
        """Those one by one."""
        return tuple(name for part in self.adopts.split(",") if (name := part.strip()))

    def check(self, held: str | None, what: str, remedy: str) -> None:
        """Raises NotAlone where `held`, the mark that was found, is neither ours nor one that we adopt. what: the marked
        thing in words; remedy: the field to change."""
        if held is None or held == self.cluster or held in self.adopted:
            return
        adopt = ",".join((*self.adopted, held))
        raise NotAlone(
            f"{what} belongs to PlatoCluster {held}, and two would take each other's users: give {self.cluster} another"
            f" {remedy}; or, if {self.cluster} is to take the place of {held} and that one is deleted, annotate"
            f" PlatoCluster {self.cluster} with {ANNOTATION_ADOPT}={adopt}"
        )
