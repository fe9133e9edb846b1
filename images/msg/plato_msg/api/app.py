"""The HTTP API, put together: a FastAPI application that stands behind the fixed routes of msg's HTTP port.

    socket → /healthz, /readyz, /metrics, /v1/report, /admin/… (plato.runtime.admin)
           → everything else: size → origin (CORS) → token, rate, turn (auth) → one router per noun → stores

Refusals are problem+json, also those of FastAPI itself. Bounds: a body of BODY_MAX_BYTES unless a route says its
own, the rates of auth.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from plato.core.codes import Code
from plato.core.errors import PeerError, Unavailable, Unstorable
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plato_msg.api import problems
from plato_msg.api.auth import Door, in_turn
from plato_msg.api.fields import KeepSlashes
from plato_msg.api.origins import LOOPBACK
from plato_msg.api.problems import Problem

TITLE: Final = "Plato"
VERSION: Final = "1"
BODY_MAX_BYTES: Final = 1 << 20
_DESCRIPTION: Final = (
    "Conversations, messages, groups, devices. docs/http-api.md is the guide, docs/protocol.md the codes."
)
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_requests = Counter("plato_msg_http_requests_total", "Answers of the HTTP API.", ["method", "route", "status"])


def application(
    door: Door,
    routers: Sequence[APIRouter],
    not_ready: Callable[[], str] = str,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The application. not_ready: why nothing can be answered now; "" when it can. origins: pages that may ask; none: those
    of loopback."""
    app = FastAPI(
        title=TITLE,
        version=VERSION,
        description=_DESCRIPTION,
        docs_url=None,  # it would fetch its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=problems.RESPONSES,
        dependencies=[Depends(in_turn, scope="function")],  # a turn is over before the answer is sent, however slowly
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    app.state.door = door
    for kind, handler in (
        (Problem, problems.on_problem),
        (PeerError, problems.on_peer),
        (Unavailable, problems.on_unavailable),
        (Unstorable, problems.on_unstorable),
        (RequestValidationError, problems.on_invalid),
        (HTTPException, problems.on_http),
        (Exception, problems.on_fault),
    ):
        app.add_exception_handler(kind, handler)
    for router in routers:
        app.include_router(router, max_body_size=BODY_MAX_BYTES)
    app.add_middleware(_Known, door=door)
    app.add_middleware(_Ready, not_ready=not_ready)
    app.add_middleware(KeepSlashes)
    app.add_middleware(_Worded)  # the last one below CORS: a page may read only what passes through that
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_origin_regex=None if origins else LOOPBACK,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["Authorization", "Content-Type", "Plato-User", "Idempotency-Key"],
        expose_headers=["Retry-After"],
        max_age=3_600,
    )
    app.add_middleware(_Counted)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]  # FastAPI's own way to change it
    return app


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, kept after the first time."""
    if app.openapi_schema is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a route of two methods has one operationId: they get their own here
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in made["paths"].items():
            made["paths"][path] = dict(sorted(operations.items()))  # a route of two methods has them in a set
            for method, operation in operations.items():
                operation["operationId"] = "_".join([method, *re.findall(r"\w+", path.removeprefix("/v1"))])
        made.setdefault("components", {}).setdefault("schemas", {})["Problem"] = problems.SCHEMA
        app.openapi_schema = made
    return app.openapi_schema


class _Ready:
    """Refuses while the process does not serve."""

    def __init__(self, app: ASGIApp, not_ready: Callable[[], str]) -> None:
        self._app = app
        self._not_ready = not_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and self._not_ready():
            refused = await problems.on_unavailable(Request(scope), Unavailable("not ready"))
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Known:
    """Refuses who may not ask before a body is read: the framework parses it first, on the loop of the messages."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and scope["method"] in _WITH_BODY:
            scheme, _, token = Headers(scope=scope).get("Authorization", "").partition(" ")
            try:
                self._door.look(token.strip() if scheme.lower() == "bearer" else "")
            except Problem as e:
                await problems.answer(e)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Worded:
    """Makes a problem of what the framework says in its own way: of a body that is too large in plain text, of our fault
    above all middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = replaced = False

        async def worded(message: Message) -> None:
            nonlocal begun, replaced
            if message["type"] == "http.response.start":
                begun = True
                if message["status"] == 413 and _plain(message):
                    replaced = True
                    await problems.answer(Problem(Code.BODY_TOO_LARGE))(scope, receive, send)
                    return
            elif replaced:
                return
            await send(message)

        try:
            await self._app(scope, receive, worded)
        except ClientDisconnect:
            raise
        except Exception as e:
            if begun:
                raise
            await (await problems.on_fault(Request(scope), e))(scope, receive, send)


class _Counted:
    """Counts answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            # A method is any word that a stranger sends, and each label is kept for good.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            _requests.labels(method, route, str(status or 500)).inc()


def _plain(message: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/plain") for name, value in message.get("headers", ())
    )
