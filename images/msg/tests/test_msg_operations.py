"""Operations, without a database: the table of docs/groups.md, histories against a model, what is kept of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, group_id, is_title, partition_of
from plato.ports import BusRecord
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import GroupChange, Record
from plato_msg.core import operations, policy
from plato_msg.core.batch import Conversation, Decision, Known, Plan, Uplink, again, decode, judge, number, wanted
from plato_msg.core.gates import Gates, invitations
from plato_msg.core.operations import Target
from plato_msg.core.policy import Rules

ROOT = Path(__file__).resolve().parents[3]
G = "g:town"
NOW_MS = 1_800_000_000_000
RULES = Rules(False, group_members=6)
T = content


def record(
    user: str,
    kind: int,
    operation: content.Operation | bytes = b"",
    *,
    key: int = 0,
    conversation_id: str = G,
    authority: bool = False,
    guest: bool = False,
) -> Uplink:
    body = operation if isinstance(operation, bytes) else operation.SerializeToString()
    value = Record(
        conversation_id=conversation_id,
        from_user=user,
        device_id=1,
        client_msg_id=key.to_bytes(16, "big"),
        msg_type=kind,
        body=body,
        authority=authority,
        guest=guest,
    ).SerializeToString()
    return decode(BusRecord(partition_of(conversation_id, 8), key, value), 8)


class World:
    """What the database would hold of conversations, messages and outcomes."""

    def __init__(self, push_members: int = 500) -> None:
        self.known = Known()
        self.former: dict[tuple[str, str], tuple[int, int, str]] = {}
        self.rows: dict[int, Decision] = {}
        self.next_id = 1
        self.push_members = push_members

    def take(self, ups: Sequence[Uplink], rules: Rules = RULES, now_ms: int = NOW_MS) -> Plan:
        ids = range(self.next_id, self.next_id + len(ups))
        judged = judge(ups, self.known, rules, (), ids, now_ms)
        held = self.known.conversations
        first = {c: held[c].last_seq + 1 if c in held else 1 for c in wanted(judged)}
        plan = number(judged, self.known, first, ids, now_ms, self.push_members)
        self.next_id += len(ups)
        self._write(plan)
        return plan

    def _write(self, plan: Plan) -> None:
        conversations = dict(self.known.conversations)
        for c, (kind, last_seq) in plan.conversations.items():
            held = conversations.get(c, Conversation(kind, 0, {}))
            conversations[c] = replace(held, last_seq=last_seq, title=plan.titles.get(c, held.title))
        for c, count in plan.groups.items():
            conversations[c] = replace(conversations[c], size=count)
        for c, user in plan.leaves:
            held = conversations[c]
            assert user in held.members
            members = {u: seq for u, seq in held.members.items() if u != user}
            roles = {u: role for u, role in held.roles.items() if u != user}
            conversations[c] = replace(held, members=members, roles=roles)
        for c, user, seq, role in plan.joins:
            held = conversations[c]
            assert user not in held.members
            self.former.pop((c, user), None)
            roles = {**held.roles, user: role} if role else dict(held.roles)
            conversations[c] = replace(held, members={**held.members, user: seq}, roles=roles)
        for c, user, role in plan.roles:
            held = conversations[c]
            assert user in held.members
            conversations[c] = replace(held, roles={u: r for u, r in {**held.roles, user: role}.items() if r})
        for c, user, joined, left, title in plan.former:
            assert user not in conversations[c].members
            self.former[c, user] = joined, left, title
        targets = dict(self.known.targets)
        for d in plan.messages:
            self.rows[d.outcome.msg_id] = d
            u = d.uplink
            targets[d.outcome.msg_id] = Target(
                d.outcome.msg_id, u.conversation_id, d.outcome.seq, u.from_user, u.msg_type, d.outcome.server_at_ms
            )
        for msg_id, edit in plan.edits.items():
            assert edit.seq == targets[msg_id].seq
            self.rows[msg_id] = self.rows[msg_id]._replace(row=edit.row)
            targets[msg_id] = targets[msg_id]._replace(recalled=edit.row.recalled, msg_type=edit.row.msg_type)
        outcomes = {**self.known.outcomes, **{d.uplink.key: d.outcome for d in plan.outcomes}}
        self.known = Known(outcomes, conversations, targets)


def codes(plan: Plan) -> list[int]:
    return [d.outcome.code for d in plan.decisions]


# ── the table of docs/groups.md ──────────────────────────────────────────────────────────────────────────────


def table() -> list[tuple[str, str, str]]:
    """(operation, caller, code) of each cell."""
    page = (ROOT / "docs" / "groups.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    start = next(i for i, row in enumerate(rows) if row[0] == "operation")
    callers = rows[start][1:]
    found = []
    for row in rows[start + 2 :]:
        if not row[0].startswith(("GROUP_", "RECALL", "EDIT")):
            break
        found += [(row[0], caller, code) for caller, code in zip(callers, row[1:], strict=True)]
    return found


def town() -> World:
    """owner, administrator, administrator-2, member, member-2, and left, who wrote and left."""
    world = World()
    users = ["administrator", "administrator-2", "member", "member-2", "left"]
    made = T.Operation(users=users, owner="owner")
    plan = world.take(
        [
            record("admin", T.GROUP_CREATE, made, key=1, authority=True),
            record("owner", T.GROUP_ROLE, T.Operation(users=users[:2], role=T.ADMINISTRATOR), key=2),
            *[record(user, T.TEXT, b"hi", key=10 + n) for n, user in enumerate(["owner", *users])],
            record("left", T.GROUP_LEAVE, key=3),
        ]
    )
    assert set(codes(plan)) == {Code.OK}
    return world


def test_the_page_has_a_row_for_every_operation() -> None:
    kinds = {T.MsgType.Name(kind) for kind in T.MsgType.values() if operations.is_operation(kind)}
    assert {re.split("[, ]", operation)[0] for operation, _, _ in table()} == kinds


@pytest.mark.parametrize(("operation", "caller", "code"), table())
def test_who_may_do_what_is_as_the_page_says(operation: str, caller: str, code: str) -> None:
    world = town()
    kind, _, what = operation.partition(", ")
    msg_type = T.MsgType.Value(kind)
    authority = caller == "authority"
    user = "admin" if authority else caller
    asked, now_ms = T.Operation(), NOW_MS + 1_000
    if what.startswith("an own"):
        of = user if user in ("owner", "administrator", "member", "left") else "member"
        mine = next(i for i, d in world.rows.items() if d.uplink.from_user == of and d.uplink.msg_type == T.TEXT)
        asked.msg_id = mine
        now_ms = NOW_MS + (1_000 if "in time" in what else 86_400_000)
        if authority:
            user = "member"
    elif what.startswith("somebody"):
        asked.msg_id = next(i for i, d in world.rows.items() if d.uplink.from_user == "member-2")
    elif kind == "GROUP_ROLE":
        role, whom = re.fullmatch(r"(\w+) for (?:a|an|the) (\w+)", what).groups()  # type: ignore[union-attr]  # it fits
        asked.role = T.Role.Value(role)
        asked.users.append({"member": "member-2", "administrator": "administrator-2"}.get(whom, whom))
    elif kind == "GROUP_REMOVE":
        whom = what.split()[1]
        asked.users.append({"member": "member-2", "administrator": "administrator-2"}.get(whom, whom))
    elif kind == "GROUP_ADD":
        asked.users.append("newcomer")
    elif kind == "GROUP_RENAME":
        asked.title = "another one"
    before = world.known
    plan = world.take([record(user, msg_type, asked, key=99, authority=authority)], now_ms=now_ms)
    assert Code(codes(plan)[0]).name == code
    if code != "OK":
        assert world.known.conversations == before.conversations, "a refusal changes nothing"
        assert plan.messages == []
    if caller in ("left", "stranger"):
        nothing = World().take([record(user, msg_type, asked, key=99)], now_ms=now_ms)
        assert codes(nothing) == codes(plan), "the same where there is no such group"


def test_in_a_dialogue_groups_operations_are_not_allowed_and_strangers_learn_nothing() -> None:
    pair = dialogue_id("alice", "bob")
    known = Known({}, {pair: Conversation(policy.DIALOGUE, 5, {"alice": 0, "bob": 0})})
    for kind in (T.GROUP_CREATE, T.GROUP_ADD, T.GROUP_REMOVE, T.GROUP_LEAVE, T.GROUP_RENAME, T.GROUP_ROLE):
        asked = T.Operation(title="x", users=["carol"])
        for user, there, code in (
            ("alice", known, Code.NOT_ALLOWED),
            ("carol", known, Code.NOT_A_MEMBER),
            ("carol", Known(), Code.NOT_A_MEMBER),
            ("alice", Known(), Code.NOT_A_MEMBER),
        ):
            up = record(user, kind, asked, conversation_id=pair)._replace(to_user="bob")
            assert [j.verdict.code for j in judge([up], there, RULES)] == [code], (kind, user)
    up = record("alice", T.RECALL, T.Operation(msg_id=1), conversation_id=pair)._replace(to_user="bob")
    assert [j.verdict.code for j in judge([up], Known(), RULES)] == [Code.NOT_A_MEMBER], "it makes no dialogue"


def test_guests_may_send_no_operation() -> None:
    known = Known({}, {"lobby": Conversation(policy.OPEN, 5, {"guest:1": 0})})
    for user, code in (("guest:1", Code.NOT_ALLOWED), ("guest:2", Code.NOT_A_MEMBER)):
        up = record(user, T.RECALL, T.Operation(msg_id=1), conversation_id="lobby", guest=True)
        assert [j.verdict.code for j in judge([up], known, Rules(True))] == [code]


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────

BAD: Sequence[tuple[int, content.Operation | bytes]] = [
    (T.GROUP_ADD, b"\xff"),
    (T.GROUP_ADD, T.Operation()),
    (T.GROUP_ADD, T.Operation(users=[""])),
    (T.GROUP_ADD, T.Operation(users=["x" * 65])),
    (T.GROUP_ADD, T.Operation(users=[f"u{n}" for n in range(501)])),
    (T.GROUP_RENAME, T.Operation()),
    (T.GROUP_RENAME, T.Operation(title="x" * 129)),
    (T.GROUP_RENAME, T.Operation(title="a\nb")),
    (T.GROUP_CREATE, T.Operation(title="\x7f")),
    (T.GROUP_ROLE, T.Operation(users=["a", "b"], role=T.OWNER)),
    (T.GROUP_ROLE, T.Operation(users=["nobody"], role=T.OWNER)),
    (T.GROUP_ROLE, b"\x12\x01a\x18\x07"),
    (T.RECALL, T.Operation()),
    (T.RECALL, T.Operation(msg_id=1 << 63)),
    (T.EDIT, T.Operation(msg_id=1, msg_type=7)),
    (1006, T.Operation(users=["a"])),
    (1999, b""),
]


@pytest.mark.parametrize(("kind", "operation"), BAD)
def test_what_cannot_be_read_or_is_out_of_bounds_is_refused_with_an_outcome(
    kind: int, operation: content.Operation | bytes
) -> None:
    plan = town().take([record("owner", kind, operation, key=99)])
    assert codes(plan) == [Code.BAD_OPERATION]
    assert len(plan.outcomes) == 1


@settings(deadline=None, max_examples=80)
@given(st.integers(1000, 1999) | st.sampled_from([1000, 1001, 1002, 1004, 1005, 1010, 1011]), st.binary(max_size=60))
def test_any_body_is_read_or_refused(kind: int, body: bytes) -> None:
    op = operations.read(kind, body, authority=False)
    if op is not None:
        again = operations.read(kind, operations.stored(op), authority=False)
        assert again is not None
        assert again._replace(owner="", seq=0) == op._replace(owner="", seq=0)


def test_titles_are_bytes_without_control_characters() -> None:
    assert is_title("")
    assert is_title("é" * 64)
    assert not is_title("é" * 65)
    assert not is_title("\udc00")


def test_what_is_stored_is_what_was_done() -> None:
    world = World()
    mine = group_id("ann", (1).to_bytes(16, "big"))
    plan = world.take(
        [
            record("ann", T.GROUP_CREATE, T.Operation(title="t", users=["ben", "ann", "ben"], owner="eve", seq=9),
                   key=1, conversation_id=mine),
            record("ann", T.GROUP_ADD, T.Operation(users=["ben", "cid", "cid"]), key=2, conversation_id=mine),
            record("ann", T.GROUP_REMOVE, T.Operation(users=["nobody", "cid"]), key=3, conversation_id=mine),
            record("ann", T.GROUP_LEAVE, T.Operation(title="?"), key=4, conversation_id=mine),
        ]
    )  # fmt: skip
    said = [content.Operation.FromString(d.body) for d in plan.messages]
    assert said == [
        T.Operation(title="t", users=["ann", "ben"], owner="ann"),
        T.Operation(users=["cid"]),
        T.Operation(users=["cid"]),
        T.Operation(users=["ann"], owner="ben"),
    ]
    assert [sorted(d.members) for d in plan.messages] == [
        ["ann", "ben"],
        ["ann", "ben", "cid"],
        ["ann", "ben", "cid"],
        ["ann", "ben"],
    ], "who joins or leaves by it is told of it"
    assert world.former == {(mine, "cid"): (1, 3, "t"), (mine, "ann"): (0, 4, "t")}


def test_a_person_names_no_other_group() -> None:
    theirs = group_id("ben", (1).to_bytes(16, "big"))
    for conversation_id in (theirs, "g:town", "g:other"):
        for world in (World(), town()):
            plan = world.take([record("ann", T.GROUP_CREATE, key=1, conversation_id=conversation_id)])
            assert codes(plan) == [Code.BAD_CONVERSATION]
    mine = group_id("ann", (1).to_bytes(16, "big"))
    world = World()
    assert codes(world.take([record("admin", T.GROUP_CREATE, key=5, conversation_id=mine, authority=True)])) == [0]
    assert codes(world.take([record("ann", T.GROUP_CREATE, key=1, conversation_id=mine)])) == [Code.NOT_A_MEMBER]


def test_orders_of_the_version_before_are_operations_with_authority() -> None:
    value = Record(
        conversation_id=G,
        from_user="admin",
        client_msg_id=bytes(16),
        group=GroupChange(kind=GroupChange.CREATE, users=["ann", "ben"]),
    ).SerializeToString()
    up = decode(BusRecord(partition_of(G, 8), 1, value), 8)
    plan = World().take([up])
    assert codes(plan) == [Code.OK]
    assert plan.messages[0].msg_type == T.GROUP_CREATE
    assert [join[1:] for join in plan.joins] == [("ann", 0, 0), ("ben", 0, 0)]


# ── messages that are changed ────────────────────────────────────────────────────────────────────────────────


def pair_of(world: World) -> str:
    pair = dialogue_id("ann", "ben")
    world.take([record("ann", T.TEXT, b"one", key=1, conversation_id=pair)._replace(to_user="ben")])
    return pair


def test_edits_and_recalls_of_one_batch_end_as_the_newest_says() -> None:
    world = World()
    pair = pair_of(world)

    def edit(key: int, text: bytes, msg_id: int = 1) -> Uplink:
        return record("ann", T.EDIT, T.Operation(msg_id=msg_id, body=text), key=key, conversation_id=pair)

    plan = world.take([edit(2, b"two"), edit(3, b"three")])
    assert [(d.outcome.code, d.outcome.seq) for d in plan.decisions] == [(0, 2), (0, 3)]
    row = world.rows[1].row
    assert row is not None
    assert (row.body, row.changed_seq, row.recalled) == (b"three", 3, False)
    assert plan.edited == [(pair, 1, 2), (pair, 1, 3)]
    assert plan.changed == {pair: 3}
    recall = record("ann", T.RECALL, T.Operation(msg_id=1), key=4, conversation_id=pair)
    plan = world.take([edit(5, b"four"), recall, edit(6, b"five"), recall._replace(client_msg_id=bytes(15) + b"\x09")])
    assert codes(plan) == [0, 0, Code.MESSAGE_UNKNOWN, Code.MESSAGE_UNKNOWN]
    row = world.rows[1].row
    assert row is not None
    assert (row.body, row.changed_seq, row.recalled) == (b"", 5, True)
    assert content.Operation.FromString(plan.messages[1].body) == T.Operation(msg_id=1, seq=1)


def test_a_message_of_the_same_batch_may_be_meant() -> None:
    world = World()
    pair = pair_of(world)
    say = record("ben", T.TEXT, b"oops", key=2, conversation_id=pair)
    # Its msg_id is known here, though no client could know it.
    plan = world.take([say, record("ben", T.RECALL, T.Operation(msg_id=2), key=3, conversation_id=pair)])
    assert codes(plan) == [0, 0]
    assert plan.edits[2][1:] == (pair, 2, (T.TEXT, b"", 3, True))


def test_operations_cannot_be_recalled_nor_edited_nor_messages_of_elsewhere() -> None:
    world = town()
    pair = pair_of(world)
    (elsewhere,) = [i for i, d in world.rows.items() if d.uplink.conversation_id == pair]
    for kind in (T.RECALL, T.EDIT):
        for msg_id, code in ((1, Code.NOT_ALLOWED), (elsewhere, Code.MESSAGE_UNKNOWN), (77, Code.MESSAGE_UNKNOWN)):
            plan = world.take([record("owner", kind, T.Operation(msg_id=msg_id), key=900 + kind + msg_id)])
            assert codes(plan) == [code], (kind, msg_id)


def test_what_was_said_before_a_member_s_time_does_not_exist_for_them() -> None:
    world = town()
    said = next(i for i, d in world.rows.items() if d.uplink.from_user == "member-2")
    world.take(
        [
            record("owner", T.GROUP_REMOVE, T.Operation(users=["member-2"]), key=90),
            record("owner", T.GROUP_ADD, T.Operation(users=["member-2"]), key=91),
            record("owner", T.GROUP_ROLE, T.Operation(users=["member-2"], role=T.ADMINISTRATOR), key=92),
        ]
    )
    recall = record("member-2", T.RECALL, T.Operation(msg_id=said), key=93)
    assert codes(world.take([recall])) == [Code.MESSAGE_UNKNOWN]


def test_zero_means_never() -> None:
    world = World()
    pair = pair_of(world)
    rules = replace(RULES, recall_limit_ms=0, edit_limit_ms=0)
    for kind in (T.RECALL, T.EDIT):
        up = record("ann", kind, T.Operation(msg_id=1), key=kind, conversation_id=pair)
        assert codes(world.take([up], rules)) == [Code.TOO_LATE]


def test_again_pushes_what_is_stored_to_whom_it_concerned() -> None:
    world = town()
    ups = [record("owner", T.GROUP_REMOVE, T.Operation(users=["member", "nobody"]), key=90)]
    (done,) = world.take(ups).decisions
    known = replace_rows(world.known, {ups[0].key: done})
    (d,) = again(ups, known)
    assert d.body == done.body != ups[0].body
    assert set(d.members) == set(done.members)
    world.take([record("owner", T.GROUP_ADD, T.Operation(users=["member"]), key=91)])
    (d,) = again(ups, replace_rows(world.known, {ups[0].key: done}))
    assert d.members["member"] >= d.outcome.seq, "who came back is told nothing from before"


def replace_rows(known: Known, decided: Mapping[tuple[str, str, bytes], Decision]) -> Known:
    rows = {key: d.row for key, d in decided.items() if d.row is not None}
    return Known(known.outcomes, known.conversations, known.targets, rows)


def test_a_group_that_grows_beyond_pushes_is_notified_from_that_record_on() -> None:
    world = World(push_members=3)
    plan = world.take(
        [
            record("admin", T.GROUP_CREATE, T.Operation(users=["a", "b", "c"]), key=1, authority=True),
            record("admin", T.GROUP_ADD, T.Operation(users=["d"]), key=2, authority=True),
            record("admin", T.GROUP_REMOVE, T.Operation(users=["a"]), key=3, authority=True),
            record("b", T.TEXT, b"hi", key=4),
        ]
    )
    assert [(sorted(d.members), d.large) for d in plan.decisions] == [
        (["a", "b", "c"], 0),
        ([], 4),
        (["a"], 3),
        ([], 3),
    ]


# ── histories ────────────────────────────────────────────────────────────────────────────────────────────────

PEOPLE = ["ann", "ben", "cid", "dan", "eve"]


@dataclass
class Model:
    """A group as the page tells it, one change after the other."""

    members: dict[str, int] = field(default_factory=dict)  # who → when they joined, as a count
    roles: dict[str, int] = field(default_factory=dict)
    time: int = 0

    def apply(self, user: str, kind: int, users: Sequence[str], role: int, authority: bool) -> bool:
        """Whether it is done."""
        self.time += 1
        if not authority and user not in self.members:
            return False
        mine = T.OWNER if authority else self.roles[user]
        present = [u for u in dict.fromkeys(users) if u in self.members]
        if kind == T.TEXT:
            return user in self.members
        if kind == T.GROUP_LEAVE:
            if user in self.members:
                self._drop([user])
                return True
            return False
        if mine == T.MEMBER:
            return False
        if kind == T.GROUP_ADD:
            new = [u for u in dict.fromkeys(users) if u not in self.members]
            if len(self.members) + len(new) > RULES.group_members:
                return False
            self.members.update(dict.fromkeys(new, self.time))
            self.roles.update(dict.fromkeys(new, T.MEMBER))
            return True
        if kind == T.GROUP_REMOVE:
            if not authority and (user in present or any(self.roles[u] >= mine for u in present)):
                return False
            self._drop(present)
            return True
        if kind != T.GROUP_ROLE or mine != T.OWNER:
            return False
        if role == T.OWNER:
            if not present:
                return False
            for u, r in self.roles.items():
                if r == T.OWNER:
                    self.roles[u] = T.ADMINISTRATOR
            self.roles[present[0]] = T.OWNER
            return True
        if any(self.roles[u] == T.OWNER for u in present):
            return False
        self.roles.update(dict.fromkeys(present, role))
        return True

    def _drop(self, users: Sequence[str]) -> None:
        led = T.OWNER in (self.roles[u] for u in users)
        for u in users:
            del self.members[u], self.roles[u]
        if led and self.members:
            ranks = sorted((self.roles[u] == T.MEMBER, self.members[u], u) for u in self.members)
            self.roles[ranks[0][2]] = T.OWNER


steps = st.tuples(
    st.sampled_from(PEOPLE),
    st.sampled_from([T.TEXT, T.GROUP_ADD, T.GROUP_REMOVE, T.GROUP_LEAVE, T.GROUP_ROLE]),
    st.lists(st.sampled_from(PEOPLE), min_size=1, max_size=3),
    st.sampled_from([T.MEMBER, T.ADMINISTRATOR, T.OWNER]),
    st.integers(0, 9).map(lambda n: n == 0),  # authority
)


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, max_size=25), st.lists(st.integers(0, 25), max_size=5), st.integers(1, 5))
@example(  # who is removed speaks on in the same batch: chance does not meet it each time
    [("ann", T.GROUP_REMOVE, ["ben"], T.MEMBER, False), ("ben", T.TEXT, ["ann"], T.MEMBER, False)], [], 5
)
def test_r9_histories_of_a_group_are_as_the_model_says_however_cut_into_batches(
    history: list[tuple[str, int, list[str], int, bool]], cuts: list[int], push_members: int
) -> None:
    mine = group_id("ann", bytes(16))
    world, model = World(push_members), Model({"ann": 0, "ben": 0}, {"ann": T.OWNER, "ben": T.MEMBER})
    world.take([record("ann", T.GROUP_CREATE, T.Operation(users=["ben"]), conversation_id=mine)])
    ups, expected = [], []
    for n, (user, kind, users, role, authority) in enumerate(history, start=1):
        users = users[:1] if role == T.OWNER and kind == T.GROUP_ROLE else users
        asked = T.Operation(users=users, role=T.Role.ValueType(role)) if kind != T.TEXT else b"hi"
        authority = authority and kind != T.TEXT and bool(model.members)
        ups.append(record(user, kind, asked, key=n, conversation_id=mine, authority=authority))
        expected.append(model.apply(user, kind, users, role, authority))
    edges = sorted({0, len(ups), *(c for c in cuts if c < len(ups))})
    done: list[Decision] = []
    for begin, end in pairwise(edges):
        done += world.take(ups[begin:end]).decisions
        held = world.known.conversations[mine]
        owners = [u for u, role in held.roles.items() if role == T.OWNER]
        assert len(owners) == (1 if held.members else 0), "one owner, as long as there are members"
        assert held.size == len(held.members)
    assert [d.outcome.code == Code.OK for d in done] == expected
    held = world.known.conversations[mine]
    assert set(held.members) == set(model.members)
    assert {u: held.roles.get(u, 0) for u in held.members} == model.roles
    assert not {user for _, user in world.former} & set(held.members)
    for (_, user), (joined, left, _) in world.former.items():
        assert joined < left <= held.last_seq, user


# ── who is brought into groups by whom ───────────────────────────────────────────────────────────────────────


def test_who_takes_nothing_of_somebody_is_brought_into_no_group_by_him_and_he_is_told_no_more_than_that() -> None:
    def made(kind: int, who: str, *users: str, key: int, authority: bool = False) -> Uplink:
        conversation_id = G if authority else mine
        return record(
            who, kind, T.Operation(users=users), key=key, conversation_id=conversation_id, authority=authority
        )

    mine = group_id("ben", (1).to_bytes(16, "big"))
    world = World()
    uninvited = Gates(uninvited={("ann", "ben"), ("ben", "ben")})
    world.known.gates = uninvited
    plan = world.take([made(T.GROUP_CREATE, "ben", "ann", "cid", key=1)])
    assert codes(plan) == [Code.OK]
    assert [user for _, user, _, _ in plan.joins] == ["ben", "cid"]
    assert T.Operation.FromString(plan.messages[0].body).users == ["ben", "cid"], "as it was done"
    assert plan.messages[0].members.keys() == {"ben", "cid"}
    world.known.gates = uninvited
    plan = world.take([made(T.GROUP_ADD, "ben", "ann", key=2), made(T.GROUP_ADD, "ben", "cid", key=3)])
    assert codes(plan) == [Code.OK, Code.OK]
    assert not plan.joins
    assert plan.messages[0].body == plan.messages[1].body, "the same as adding who is there already"
    world.known.gates = uninvited
    plan = world.take([record("cid", T.GROUP_ADD, T.Operation(users=["ann"]), key=4, conversation_id=mine)])
    assert codes(plan) == [Code.NOT_ALLOWED], "roles go as ever"
    role = record("ben", T.GROUP_ROLE, T.Operation(users=["cid"], role=T.ADMINISTRATOR), key=5, conversation_id=mine)
    world.take([role])
    world.known.gates = uninvited
    plan = world.take([record("cid", T.GROUP_ADD, T.Operation(users=["ann"]), key=6, conversation_id=mine)])
    assert [user for _, user, _, _ in plan.joins] == ["ann"], "others bring her"
    world.known.gates = uninvited
    plan = world.take([made(T.GROUP_CREATE, "ben", "ann", "ben", key=7, authority=True)])
    assert len(plan.joins) == 2, "servers do as they do"


def test_a_look_up_for_those_who_are_brought_is_made_where_somebody_is() -> None:
    plain = [record("ben", T.GROUP_REMOVE, T.Operation(users=["ann"])), record("ben", T.TEXT, b"hi")]
    assert not invitations(plain)
    assert not invitations([record("admin", T.GROUP_ADD, T.Operation(users=["ann"]), authority=True)])
    assert list(invitations([record("ben", T.GROUP_ADD, T.Operation(users=["ann", "ben"]))])) == [("ann", "ben")]
