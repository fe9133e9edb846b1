"""Whose a database schema and a store's key prefix are: each carries a mark, "<namespace>/<name>" of one PlatoCluster.

    schema_pg.migrate, check           row `cluster` of table meta
    ValkeyStore.claim, check           key <prefix>{cluster}

Set by `plato db migrate --cluster`, which the operator's Job runs before anything else of that cluster may touch the two. A
second cluster over the same ones would have greater fences and take the first one's slots. The mark is a name and no uid:
who deletes a PlatoCluster and creates it again goes on where it was. Without --cluster nothing is marked, and nothing asked.

msg and state look at both marks when they start, by the variable PLATO_CLUSTER: a Secret that was edited leads the next pod
that restarts elsewhere, before any Job has looked. They only read. Where there is no mark they go on: what is not migrated
yet is told by the check of the schema, and what is older than marks belongs to whom its migration will say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from plato.api.names import ANNOTATION_ADOPT, ENV_CLUSTER
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
            f" {remedy}, or correct the Secret that leads there; or, if {self.cluster} is to take the place of {held} and"
            f" that one is deleted, annotate PlatoCluster {self.cluster} with {ANNOTATION_ADOPT}={adopt}"
        )


def of_environment(environ: Mapping[str, str] = os.environ) -> Owner | None:
    """For whom this process runs; None: for no PlatoCluster, so that it asks for no mark. It adopts nothing, which is the
    migration's to do."""
    cluster = environ.get(ENV_CLUSTER, "")
    return Owner(cluster) if cluster else None
