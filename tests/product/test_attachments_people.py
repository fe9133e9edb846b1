"""Attachments on real processes: a picture is fetched by who may read its message, through any msg process, byte for byte;
for everybody else there is none. And a store that speaks S3 dies within an upload."""

from __future__ import annotations

import asyncio
import http.client
import io
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from plato.core.codes import Code
from plato.local.cluster import LocalCluster

from tests.ports import free_ports
from tests.product import pages
from tests.product.api import Answer, Api, person, quoted, server
from tools.s3_server.server import S3Server, ServerError

SETTINGS = {"local.shards": 1, "local.msgs": 2, "gateway.workers": 1, "attachments.bytes_max": 3_000_000}
REQUIRED = "PLATO_S3_REQUIRED"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


def picture(width: int = 640, height: int = 400) -> bytes:
    """A JPEG that lies on its side and says who made it."""
    made = Image.effect_noise((width, height), 90).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it to the right
    exif[0x013B] = "Secret Author"
    found = io.BytesIO()
    made.save(found, "JPEG", exif=exif)
    return found.getvalue()


def at(api: Api, cluster: LocalCluster, number: int) -> Api:
    """The same caller at another msg process."""
    host = cluster.settings.msg.http_host
    return Api(f"http://{host}:{cluster.ports[f'plato-msg-{number}.http']}", api.token, api.acts_for)


def send(api: Api, path: str, content: bytes, media_type: str, pieces: Iterator[None] | None = None) -> Answer:
    """POST of bytes, in two pieces; `pieces` goes on between them."""
    host = api.base.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=90)
    try:
        connection.putrequest("POST", path)
        headers = {
            "Authorization": f"Bearer {api.token}", "Content-Type": media_type, "Content-Length": str(len(content))
        }  # fmt: skip
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        half = len(content) // 2
        connection.send(content[:half])
        for _ in pieces or ():
            pass
        connection.send(content[half:])
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()})
    finally:
        connection.close()


async def upload(api: Api, content: bytes, name: str = "cat.jpg", media_type: str = "image/jpeg") -> dict[str, Any]:
    answer = await asyncio.to_thread(send, api, f"/v1/attachments?name={quoted(name)}", content, media_type)
    assert answer.status == 201, answer.raw
    found: dict[str, Any] = answer.body
    return found


async def get(api: Api, attachment_id: str, headers: Mapping[str, str] | None = None) -> Answer:
    return await api.ask("GET", f"/v1/attachments/{attachment_id}", None, headers)


