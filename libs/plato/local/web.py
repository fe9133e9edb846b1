"""The chat page of the embedded cluster: the files of libs/plato/web, and a sign-in by name.

    GET  /…          the built page (clients/web), from memory
    POST /sign-in    {"name": "alice"} ─▸ a token for alice, signed by the local development key, where to connect,
                 and how large a file may be

There is no password: whoever reaches this port is whoever they say they are. So it listens on loopback only, answers only
to its own names (no other page's name that leads here), and gives tokens only to this page (Origin, and a body that another
page's form cannot send). It belongs to the embedded cluster; on Kubernetes there is none.
"""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plato.core.conversations import is_user_id
from plato.local.folder import DataFolder, LocalError
from plato.local.ports import WEB_HOSTS, PortUse, api_door, msg_name
from plato.local.tokens import make_token
from plato.runtime.settings import Settings

FOLDER: Final = Path(__file__).resolve().parent.parent / "web"
TOKEN_S: Final = 24 * 3_600
BODY_MAX_BYTES: Final = 4_096
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def application(
    settings: Settings, folder: DataFolder, ports: Mapping[str, PortUse], pages: Path = FOLDER
) -> Starlette:
    """The application. ports: of the whole cluster. Raises LocalError where the page was not built."""
    files = _files(pages)
    port = ports["web"].port
    names = [f"{host}:{port}" for host in WEB_HOSTS]
    where = {
        "ipconfig_url": _url(ports["ipconfig"]),
        "msg_urls": [
            _url(ports[key], scheme)
            for scheme, key in (api_door(settings, msg_name(n)) for n in range(settings.local.msgs))
        ],
        "attachment_bytes_max": settings.attachments.bytes_max,
    }
    headers = {
        "Content-Security-Policy": _policy(settings),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    def refused(status: int, why: str) -> Response:
        return JSONResponse({"error": why}, status_code=status, headers=headers)

    async def page(request: Request) -> Response:
        if request.headers.get("host") not in names:
            return refused(403, f"this page is at http://{names[0]}")
        # Of an URL line ends and tabs would be cut off, though they were escaped.
        found = files.get(request.scope["path"])
        if found is None:
            return refused(404, "there is no such file")
        body, media_type = found
        return Response(body, media_type=media_type, headers=headers)

    async def sign_in(request: Request) -> Response:
        if request.headers.get("host") not in names:
            return refused(403, f"this page is at http://{names[0]}")
        if request.headers.get("origin") not in [f"http://{name}" for name in names]:
            return refused(403, "tokens are given to this page only")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return refused(415, "send application/json")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_MAX_BYTES:
                return refused(413, f"more than {BODY_MAX_BYTES} bytes")
        try:
            given = json.loads(body)
            name = given["name"].strip()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return refused(400, 'send {"name": "alice"}')
        if not is_user_id(name):
            return refused(400, "a name has 1 to 64 bytes and no control or invisible characters")
        try:
            token = make_token(folder, settings.auth, name, TOKEN_S)
        except LocalError as e:
            return refused(400, str(e))
        return JSONResponse({"user": name, "token": token, **where}, headers=headers)

    return Starlette(
        routes=[Route("/sign-in", sign_in, methods=["POST"]), Route("/{path:path}", page, methods=["GET", "HEAD"])]
    )


def _files(pages: Path) -> dict[str, tuple[bytes, str]]:
    """{path: (bytes, media type)} of the built page."""
    if not (pages / "index.html").is_file():
        raise LocalError(f"the chat page is missing in {pages}; build it with `make web`, or set local.web_port to 0")
    files = {
        f"/{path.relative_to(pages).as_posix()}": (path.read_bytes(), _media_type(path))
        for path in sorted(pages.rglob("*"))
        if path.is_file()
    }
    return {**files, "/": files["/index.html"]}


def _media_type(path: Path) -> str:
    return _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"


def _host(use_host: str) -> str:
    """The address by which this machine reaches a port that listens on `use_host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(use_host, use_host)
    return f"[{host}]" if ":" in host else host


def _url(use: PortUse, scheme: str = "http") -> str:
    return f"{scheme}://{_host(use.host)}:{use.port}"


def _api_host(settings: Settings) -> str:
    return settings.msg.api_host if settings.msg.api_port else settings.msg.http_host


def _policy(settings: Settings) -> str:
    """Nothing from elsewhere, no inline script or style; connections to this cluster."""
    hosts = dict.fromkeys(
        [*WEB_HOSTS, *(_host(h) for h in (settings.gateway.host, settings.ipconfig.host, _api_host(settings)))]
    )
    schemes = ("http", "ws") if api_door(settings, "")[0] == "http" else ("http", "https", "ws")
    connect = " ".join(f"{scheme}://{host}:*" for host in hosts for scheme in schemes)
    return (
        f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
        f"connect-src 'self' {connect}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
