"""What is refused before the bus."""

from __future__ import annotations

import pytest
from plato.core.codes import Code
from plato.wire.v1.client_pb2 import LoginMsg, LoginMsgHead, UPMsg, UPMsgHead
from plato_state.core import checks
from plato_state.core.uplinks import MAX_CLIENT_ID

LIMIT = 1_000


def message(**changes: object) -> UPMsg:
    head = {"ClientID": 1, "SessionId": "c", **{k: v for k, v in changes.items() if k in ("ClientID", "SessionId")}}
    rest = {k: v for k, v in changes.items() if k not in head}
    out = UPMsg(Head=UPMsgHead(**head), client_msg_id=b"x" * 16, UPMsgBody=b"hi")  # type: ignore[arg-type]  # by name
    for key, value in rest.items():
        setattr(out, key, value)
    return out


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, None),
        ({"UPMsgBody": b"\x00\xff\xfe bad utf-8 and NUL"}, None),
        ({"UPMsgBody": bytes(LIMIT)}, None),
        ({"UPMsgBody": bytes(LIMIT + 1)}, Code.BODY_TOO_LARGE),
        ({"SessionId": ""}, Code.BAD_CONVERSATION),
        ({"SessionId": "é" * 32}, None),
        ({"SessionId": "é" * 32 + "x"}, Code.BAD_CONVERSATION),
        ({"SessionId": "a\x00b"}, Code.BAD_CONVERSATION),
        ({"ClientID": 0}, Code.BAD_CLIENT_ID),
        ({"ClientID": MAX_CLIENT_ID}, None),
        ({"ClientID": MAX_CLIENT_ID + 1}, Code.BAD_CLIENT_ID),
        ({"client_msg_id": b""}, Code.BAD_CLIENT_MSG_ID),
        ({"client_msg_id": b"x" * 15}, Code.BAD_CLIENT_MSG_ID),
        ({"client_msg_id": b"x" * 17}, Code.BAD_CLIENT_MSG_ID),
        ({"to_user": "bob"}, None),
        ({"to_user": "b" * 65}, Code.BAD_TO_USER),
        ({"to_user": "b\nob"}, Code.BAD_TO_USER),
    ],
)
def test_forms_of_an_up(changes: dict[str, object], code: Code | None) -> None:
    assert checks.refusal(message(**changes), LIMIT, guest=False) is code


def test_a_guest_counts_from_zero_has_no_ids_and_stays_in_open_conversations() -> None:
    assert checks.refusal(message(ClientID=0, client_msg_id=b""), LIMIT, guest=True) is None
    assert checks.refusal(message(SessionId="d:abc"), LIMIT, guest=True) is Code.BAD_CONVERSATION
    assert checks.refusal(message(SessionId="g:abc"), LIMIT, guest=True) is Code.BAD_CONVERSATION


def test_a_guests_message_has_the_same_id_each_time_and_another_one_elsewhere() -> None:
    one = checks.guest_message_id(7, "c", 0)
    assert len(one) == 16
    assert one[6] >> 4 == 5, "a UUIDv5"
    assert one == checks.guest_message_id(7, "c", 0)
    others = [checks.guest_message_id(*args) for args in ((8, "c", 0), (7, "d", 0), (7, "c", 1))]
    assert len({one, *others}) == 4


def test_a_login_without_head_or_device_is_malformed() -> None:
    assert checks.login_refusal(LoginMsg(token="x")) is Code.MALFORMED
    assert checks.login_refusal(LoginMsg(Head=LoginMsgHead())) is Code.MALFORMED
    assert checks.login_refusal(LoginMsg(Head=LoginMsgHead(DeviceID=1))) is None


def test_labels_are_cut_at_64_bytes_of_whole_characters() -> None:
    assert checks.label("android") == "android"
    assert checks.label("é" * 40) == "é" * 32


def test_the_body_limit_leaves_2_kib_of_the_frame() -> None:
    assert checks.max_body_bytes(65_536) == 63_488