async def test_a_picture_is_for_who_may_read_its_message_and_for_nobody_else(town: LocalCluster) -> None:
    tail = uuid.uuid4().hex[:6]
    ann, ben, cid, eve = (person(town, f"{name}-{tail}") for name in ("ann", "ben", "cid", "eve"))
    content = picture()
    made = await upload(ann, content, "пляж/../cat.jpg")
    assert (made["name"], made["media_type"], made["size_bytes"]) == ("cat.jpg", "image/jpeg", len(content))
    assert (made["width"], made["height"], made["thumbnail"]) == (400, 640, True), "upright"
    picture_id = made["attachment_id"]
    nothing = await get(eve, "A" * 22)
    assert nothing.status == 404
    assert nothing.body["code"] == Code.ATTACHMENT_UNKNOWN
    assert (await get(ben, picture_id)).raw == nothing.raw, "not sent yet"
    group = (await ann.ok("POST", "/v1/groups", {"title": "beach", "members": [f"ben-{tail}"]}))["conversation_id"]
    rich = {"text": "look", "attachments": [made]}
    sent = await ann.ok("POST", "/v1/messages", {"conversation_id": group, "rich": rich})
    for number in (0, 1):
        answer = await get(at(ben, town, number), picture_id)
        assert (answer.status, answer.raw) == (200, content)
        assert answer.headers["content-type"] == "image/jpeg"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-disposition"].startswith('inline; filename="cat.jpg"')
    thumbnail = await ben.ask("GET", f"/v1/attachments/{picture_id}/thumbnail")
    shown = Image.open(io.BytesIO(thumbnail.raw))
    assert (shown.format, shown.size) == ("JPEG", (200, 320))
    assert not shown.getexif()
    assert b"Secret" not in thumbnail.raw
    part = await get(ben, picture_id, {"Range": "bytes=100-199"})
    assert (part.status, part.raw) == (206, content[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(content)}"
    assert (await get(ben, picture_id, {"Range": "bytes=-5"})).raw == content[-5:]
    assert (await get(ben, picture_id, {"Range": f"bytes={len(content)}-"})).status == 416
    assert (await get(ben, picture_id, {"If-None-Match": answer.headers["etag"]})).status == 304
    assert (await get(server(town), picture_id)).raw == content, "with authority"
    # Who comes later reads what comes later; who left reads on what was there.
    await ann.ok("POST", f"/v1/groups/{quoted(group)}/members", {"users": [f"cid-{tail}"]})
    await ann.ok("DELETE", f"/v1/groups/{quoted(group)}/members/ben-{tail}")
    second = await upload(ann, picture(50, 60))
    await ann.ok("POST", "/v1/messages", {"conversation_id": group, "rich": {"text": "", "attachments": [second]}})
    refused = [await get(cid, picture_id), await get(ben, second["attachment_id"]), await get(eve, picture_id)]
    assert [r.raw for r in refused] == [nothing.raw] * 3
    assert [r.status for r in (await get(ben, picture_id), await get(cid, second["attachment_id"]))] == [200, 200]
    # A reference to what one may not read makes no message, and tells nothing.
    for attachment_id in (picture_id, "A" * 22):
        body = {"to": f"cid-{tail}", "rich": {"text": "mine", "attachments": [{"attachment_id": attachment_id}]}}
        await eve.refused(404, Code.ATTACHMENT_UNKNOWN, "POST", "/v1/messages", body)
    await ann.ok("DELETE", f"/v1/messages/{sent['msg_id']}?for=all")
    assert (await get(ben, picture_id)).raw == nothing.raw, "recalled"


async def test_what_is_no_picture_is_saved_and_what_is_not_taken_is_refused_in_words(town: LocalCluster) -> None:
    ann = person(town, f"ann-{uuid.uuid4().hex[:6]}")
    html = b"<html><script>alert(1)</script>"
    page = await upload(ann, html, 'a"b\r\n.html', "application/octet-stream")
    assert (page["width"], page["thumbnail"]) == (0, False)
    answer = await get(ann, page["attachment_id"])
    assert answer.raw == html
    assert answer.headers["content-disposition"].startswith("attachment; ")
    assert "sandbox" in answer.headers["content-security-policy"]
    assert (await ann.ask("GET", f"/v1/attachments/{page['attachment_id']}/thumbnail")).status == 404
    # A picture is what its bytes say.
    png = io.BytesIO()
    Image.new("RGBA", (30, 20)).save(png, "PNG")
    assert (await upload(ann, png.getvalue(), "x.txt", "text/plain"))["media_type"] == "image/png"
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    found = await upload(ann, bomb.getvalue(), "bomb.png", "image/png")
    assert (found["width"], found["thumbnail"]) == (30_000, False), "is kept, and never unpacked"
    refusals = [
        (html, "text/html", 415),
        (html, "image/svg+xml", 415),
        (html, "image/png", 415),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 50, "image/png", 415),
        (b"", "text/plain", 400),
        (b"x" * 3_000_001, "text/plain", 413),
        (b"x" * 4_000_000, "text/plain", 413),
    ]
    for content, media_type, status in refusals:
        answer = await asyncio.to_thread(send, ann, "/v1/attachments?name=x", content, media_type)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), media_type
    form = b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\nv\r\n--b\r\nContent-Disposition: form-data; name="file";'
    form += b' filename="form.txt"\r\nContent-Type: text/plain\r\n\r\nin a form\r\n--b--\r\n'
    answer = await asyncio.to_thread(send, ann, "/v1/attachments", form, "multipart/form-data; boundary=b")
    assert (answer.status, answer.body["name"], answer.body["media_type"]) == (201, "form.txt", "text/plain")
    assert (await get(ann, answer.body["attachment_id"])).raw == b"in a form"
    for broken in (form[:-20], form.replace(b"filename", b"file-name"), b"no form"):
        answer = await asyncio.to_thread(send, ann, "/v1/attachments", broken, "multipart/form-data; boundary=b")
        assert answer.status == 400


async def test_a_store_that_dies_within_an_upload_leaves_nothing_and_takes_it_when_it_is_back(
    new_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    store = S3Server(free_ports(1)[0], tmp_path / "s3.log", checked=False)
    try:
        store.start()
    except ServerError as e:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(str(e))
    secret = tmp_path / "secret"
    secret.write_text("any", encoding="utf-8")
    keys = {"attachments.s3_access_key": "any", "attachments.s3_secret_key_file": str(secret)}
    town = new_cluster({**SETTINGS, **keys, "attachments.s3_url": store.url})
    try:
        ann = person(town, "ann")
        content = os.urandom(2_000_000)

        def dies() -> Iterator[None]:
            store.kill()
            yield

        answer = await asyncio.to_thread(
            send, ann, "/v1/attachments?name=a", content, "application/octet-stream", dies()
        )
        assert (answer.status, answer.body["code"]) == (503, Code.UNAVAILABLE)
        assert "retry-after" in answer.headers
        store.start()
        made = await upload(ann, content, "a", "application/octet-stream")
        body = {"to": "ben", "rich": {"text": "", "attachments": [made]}}
        await ann.ok("POST", "/v1/messages", body)
        for number in (0, 1):
            ben = at(person(town, "ben"), town, number)
            assert (await get(ben, made["attachment_id"])).raw == content
            assert (await get(ben, made["attachment_id"], {"Range": "bytes=7-9"})).raw == content[7:10]
        store.kill()
        gone = await get(person(town, "ben"), made["attachment_id"])
        assert (gone.status, gone.body["code"]) == (503, Code.UNAVAILABLE), "a failure, not half a file"
    finally:
        store.kill()
        town.down()


def test_the_page_does_as_it_says(town: LocalCluster) -> None:
    assert '"width":640,"height":400,"thumbnail":true' in pages.run(town, "attachments.md")
