"""docs/openapi.json is what the routes say, and every refusal of every route in it is a problem."""

from __future__ import annotations

import json

from tests.repo.tracked import text
from tools import openapi_page


def test_the_document_is_fresh() -> None:
    assert text("docs/openapi.json") == openapi_page.page(), "run `make openapi-page`"


def test_every_route_documents_its_refusals_as_problems() -> None:
    document = json.loads(text("docs/openapi.json"))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            refused = operation["responses"]["default"]["content"]
            assert list(refused) == ["application/problem+json"], f"{method} {path}"
            statuses = [status for status in operation["responses"] if status[0] in "45"]
            assert not statuses, f"{method} {path}: {statuses} have another form"
            assert operation.get("security"), f"{method} {path} needs a token"
