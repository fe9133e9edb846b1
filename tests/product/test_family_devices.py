"""A family on its devices while processes are killed by -9: whatever happened, every device shows the same, and it is true.

People have up to three devices, two of all are terminals (plato chat), two are browsers, a bot answers; gateway, state,
msg, Valkey and PostgreSQL are killed. PLATO_FAMILY_S: for how long (60); PLATO_FAULTS_SEED: which evening. At the end
everybody gets one more device, which must come to the same, and each browser's page must show what it should. Where there
is no Chromium the browsers stay away, and the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from plato.local.cluster import LocalCluster

from tests.faults.night import SEED, Night
from tests.faults.waiting import until
from tests.product import family_doctored
from tests.product.browser import chromium
from tests.product.family import Home
from tests.product.family_checker import Kind, check

FAMILY_S = float(os.environ.get("PLATO_FAMILY_S", "60"))
SETTINGS = {"state.heartbeat_ms": 5_000, "local.msgs": 2}
PEOPLE = {"alice": 2, "bob": 2, "carol": 1, "dora": 0, "bot": 1}
WINDOWS = ("alice", "dora")
TERMINALS = ("bob", "carol")
KINDS = ("worker", "link", "state", "msg", "valkey", "postgres")
RATE_PER_S = 12.0


class Evening(Night):
    """A night that lasts for a time, and whose kills begin with one of each kind."""

    async def last(self, for_s: float, chance: random.Random) -> None:
        """Kills until the time is over, then waits until all is repaired."""
        began = time.monotonic()
        order = list(KINDS)
        while time.monotonic() - began < for_s or order:
            kind = order.pop() if order else chance.choice(KINDS)
            if chance.random() < 0.8:
                with contextlib.suppress(TimeoutError):
                    await until(self._ready, 15.0)
            pid = await until(partial(self._one, kind, chance), 60.0, f"no process of kind {kind} runs")
            os.kill(pid, signal.SIGKILL)
            self.kills[kind] += 1
            self.log.append(f"{time.monotonic() - began:6.1f} s  {kind:<9} pid {pid}")
            await asyncio.sleep(chance.uniform(1.0, 4.0))  # the pace of the evening, nothing is waited for
        await until(self._ready, 60.0, "the cluster did not repair itself after the last kill")
        self.over = True


@pytest.mark.timeout(FAMILY_S + 420)
async def test_every_device_shows_the_same_whatever_is_killed(
    new_cluster: Callable[..., LocalCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = new_cluster(SETTINGS)
    evening = Evening(cluster)
    windows = WINDOWS if chromium() or os.environ.get("PLATO_WEB_REQUIRED") == "1" else ()
    people = {user: count or (0 if windows else 1) for user, count in PEOPLE.items()}
    async with Home(cluster, tmp_path, people, TERMINALS, windows) as home:
        living = asyncio.create_task(home.live(RATE_PER_S, lambda: evening.over, SEED))
        try:
            await evening.last(FAMILY_S, random.Random(SEED))
        finally:
            evening.over = True
            await living
        findings, _ = await home.rest(90.0)
        assert findings == [], "\n".join([*map(str, findings[:20]), *evening.log])
        await home.late()
        findings, family = await home.rest(60.0)
        for window in home.windows:
            await window.reads_as(family)
        with capsys.disabled():
            print(f"\nfamily, seed {SEED}: {len(home.devices)} devices, {len(home.sent)} messages and operations")
            print("  kills " + "  ".join(f"{kind} {n}" for kind, n in sorted(evening.kills.items())))
            print("  " + "  ".join(f"{act} {n}" for act, n in sorted(home.acts.items())))
            if not windows:
                print("  without browsers: Chromium is missing")
            for w in home.windows:
                acts = "  ".join(f"{act} {n}" for act, n in sorted(w.acts.items()))
                print(f"  {w.user}'s browser: {acts}; missed {w.missed}")
            print(f"  refused {len(home.refused)}; findings {len(findings)}")
        assert findings == [], "\n".join([*map(str, findings[:20]), *evening.log])
    assert all(evening.kills[kind] for kind in KINDS)
    for window in home.windows:
        assert window.person.faults == []
        assert not window.owed(), window.acts
    assert any(row.recalled for row in family.rows)
    assert any(row.changed_seq and not row.recalled for row in family.rows)
    assert family.hidden
    for name, broken, kind in family_doctored.all_of(family):
        assert kind in {f.kind for f in check(broken)}, name
    assert Kind.MESSAGES in {f.kind for f in check(family_doctored.lose(family))}
    cluster.down()
