"""What devices share, as one device hears it: STATEs, Syncs and their pages in any order, some lost, the platform set back.

The rule: when all is quiet, the device's version is the platform's, and so is all that it holds.
"""

from __future__ import annotations

import copy
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from plato.client.api import Overflowed
from plato.client.core.model import Effects, Shared
from plato.client.core.repeats import Timing
from plato.client.core.shared import SharedState
from plato.client.store import Store
from plato.fakes.platform_product import UserState
from plato.wire.v1 import client_pb2 as pb

STEPS = ("change", "change", "tell", "tell", "lose", "ask", "answer", "repeat", "page", "look", "set back", "restart")
NAMES = ("d:one", "d:two", "g:tea")


class Line:
    """One device and its user's platform. Frames of each kind come in order, but a page and a STATE in any."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.platform = UserState()
        self.kept = [copy.deepcopy(self.platform)]  # what a database may be set back to
        self.store = Store(":memory:", 1)
        self.ref = 0
        self.lost = False  # numbers will show it
        self.anew = 0
        self.boot()

    def boot(self) -> None:
        """The process starts with what its disk holds; what was on its way is gone."""
        self.states: list[pb.StateMsg] = []
        self.asked: list[tuple[int, int | None]] = []  # Syncs on their way: (ref, the version named)
        self.pages: list[pb.SyncedMsg] = []
        snapshot = self.store._load()
        self.shared = SharedState(snapshot.state_version, snapshot.shared, Timing(), lambda: 0.5)
        self.lost = False

    def written(self, out: Effects) -> None:
        self.shared.flush(False, 0, 0, out)
        self.store.apply(out.writes)
        self.anew += out.notices.count(Overflowed())

    def change(self) -> None:
        where, pick = self.chance.choice(NAMES), self.chance.randrange(6)
        if pick == 0:
            told: pb.StateMsg | None = self.platform.hide(where, self.chance.randrange(1, 9))
        elif pick == 1:
            told = self.platform.befriend(
                pb.FriendState(user=self.chance.choice("xyz"), words=str(self.chance.random()))
            )
        else:
            name = ("pinned_at_ms", "muted_until_ms", "cleared_seq", "read_seq")[pick - 2]
            told = self.platform.change(where, **{name: self.chance.randrange(1, 9)})
        if told is not None:
            self.states.append(told)
        if self.chance.random() < 0.1:
            self.kept.append(copy.deepcopy(self.platform))

    def set_back(self, below: int = 1 << 62) -> None:
        self.kept = self.kept[: self.chance.randrange(sum(k.version < below for k in self.kept)) + 1]
        self.platform = copy.deepcopy(self.kept[-1])
        self.states.clear()
        self.lost = True

    def step(self, what: str) -> None:
        out = Effects()
        if what == "change":
            self.change()
        elif what == "tell" and self.states:
            if not self.shared.stated(self.states.pop(0), out):
                self.ask()
        elif what == "lose" and self.states:
            place = self.chance.randrange(len(self.states))
            del self.states[place]
            self.lost = self.lost or place == len(self.states)  # else the next STATE shows it
        elif what == "look" and self.lost and not self.asked and not self.pages:  # numbers showed a loss: one more Sync
            self.lost, self.shared.wanted = False, True
            self.ask()
        elif what == "ask" and self.chance.random() < 0.3:  # the Sync that commits another connection
            self.shared.wanted = True
            self.ask(2)
        elif what in ("answer", "repeat") and self.asked:
            ref, version = self.asked[0] if what == "repeat" else self.asked.pop(0)
            page = pb.SyncedMsg(ref=ref)
            if version is not None:
                known = version if version <= self.platform.version else 0
                page.state.CopyFrom(self.platform.newer(known, self.chance.choice((1, 2, 100))))
            self.pages.append(page)
        elif what == "page" and self.pages:
            version, anew = self.shared.version, self.anew
            self.shared.synced(self.pages.pop(0), out)
            self.written(out)
            assert self.shared.version >= version or self.anew > anew, "an older page takes nothing back"
            if self.shared.wanted:
                self.ask()
            return
        elif what == "set back" and not self.pages and self.chance.random() < 0.2:  # else twice: that cannot be told
            self.set_back()
            # It was stopped meanwhile: no answer of before is on its way, and each device syncs before anything changes.
            self.shared.wanted, self.lost = True, False
            self.ask(3)
            while self.asked:
                self.step("answer")
        elif what == "restart" and self.chance.random() < 0.2:
            self.boot()
            self.ask()
        self.written(out)

    def ask(self, most: int = 1) -> None:
        """One Sync at a time, and the one that commits another connection."""
        if len(self.asked) + len(self.pages) < most:
            self.ref += 1
            self.asked.append((self.ref, self.shared.ask(self.ref)))

    def settle(self) -> int:
        """All is delivered and answered. Returns how many pages that took."""
        before = self.ref
        for _ in range(300):
            for what in ("tell", "answer", "page", "look"):
                self.step(what)
            if not (self.states or self.asked or self.pages or self.lost):
                return self.ref - before
        raise AssertionError("busy for ever")

    def check(self) -> None:
        assert self.shared.version == self.platform.version == self.store._load().state_version
        kept = {s.conversation_id: s for s in self.store._load().shared}
        for name in NAMES:
            told, mine = self.platform.of(name), self.shared.of(name)
            assert mine == kept.get(name, Shared(name))
            values = (mine.read_seq, mine.pinned_at_ms, mine.muted_until_ms, mine.cleared_seq)
            assert values == (told.read_seq, told.pinned_at_ms, told.muted_until_ms, told.cleared_seq)
        hidden = set(self.store._read().execute("SELECT conversation_id, seq FROM hidden").fetchall())
        assert hidden == set(self.platform.hidden)
        assert {f.user: f.words for f in self.store.friends()} == {
            u: f.words for u, (_, f) in self.platform.friends.items()
        }


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.sampled_from([s for s in STEPS if s != "set back"]), max_size=40))
def test_when_all_is_quiet_a_device_holds_what_the_platform_holds(seed: int, steps: list[str]) -> None:
    line = Line(seed)
    line.ask()
    for what in steps:
        line.step(what)
    line.settle()
    line.check()
    assert line.anew == 0, "nobody set it back"
    line.store.close()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.sampled_from(STEPS), max_size=40), st.integers(0, 20))
def test_a_platform_that_was_set_back_is_right(seed: int, steps: list[str], more: int) -> None:
    line = Line(seed)
    line.ask()
    for what in (*steps, *(["change"] * more)):
        line.step(what)
    line.settle()
    ahead = line.shared.version
    if ahead:
        line.set_back(ahead)
        if line.chance.random() < 0.5:
            line.shared.wanted, line.lost = True, False
            line.ask()
            line.step("answer")  # the first changes come before the page
        for _ in range(line.chance.randrange(ahead - line.platform.version)):  # it does not come back to our version
            line.change()
        line.settle()
        assert line.anew, "the application is told to look anew"
    line.check()
    line.store.close()


def test_a_state_that_comes_before_an_older_page_is_not_forgotten() -> None:
    line = Line(1)
    line.ask()
    line.step("answer")
    for _ in range(9):
        line.change()
    del line.states[:3]
    while line.states:
        line.step("tell")
    assert line.shared.version == 0, "something is missing before them"
    line.step("page")
    assert line.asked, "the page said less than the STATEs: one more Sync"
    line.settle()
    line.check()
    line.store.close()


def test_a_page_with_more_behind_it_is_followed_up_though_a_state_was_as_fast() -> None:
    shared, out = SharedState(5, (), Timing(), lambda: 0.5), Effects()
    assert shared.ask(1) == 5
    assert shared.stated(pb.StateMsg(version=6, prev_version=5), out)
    shared.synced(pb.SyncedMsg(ref=1, state=pb.StateMsg(version=6, more=True)), out)
    assert shared.wanted, "7 may have been lost"
    assert shared.ask(2) == 6
    shared.synced(pb.SyncedMsg(ref=2, state=pb.StateMsg(version=7)), out)
    assert (shared.wanted, shared.version) == (False, 7)


def test_a_set_back_platform_shows_with_its_next_change() -> None:
    line = Line(1)
    line.ask()
    for _ in range(30):
        line.change()
    line.settle()
    line.shared.wanted = True
    line.ask()
    line.settle()  # a Sync named this version: what is older is not on its way any more
    line.platform = copy.deepcopy(line.kept[0])
    assert line.settle() == 0
    line.change()
    line.settle()
    line.check()
    line.store.close()
