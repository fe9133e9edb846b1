"""The decisions of a batch, without a database: R9's order of duplicates, policy and numbers, under hypothesis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msg_harness import up
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, partition_of
from plato.ports import BusRecord
from plato.wire.v1.bus_pb2 import Record
from plato_msg.core import policy
from plato_msg.core.allocator import SingleWriter
from plato_msg.core.batch import (
    Conversation,
    Decision,
    Known,
    Outcome,
    Plan,
    Undecodable,
    Uplink,
    again,
    decode,
    judge,
    number,
    wanted,
)
from plato_msg.core.policy import Rules

ALICE_BOB = dialogue_id("alice", "bob")


def uplink(
    from_user: str = "alice",
    to_user: str = "bob",
    message: int = 0,
    *,
    conversation_id: str = ALICE_BOB,
    position: int = 1,
) -> Uplink:
    return Uplink(
        0, position, conversation_id, from_user, 1, message, message.to_bytes(16, "big"), to_user, 1, b"", b"", False
    )


class Memory:
    """What the database would hold."""

    def __init__(self) -> None:
        self.known = Known({}, {})
        self.rows: list[Decision] = []
        self.decisions: list[Decision] = []

    def apply(self, plan: Plan) -> None:
        outcomes = {**self.known.outcomes, **{d.uplink.key: d.outcome for d in plan.outcomes}}
        conversations = dict(self.known.conversations)
        for conversation_id, (kind, last_seq) in plan.conversations.items():
            held = conversations.get(conversation_id)
            conversations[conversation_id] = Conversation(kind, last_seq, dict(held.members) if held else {})
        for conversation_id, user, joined_seq, _ in plan.joins:
            members = dict(conversations[conversation_id].members)
            assert user not in members
            members[user] = joined_seq
            conversations[conversation_id] = replace(conversations[conversation_id], members=members)
        self.known = Known(outcomes, conversations)
        self.rows += plan.messages
        self.decisions += plan.decisions


async def take(memory: Memory, uplinks: list[Uplink], rules: Rules, shift: int = 0) -> Plan:
    judged = judge(uplinks, memory.known, rules)
    allocated = await SingleWriter().allocate(wanted(judged), memory.known)
    allocated = {c: max(0, first + shift) for c, first in allocated.items()}
    first_id = len(memory.rows) + 1
    plan = number(judged, memory.known, allocated, range(first_id, first_id + len(uplinks)), 1_000)
    memory.apply(plan)
    return plan


users = st.sampled_from(["alice", "bob", "carol", ""])
conversations = st.sampled_from([ALICE_BOB, dialogue_id("alice", "alice"), dialogue_id("bob", "carol"), "lobby", "g:x"])
uplinks_strategy = st.lists(
    st.builds(
        lambda f, t, m, c: uplink(f or "alice", t, m, conversation_id=c), users, users, st.integers(0, 6), conversations
    ),
    max_size=40,
)


@settings(deadline=None)
@given(uplinks_strategy, st.lists(st.integers(0, 40), max_size=6), st.booleans(), st.integers(-3, 5))
@example([uplink("alice", "bob", 1, conversation_id=ALICE_BOB)] * 2, [], False, 0)  # a copy in the same batch
async def test_r9_order_numbers_and_outcomes_hold_however_the_records_are_cut_into_batches(
    uplinks: list[Uplink], cuts: list[int], guests: bool, shift: int
) -> None:
    uplinks = [u._replace(position=i + 1) for i, u in enumerate(uplinks)]
    rules = Rules(guests)
    memory, whole = Memory(), Memory()
    edges = sorted({0, len(uplinks), *(c for c in cuts if c < len(uplinks))})
    for begin, end in pairwise(edges):
        await take(memory, uplinks[begin:end], rules, shift)
    if uplinks:
        await take(whole, uplinks, rules)

    assert [d.uplink for d in memory.decisions] == uplinks, "every record is decided, in order"
    first: dict[object, Outcome] = {}
    last: dict[str, int] = {}
    for d in memory.decisions:
        conversation_id = d.uplink.conversation_id
        assert d.repeated == (d.uplink.key in first)
        assert first.setdefault(d.uplink.key, d.outcome) == d.outcome, "a repetition has the first outcome"
        if d.repeated:
            continue
        if d.outcome.code == Code.OK:
            assert d.outcome.prev_seq == last.get(conversation_id, 0)
            assert d.outcome.seq > d.outcome.prev_seq
            last[conversation_id] = d.outcome.seq
            assert d.uplink.from_user in d.members
        else:
            assert d.outcome[1:5] == (0, 0, 0, 0), "a refusal takes no numbers"
    assert {c: held.last_seq for c, held in memory.known.conversations.items()} == last
    assert len({d.outcome.msg_id for d in memory.rows}) == len(memory.rows)
    assert len({d.uplink.key for d in memory.rows}) == len(memory.rows)
    if shift <= 0:  # an allocator that gives too little is as the database's own count

        def outcomes(m: Memory) -> list[tuple[int, int, int]]:
            return [(d.outcome.code, d.outcome.seq, d.outcome.prev_seq) for d in m.decisions]

        assert outcomes(memory) == outcomes(whole), "the cut does not matter"


async def test_r9_seq_is_the_greater_of_the_allocated_and_the_next() -> None:
    memory = Memory()
    await take(memory, [uplink(message=1), uplink(message=2)], Rules(False))
    await take(memory, [uplink(message=3), uplink(message=4)], Rules(False), shift=-2)
    await take(memory, [uplink(message=5), uplink(message=6)], Rules(False), shift=100)
    assert [(d.outcome.prev_seq, d.outcome.seq) for d in memory.rows] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 105),
        (105, 106),
    ]


def judged_codes(uplinks: list[Uplink], known: Known, rules: Rules) -> list[int]:
    return [j.verdict.code for j in judge(uplinks, known, rules)]


@pytest.mark.parametrize(
    ("conversation_id", "from_user", "to_user", "guests", "code"),
    [
        (ALICE_BOB, "alice", "bob", False, Code.OK),
        (ALICE_BOB, "bob", "alice", False, Code.OK),
        (ALICE_BOB, "carol", "bob", False, Code.BAD_CONVERSATION),
        (ALICE_BOB, "alice", "carol", False, Code.BAD_CONVERSATION),
        (ALICE_BOB, "alice", "", False, Code.NOT_A_MEMBER),
        (ALICE_BOB, "alice", "x" * 65, False, Code.BAD_TO_USER),
        (dialogue_id("alice", "alice"), "alice", "alice", False, Code.OK),
        (dialogue_id("alice", "alice"), "alice", "bob", False, Code.BAD_CONVERSATION),
        ("d:made-up", "alice", "bob", True, Code.BAD_CONVERSATION),
        ("lobby", "alice", "", False, Code.NOT_A_MEMBER),
        ("lobby", "alice", "", True, Code.OK),
        ("g:team", "alice", "", True, Code.NOT_A_MEMBER),
        ("g:team", "alice", "bob", False, Code.NOT_A_MEMBER),
    ],
)
def test_policy_of_the_first_message(
    conversation_id: str, from_user: str, to_user: str, guests: bool, code: Code
) -> None:
    assert judged_codes(
        [uplink(from_user, to_user, conversation_id=conversation_id)], Known({}, {}), Rules(guests)
    ) == [code]


def test_policy_of_later_messages_asks_for_membership_only() -> None:
    known = Known({}, {ALICE_BOB: Conversation(policy.DIALOGUE, 5, {"alice": 0, "bob": 0})})
    for to_user in ("bob", "", "carol"):
        assert judged_codes([uplink("alice", to_user)], known, Rules(False)) == [Code.OK]
    for to_user, code in (("bob", Code.BAD_CONVERSATION), ("", Code.NOT_A_MEMBER), ("alice", Code.BAD_CONVERSATION)):
        assert judged_codes([uplink("carol", to_user)], known, Rules(True)) == [code]
        assert judged_codes([uplink("carol", to_user)], Known(), Rules(True)) == [code], "whether it exists or not"


def test_policy_of_an_open_conversation_has_a_cap_and_keeps_its_members() -> None:
    known = Known({}, {"lobby": Conversation(policy.OPEN, 5, {"alice": 0, "bob": 3})})

    def code(user: str, guests: bool) -> list[int]:
        return judged_codes([uplink(user, "", conversation_id="lobby")], known, Rules(guests, open_members=2))

    assert code("alice", True) == [Code.OK]
    assert code("carol", True) == [Code.NOT_A_MEMBER], "it is full"
    assert code("alice", False) == [Code.OK], "members stay when guests are switched off"


async def test_who_joins_begins_at_the_seq_before_the_join() -> None:
    memory = Memory()
    say = [uplink(u, "", i, conversation_id="lobby") for i, u in enumerate(["alice", "alice", "bob", "bob"])]
    plan = await take(memory, say, Rules(True))
    assert plan.joins == [("lobby", "alice", 0, 0), ("lobby", "bob", 2, 0)]
    assert [set(d.members) for d in plan.decisions] == [{"alice"}, {"alice"}, {"alice", "bob"}, {"alice", "bob"}]


def test_r9_what_the_database_refused_alone_is_refused_for_good() -> None:
    ups = [uplink(message=1, position=1), uplink(message=2, position=2), uplink(message=2, position=3)]
    judged = judge(ups, Known({}, {}), Rules(False), {(0, 2): ""})
    assert [j.verdict.code for j in judged] == [Code.OK, Code.NOT_STORABLE, Code.NOT_STORABLE]
    assert [j.accepted for j in judged] == [True, False, False]


def test_again_repeats_the_stored_outcomes_and_skips_what_has_none() -> None:
    stored = Outcome(0, 9, 3, 2, 1_000)
    known = Known(
        {uplink(message=1).key: stored}, {ALICE_BOB: Conversation(policy.DIALOGUE, 3, {"alice": 0, "bob": 0})}
    )
    decisions = again([uplink(message=1), uplink(message=2), uplink(message=1)], known)
    assert [(d.outcome, d.repeated) for d in decisions] == [(stored, False), (stored, True)]
    assert decisions[0].members == {"alice": 0, "bob": 0}


def record(value: bytes, conversation_id: str = ALICE_BOB, partitions: int = 8) -> BusRecord:
    return BusRecord(partition_of(conversation_id, partitions), 5, value)


def test_decode_reads_a_record() -> None:
    r = up("alice", "bob", b"\x00\xff not text", client_id=(1 << 64) - 1, device_id=(1 << 64) - 1, guest=True)
    u = decode(record(r.SerializeToString()), 8)
    assert (u.position, u.key) == (5, (ALICE_BOB, "alice", r.client_msg_id))
    assert (u.device_id, u.client_id, u.to_user) == ((1 << 64) - 1, (1 << 64) - 1, "bob")
    assert (u.msg_type, u.body, u.trace_id, u.guest) == (1, b"\x00\xff not text", r.trace_id, True)


def broken(**fields: object) -> bytes:
    r = up("alice", "bob")
    for name, value in fields.items():
        setattr(r, name, value)
    return r.SerializeToString()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xff\xff",
        b"\x0a\x02\xff\xfe",  # conversation_id that is no UTF-8
        broken(conversation_id="a\x00b"),
        broken(conversation_id="x" * 65),
        broken(from_user=""),
        broken(from_user="a\nb"),
        broken(client_msg_id=b""),
        broken(client_msg_id=b"x" * 17),
    ],
)
def test_r9_what_no_outcome_can_be_kept_for_is_undecodable(value: bytes) -> None:
    partitions = 1  # whatever the id is, the partition fits
    with pytest.raises(Undecodable):
        decode(BusRecord(0, 1, value), partitions)


def test_r9_a_record_in_a_foreign_partition_is_undecodable() -> None:
    right = partition_of(ALICE_BOB, 8)
    value = up("alice", "bob").SerializeToString()
    assert decode(BusRecord(right, 1, value), 8)
    with pytest.raises(Undecodable, match="another partition"):
        decode(BusRecord((right + 1) % 8, 1, value), 8)


@given(st.binary(max_size=200))
def test_decode_raises_nothing_else(value: bytes) -> None:
    try:
        decode(BusRecord(0, 1, value), 1)
    except Undecodable:
        pass


@given(st.binary(max_size=8), st.integers(0, 60))
def test_decode_bears_a_changed_byte(junk: bytes, at: int) -> None:
    value = bytearray(Record(conversation_id=ALICE_BOB, from_user="alice", client_msg_id=b"x" * 16).SerializeToString())
    value[at : at + len(junk)] = junk
    try:
        decode(BusRecord(0, 1, bytes(value)), 1)
    except Undecodable:
        pass
