"""Titles and names of attachments that are not plain are refused, by whichever way they come. No database."""

from __future__ import annotations

import pytest
from plato.core.codes import Code
from plato.core.conversations import partition_of
from plato.ports import BusRecord
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import Record
from plato_msg.api.fields import AttachmentIn
from plato_msg.api.groups import GroupChange, GroupIn
from plato_msg.core.batch import Uplink, decode
from plato_msg.core.gates import Gates
from plato_msg.core.operations import read
from pydantic import ValidationError

TURNED = "gpj.\u202eexe"


def uplink(msg_type: int, body: bytes) -> Uplink:
    record = Record(conversation_id="g:x", from_user="ann", client_msg_id=b"k" * 16, msg_type=msg_type, body=body)
    return decode(BusRecord(partition_of("g:x", 8), 1, record.SerializeToString()), 8)


def rich(*names: str) -> bytes:
    return content.Rich(
        attachments=[content.Attachment(attachment_id=f"a{n}", name=name) for n, name in enumerate(names)]
    ).SerializeToString()


def edit(body: bytes) -> bytes:
    return content.Operation(msg_id=1, msg_type=content.RICH, body=body).SerializeToString()


@pytest.mark.parametrize("name", [TURNED, "ali\u200bce", "x" * 257])
def test_a_message_whose_attachment_has_a_name_that_misleads_is_refused(name: str) -> None:
    gates = Gates(readable={("ann", "a0"), ("ann", "a1")})
    for body in (rich("cat.jpg", name), rich(name, "cat.jpg")):
        assert gates.judge(uplink(content.RICH, body)) == Code.BAD_OPERATION
        assert gates.judge(uplink(content.EDIT, edit(body))) == Code.BAD_OPERATION
    plain = rich("cat.jpg", "\U0001f469\u200d\U0001f4bb.png")
    assert gates.judge(uplink(content.RICH, plain)) == Code.OK
    assert gates.judge(uplink(content.EDIT, edit(plain))) == Code.OK


def test_a_title_that_misleads_is_refused() -> None:
    for kind in (content.GROUP_CREATE, content.GROUP_RENAME):
        for authority in (False, True):
            assert read(kind, content.Operation(title=TURNED).SerializeToString(), authority) is None
            assert read(kind, content.Operation(title="\u3000").SerializeToString(), authority) is None
            assert read(kind, content.Operation(title="می\u200cخواهم").SerializeToString(), authority) is not None


def test_by_http_a_title_is_refused_in_words_and_a_name_is_made_plain() -> None:
    for model in (GroupIn, GroupChange):
        with pytest.raises(ValidationError, match="invisible"):
            model.model_validate({"title": TURNED})
    assert AttachmentIn.model_validate({"attachment_id": "x", "name": TURNED}).name == "gpj.exe"
