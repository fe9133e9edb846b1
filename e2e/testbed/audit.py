"""Reading the API server's log of writes: who changed what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from e2e.testbed.layout import Layout

_RECEIVED = '"requestReceivedTimestamp":"'


@dataclass(frozen=True)
class Write:
    """One finished write, as the API server saw it."""

    at: str
    """When it was asked for: RFC 3339 with microseconds, UTC; strings compare as times do."""
    user: str
    """Such as `system:serviceaccount:NAMESPACE:NAME`."""
    agent: str
    verb: str
    """create, update, patch, delete or deletecollection."""
    resource: str
    """Plural, with the subresource if there is one: `pods`, `pods/binding`."""
    namespace: str
    name: str
    code: int
    """HTTP status of the answer."""


def writes(layout: Layout, since: str = "") -> Iterator[Write]:
    """The writes asked for at or after `since`, in the order of the log. Rotated parts (200 MB each) are not read."""
    with layout.audit_log.open(encoding="utf-8") as log:
        for line in log:
            if not line.endswith("\n"):
                return  # it is being written
            told = line.rpartition(_RECEIVED)[2].partition('"')[0]
            if told < since:
                continue  # the log is long, and reading all of it each time would disturb what is looked at
            event = json.loads(line)
            target = event.get("objectRef", {})
            at = event["requestReceivedTimestamp"]
            if at >= since:
                resource = "/".join(filter(None, (target.get("resource", ""), target.get("subresource", ""))))
                yield Write(
                    at,
                    event["user"]["username"],
                    event.get("userAgent", ""),
                    event["verb"],
                    resource,
                    target.get("namespace", ""),
                    target.get("name", ""),
                    event.get("responseStatus", {}).get("code", 0),
                )
