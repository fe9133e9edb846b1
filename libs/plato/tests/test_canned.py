"""The pre-encoded ERROR frames equal what protobuf encodes."""

from __future__ import annotations

import pytest
from plato.core.codes import Action, Code, text
from plato.wire.v1 import canned, client_pb2


@pytest.mark.parametrize("code", sorted(canned.ERRORS))
def test_canned_error_equals_protobufs_encoding(code: int) -> None:
    error = client_pb2.ErrorMsg(code=code, msg=text(code))
    frame = client_pb2.MsgCmd(Type=client_pb2.ERROR, Payload=error.SerializeToString())
    assert canned.ERRORS[code] == frame.SerializeToString()


def test_each_canned_error_tells_the_client_what_to_do() -> None:
    assert set(canned.ERRORS) == {
        Code.GATEWAY_FULL,
        Code.GATEWAY_CLOSING,
        Code.SLOW_READER,
        Code.LOGIN_TIMEOUT,
        Code.FRAME_SIZE,
        Code.MALFORMED,
    }
    for code in canned.ERRORS:
        assert Code(code).action is (Action.STOP if code >= 400 else Action.RECONNECT)
