"""ReservationStore: fake and Valkey."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plato.ports import Window

if TYPE_CHECKING:
    from tests.contract.conftest import Stores

NOW = 1_800_000_000_000
BOOT = (1 << 64) - 1


async def test_the_first_reservation_begins_now(stores: Stores) -> None:
    assert await stores.reservations.reserve(17, "u", BOOT, NOW, 3_000) == Window(NOW, NOW + 3_000)


async def test_the_same_boot_goes_on_where_it_was(stores: Stores) -> None:
    await stores.reservations.reserve(17, "u", BOOT, NOW, 3_000)
    assert await stores.reservations.reserve(17, "u", BOOT, NOW + 1_000, 3_000) == Window(NOW + 3_000, NOW + 4_000)
    stepped_back = await stores.reservations.reserve(17, "u", BOOT, NOW - 60_000, 3_000)
    assert stepped_back == Window(NOW + 4_000, NOW + 4_000)
    late = await stores.reservations.reserve(17, "u", BOOT, NOW + 60_000, 3_000)
    assert late == Window(NOW + 4_000, NOW + 63_000)


async def test_another_boot_begins_behind_and_gets_the_whole_length(stores: Stores) -> None:
    await stores.reservations.reserve(17, "u", BOOT, NOW, 3_000)
    # A boot that a double would round to the same number.
    assert await stores.reservations.reserve(17, "u", BOOT - 1, NOW, 3_000) == Window(NOW + 3_000, NOW + 6_000)
    assert await stores.reservations.reserve(17, "u", 5, NOW + 9_000, 3_000) == Window(NOW + 9_000, NOW + 12_000)


async def test_another_uid_waits_until_the_reservation_has_passed(stores: Stores) -> None:
    await stores.reservations.reserve(17, "u", BOOT, NOW, 3_000)
    assert await stores.reservations.reserve(17, "v", BOOT, NOW + 2_999, 3_000) is None
    assert await stores.reservations.reserve(17, "u", BOOT, NOW + 2_999, 3_000) == Window(NOW + 3_000, NOW + 5_999)
    assert await stores.reservations.reserve(17, "v", BOOT, NOW + 5_999, 3_000) == Window(NOW + 5_999, NOW + 8_999)
    assert await stores.reservations.reserve(17, "u", BOOT, NOW + 5_999, 3_000) is None


async def test_worker_ids_are_apart(stores: Stores) -> None:
    for worker_id in (0, 1, 10, 1023):
        assert await stores.reservations.reserve(worker_id, f"u{worker_id}", 1, NOW, 10) == Window(NOW, NOW + 10)


attempts = st.lists(
    st.tuples(
        st.sampled_from(["u", "v", "w"]),
        st.integers(1, 3),
        st.integers(-5_000, 5_000),  # the clock steps back and forth
        st.integers(1, 4_000),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(attempts=attempts)
async def test_reservations_never_overlap(stores: Stores, attempts: list[tuple[str, int, int, int]]) -> None:
    """Whatever the order of processes, boots and clocks: no stamp is given twice."""
    await stores.wipe()
    now, given_until = NOW, 0
    for uid, boot, step, ahead in attempts:
        now += step
        window = await stores.reservations.reserve(7, uid, boot, now, ahead)
        if window is not None:
            assert window.from_ms >= given_until
            assert window.until_ms >= window.from_ms
            given_until = window.until_ms
