"""Codes of answers, receipts, kicks and closes: one number, one meaning, one act of the client.

The range says what the client does, the frame that carries the code says to what:

      0        fine
      1 –  99  fine, and something to know (pending, duplicate)
    100 – 199  retry here: the same connection, later, with back-off
    200 – 299  reconnect elsewhere: this socket is done, the session may live; resume through another gateway
    300 – 399  log in again: the session or the token is done
    400 – 499  stop: the same again would be refused again (in an ACK or receipt: that message; in a kick or
               a close: the connection)

docs/protocol.md prints this table; tests/repo compares the two.
"""

from __future__ import annotations

from enum import IntEnum


class Action(IntEnum):
    """What a client does on a code."""

    NONE = 0
    RETRY = 1
    RECONNECT = 2
    LOGIN = 3
    STOP = 4


class Code(IntEnum):
    """Every code of the wire. Numbers are never re-meant."""

    OK = 0
    DUPLICATE = 1
    PENDING = 2

    BUSY = 100
    TRY_AGAIN = 101
    EXPECTED = 102
    SYNC_FIRST = 103
    UNAVAILABLE = 104
    NOT_READY = 105
    LOGIN_LATER = 106
    TOO_FAST = 107

    GATEWAY_FULL = 200
    SLOW_READER = 201
    LOGIN_TIMEOUT = 202
    HEARTBEAT_TIMEOUT = 203
    GATEWAY_CLOSING = 204
    SLOT_LOST = 205
    FLOODING = 206
    ADDRESS_BUSY = 207

    LOGIN_FIRST = 300
    SESSION_UNKNOWN = 301
    SECRET_WRONG = 302
    TOKEN_EXPIRED = 303
    TOKEN_NOT_YET_VALID = 304
    TOKEN_INVALID = 305
    GUESTS_OFF = 306

    MALFORMED = 400
    FRAME_SIZE = 401
    REPLACED = 402
    KICKED = 403
    LOGGED_OUT = 404
    FOREIGN_CONN_ID = 405
    TOO_MANY_DEVICES = 406
    BAD_CONVERSATION = 420
    BAD_CLIENT_MSG_ID = 421
    BAD_CLIENT_ID = 422
    BODY_TOO_LARGE = 423
    BAD_TO_USER = 424
    NOT_A_MEMBER = 425
    NOT_STORABLE = 426
    BAD_RANGE = 427
    TOO_MANY_CURSORS = 428
    GROUP_EXISTS = 429
    GROUP_UNKNOWN = 430
    GROUP_FULL = 431
    NOT_ALLOWED = 432
    TOO_LATE = 433
    BAD_OPERATION = 434
    MESSAGE_UNKNOWN = 435
    NOT_WELCOME = 436
    REFUSED_BY_HOOK = 437
    ATTACHMENT_UNKNOWN = 438

    @property
    def action(self) -> Action:
        """The act that this code's range asks for."""
        return action(self)


TEXT: dict[Code, str] = {
    Code.OK: "done",
    Code.DUPLICATE: "seen before; the first outcome stands",
    Code.PENDING: "received, not yet settled; keep waiting",
    Code.BUSY: "the service is busy; send the same again later",
    Code.TRY_AGAIN: "another login of this device came first; log in or resume again on this socket",
    Code.EXPECTED: "a client_id was skipped; send from the expected one",
    Code.SYNC_FIRST: "send Sync first: it commits the session",
    Code.UNAVAILABLE: "a part of the platform is away; try again",
    Code.NOT_READY: "this slot is still loading; try again",
    Code.LOGIN_LATER: "too many log in at once; the same again after the time that is told",
    Code.TOO_FAST: "you send more than one connection or user may; the same again after the time that is told",
    Code.GATEWAY_FULL: "this gateway is full; try the next one",
    Code.SLOW_READER: "you read more slowly than you were sent; resume and sync",
    Code.LOGIN_TIMEOUT: "no login within the time-out",
    Code.HEARTBEAT_TIMEOUT: "no heartbeat in time; resume",
    Code.GATEWAY_CLOSING: "this gateway is closing; resume through another one",
    Code.SLOT_LOST: "the owner of this connection changed; resume",
    Code.FLOODING: "you send faster than this connection is served; slow down and resume",
    Code.ADDRESS_BUSY: "too many connections come from your address; try the next gateway, this one after the time told",
    Code.LOGIN_FIRST: "this connection is not known; log in or resume",
    Code.SESSION_UNKNOWN: "the session ended; log in",
    Code.SECRET_WRONG: "the resume secret does not fit; log in",
    Code.TOKEN_EXPIRED: "the token is expired; log in with a new one",
    Code.TOKEN_NOT_YET_VALID: "the token is not valid yet; log in when it is, or check the clocks",
    Code.TOKEN_INVALID: "the token is not signed by a key that this platform knows; log in with another one",
    Code.GUESTS_OFF: "guests are not let in here; log in with a token",
    Code.MALFORMED: "the frame could not be read",
    Code.FRAME_SIZE: "the frame is empty or larger than the limit",
    Code.REPLACED: "this device logged in elsewhere",
    Code.KICKED: "the session was ended by an administrator",
    Code.LOGGED_OUT: "logged out",
    Code.FOREIGN_CONN_ID: "the frame names another connection",
    Code.TOO_MANY_DEVICES: "as many of your devices are logged in as may be; log one of them out, then log in again",
    Code.BAD_CONVERSATION: "conversation_id must be 1 to 64 bytes of UTF-8 and fit its members",
    Code.BAD_CLIENT_MSG_ID: "client_msg_id must be 16 bytes",
    Code.BAD_CLIENT_ID: "client_id must be at least 1",
    Code.BODY_TOO_LARGE: "the body is larger than the limit",
    Code.BAD_TO_USER: "to_user must be 1 to 64 bytes of UTF-8",
    Code.NOT_A_MEMBER: "you are no member of this conversation",
    Code.NOT_STORABLE: "the message could not be stored as it is",
    Code.BAD_RANGE: "the range or limit is out of bounds",
    Code.TOO_MANY_CURSORS: "at most 500 cursors, sorted by conversation_id, in one Sync",
    Code.GROUP_EXISTS: "a group of this name exists",
    Code.GROUP_UNKNOWN: "there is no group of this name",
    Code.GROUP_FULL: "the group would have more members than it may",
    Code.NOT_ALLOWED: "your role in this conversation does not allow that",
    Code.TOO_LATE: "the time in which this message could be changed is over",
    Code.BAD_OPERATION: "the operation could not be read, or its fields are out of bounds",
    Code.MESSAGE_UNKNOWN: "there is no such message in this conversation, or it was recalled",
    Code.NOT_WELCOME: "this user does not take messages from you",
    Code.REFUSED_BY_HOOK: "the application refused this message",
    Code.ATTACHMENT_UNKNOWN: "there is no such attachment for you",
}


def action(code: int) -> Action:
    """The act for any code, known or not, by its range. Unknown ranges mean STOP."""
    if code < 100:
        return Action.NONE
    if code < 200:
        return Action.RETRY
    if code < 300:
        return Action.RECONNECT
    if code < 400:
        return Action.LOGIN
    return Action.STOP


def text(code: int) -> str:
    """The words of a code; for an unknown one its number."""
    try:
        return TEXT[Code(code)]
    except ValueError:
        return f"code {code}"
