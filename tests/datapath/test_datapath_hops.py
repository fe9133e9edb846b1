"""`ls images/*/plato_*/{up,down}link.py` lists six hops; here a message goes through each of them, one at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, partition_of
from plato.core.frames import pack, split
from plato.topology.record import Gateway
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1.bus_pb2 import Record

from tests.datapath.road import GATEWAY, PARTITIONS, SHARD, Peer, Road, open_road

CONVERSATION = dialogue_id("alice", "bob")
KEY = b"sixteen bytes it"


@pytest.fixture
async def road() -> AsyncIterator[Road]:
    async with open_road() as opened:
        yield opened


def up(client_id: int = 1, body: bytes = b"hello", key: bytes = KEY) -> wire.UPMsg:
    head = wire.UPMsgHead(ClientID=client_id, SessionId=CONVERSATION)
    return wire.UPMsg(Head=head, UPMsgBody=body, client_msg_id=key, to_user="bob", trace_id=b"t" * 16)


async def on_the_bus(road: Road) -> list[Record]:
    partition = partition_of(CONVERSATION, PARTITIONS)
    return [Record.FromString(r.value) for r in await road.bus.read(partition, 0, 100)]


async def test_hop_1_the_gateway_forwards_whole_frames_unopened(road: Road) -> None:
    peer = road.gateway.connect()
    road.peers.append(peer)
    road.gateway.events.clear()
    frames = pack(b"\xff not protobuf") + pack(b"second")
    peer.sock.sendall(frames[:3])  # a cut header goes nowhere
    road.gateway.turn()
    assert all(b"\x02" not in bytes(e.kinds) for e in road.gateway.events)
    peer.sock.sendall(frames[3:])
    await road.until(lambda: [e for e in road.gateway.events if 2 in e.kinds])
    (events,) = (e for e in road.gateway.events if 2 in e.kinds)
    assert list(split(events.data[-len(frames) :])) == [b"\xff not protobuf", b"second"]
    assert int.from_bytes(events.conn_ids[-8:], "little") == peer.conn_id


async def test_hop_2_state_orders_and_acknowledges_when_the_bus_has_it(road: Road) -> None:
    alice = await road.enter("alice", 1)
    alice.send(wire.UP, up(2))  # out of order: the client is told what comes next
    (ack,) = await road.until(lambda: alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP))
    assert (ack.Code, ack.expected) == (Code.EXPECTED, 1)
    assert await on_the_bus(road) == []
    alice.send(wire.UP, up(1))
    await road.until(lambda: alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP, ClientID=1, Code=Code.OK))
    (record,) = await on_the_bus(road)
    assert (record.from_user, record.device_id, record.client_id) == ("alice", 1, 1)
    assert (record.conversation_id, record.to_user, record.body) == (CONVERSATION, "bob", b"hello")
    assert (record.client_msg_id, record.trace_id) == (KEY, b"t" * 16)


async def sent(road: Road) -> tuple[Peer, Peer]:
    """Alice and bob are there, and a message of hers is on the bus."""
    alice, bob = await road.enter("alice", 1), await road.enter("bob", 2)
    alice.send(wire.UP, up())
    await road.until(lambda: alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP, Code=Code.OK))
    return alice, bob


async def test_hop_3_msg_gives_a_record_its_place_once(road: Road) -> None:
    alice, _ = await sent(road)
    (decision,) = await road.messages.decide()
    assert (decision.outcome.code, decision.outcome.seq, decision.outcome.prev_seq) == (Code.OK, 1, 0)
    assert set(decision.members) == {"alice", "bob"}
    alice.send(wire.UP, up())  # the same again, as after a lost ACK
    await road.until(lambda: len(alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP, Code=Code.OK)) == 2)
    (again,) = await road.messages.decide()
    assert again.repeated
    assert again.outcome == decision.outcome
    assert len(road.messages.rows) == 1


async def test_hop_4_the_fan_out_finds_devices_by_their_routes(road: Road) -> None:
    alice, bob = await sent(road)
    ((shard, part),) = await road.messages.fan_out(await road.messages.decide())
    assert shard == SHARD
    kinds = {e.conn_id: wire.MsgCmd.FromString(part.payloads[e.payload].frame).Type for e in part.entries}
    assert kinds == {bob.conn_id: wire.PUSH, alice.conn_id: wire.RECEIPT}


def push_of(peer: Peer) -> list[wire.MsgCmd]:
    return [cmd for cmd in peer.got if cmd.Type == wire.PUSH]


async def test_hop_5_state_numbers_the_push_and_stops_repeating_at_its_ack(road: Road) -> None:
    _, bob = await sent(road)
    await road.messages.fan_out(await road.messages.decide())
    (cmd,) = await road.until(lambda: push_of(bob))
    assert cmd.run > 0
    assert cmd.push_no >= 1
    repeats = road.state.shard.repeats
    assert repeats.due_of(bob.conn_id) is not None
    bob.send(wire.ACK, wire.ACKMsg(Type=wire.PUSH, run=cmd.run, push_no=cmd.push_no))
    await road.until(lambda: repeats.due_of(bob.conn_id) is None)


async def test_hop_6_the_gateway_frames_one_shared_payload_for_each_socket(road: Road) -> None:
    alice, bob = await sent(road)
    second = await road.enter("bob", 3)
    await road.messages.fan_out(await road.messages.decide())
    await road.until(lambda: push_of(bob) and push_of(second) and alice.find(wire.RECEIPT, wire.ReceiptMsg))
    assert push_of(bob)[0].Payload == push_of(second)[0].Payload


async def test_all_six_hops_carry_a_dialogue(road: Road) -> None:
    alice, bob = await road.enter("alice", 1), await road.enter("bob", 2)
    for n in range(1, 4):
        alice.send(wire.UP, up(n, b"%d" % n, bytes([n]) * 16))
    await road.until(lambda: len(alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP, Code=Code.OK)) == 3)
    await road.messages.fan_out(await road.messages.decide())
    pushes: list[Any] = await road.until(lambda: len(f := bob.find(wire.PUSH, wire.PushMsg)) >= 3 and f)
    assert [(p.Content, p.seq, p.prev_seq) for p in pushes[:3]] == [(b"1", 1, 0), (b"2", 2, 1), (b"3", 3, 2)]
    receipts = await road.until(lambda: len(f := alice.find(wire.RECEIPT, wire.ReceiptMsg)) >= 3 and f)
    assert [(r.client_id, r.seq, r.code) for r in receipts[:3]] == [(1, 1, 0), (2, 2, 0), (3, 3, 0)]


async def test_a_draining_gateway_names_its_connections_and_state_tells_each_where_to_go(road: Road) -> None:
    def gateway(worker_id: int, state: str = "serving", zone: str = "") -> Gateway:
        ip = f"10.0.0.{worker_id}"
        return Gateway(f"uid-{worker_id}", worker_id, 1, (SHARD,), ip, 8900, 8901, f"{ip}:8909", state, zone)

    there = {"edge-1": gateway(1, zone="b"), "edge-2": gateway(2, zone="a"), "edge-3": gateway(3, "draining", "a")}
    record = road.topology.current()
    gateways = {"edge-0": gateway(GATEWAY, "draining", "a"), **there}
    road.topology.set(replace(record, epoch=record.epoch + 1, gateways=gateways))
    alice = await road.enter("alice", 1)
    stranger = road.gateway.connect()
    road.peers.append(stranger)
    assert road.gateway.stream is not None
    await road.until(lambda: stranger.conn_id in road.state.shard.connections)
    assert road.gateway.stream.redirect([alice.conn_id, stranger.conn_id])
    (redirect,) = await road.until(lambda: alice.find(wire.REDIRECT, wire.RedirectMsg))
    assert [(g.name, g.ip, g.port, g.ws_port, g.zone) for g in redirect.gateways] == [
        ("edge-2", "10.0.0.2", 8900, 8901, "a"),
        ("edge-1", "10.0.0.1", 8900, 8901, "b"),
    ], "its own zone first, and none that drains"
    (error,) = await road.until(lambda: stranger.find(wire.ERROR, wire.ErrorMsg))
    assert error.code == Code.GATEWAY_CLOSING
    await road.until(lambda: stranger.conn_id not in road.gateway.sockets.fd_of)
    alice.send(wire.UP, up())
    await road.until(lambda: alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP, Code=Code.OK))
    assert alice.conn_id in road.gateway.sockets.fd_of, "it stays until its client has gone over"
