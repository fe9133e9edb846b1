// Rules of the core, one by one, and the wire against the page that specifies it.
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { fromHex, hex, utf8 } from "../src/core/bytes";
import { Action, Code, action } from "../src/core/codes";
import { MsgType, changeOf, changedRow, operationBody, richOf, saidBody } from "../src/core/content";
import { dialogueId, groupId, isName } from "../src/core/conversations";
import { Inbox, Thread } from "../src/core/inbox";
import { type Row, type Snapshot, noEffects } from "../src/core/model";
import { addressOf } from "../src/core/moving";
import { PushLine } from "../src/core/numbers";
import { Outbox } from "../src/core/outbox";
import { Machine } from "../src/core/session";
import { sha256 } from "../src/core/sha256";
import { Timing } from "../src/core/timing";
import * as wire from "../src/core/wire";
import { addresses, subject } from "../src/edge/access";
import { codeOf } from "../src/edge/links";
import { ACKMsgSchema, CmdType, KickMsgSchema, MsgCmdSchema, PullMsgSchema, PulledMsgSchema, PushMsgSchema, ReadMsgSchema, ReceiptMsgSchema, StateMsgSchema, SyncMsgSchema, SyncedMsgSchema, UPMsgSchema } from "../src/wire/client_pb";

const never = (): number => 0;
const protocol = readFileSync(new URL("../../../docs/protocol.md", import.meta.url), "utf8");

/** The payload of a frame in §11, by its first words; without the length of TCP. */
function specified(title: string): string {
  const block = protocol.split(`\n${title}`)[1]!.split(/\n[<>`]/)[0]!;
  return block.split("\n").slice(1).join("").replaceAll(" ", "").slice(8);
}

const row = (seq: number, prevSeq: number, more: Partial<Row> = {}): Row => ({
  conversationId: "c", seq, prevSeq, msgId: String(seq), fromUser: "bob", msgType: 0, body: utf8(`${seq}`), clientMsgId: "", serverAtMs: 1, changedSeq: 0, recalled: false, ...more,
});

test("codes are those of the page, and their range says what to do", () => {
  const table = [...protocol.matchAll(/^\| (\d+) \| ([A-Z_]+) \| (none|retry|reconnect|log in|stop) \|/gm)];
  expect(table.length).toBeGreaterThan(40);
  const acts = { none: Action.NONE, retry: Action.RETRY, reconnect: Action.RECONNECT, "log in": Action.LOGIN, stop: Action.STOP };
  for (const [, number, , act] of table) expect(action(Number(number)), number).toBe(acts[act as keyof typeof acts]);
  for (const [name, number] of Object.entries(Code)) expect(table.some(([, n, other]) => Number(n) === number && other === name), name).toBe(true);
  expect(action(9_999)).toBe(Action.STOP);
});

test("frames are, byte for byte, those of the page", () => {
  const entry = {
    conversationId: dialogueId("alice", "bob"), clientId: 1, clientMsgId: "101112131415161718191a1b1c1d1e1f", toUser: "bob", msgType: 0, body: utf8("hi"), madeAtMs: 0, accepted: false,
  };
  const up = fromBinary(UPMsgSchema, wire.openCmd(wire.up(entry, 0)).Payload);
  const page = fromBinary(UPMsgSchema, fromBinary(MsgCmdSchema, fromHex(specified("> UP"))).Payload);
  expect({ ...up, traceId: null }).toEqual({ ...page, traceId: null }); // ours names the trace too
  expect(hex(wire.pushAck(7n, 2))).toBe(specified("> ACK: both stored"));
  expect(hex(wire.heartbeat(7n, 2))).toBe(specified("> HEARTBEAT"));
  const sync = fromBinary(SyncMsgSchema, wire.openCmd(wire.sync(1, { afterId: "", uptoId: "", cursors: [] }, null)).Payload);
  expect(sync.ref).toBe(1n);
  expect(hex(wire.sync(1, { afterId: "", uptoId: "", cursors: [] }, null))).toBe(specified("> SYNC, ref 1"));
});

test("names: SHA-256, dialogues, groups, what is a name", () => {
  expect(hex(sha256(utf8("abc")))).toBe("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  expect(hex(sha256(utf8("x".repeat(200))))).toBe("aa20c23e3201834050679e1d88941b9a6fed0557c9a705cb2c315e2e63fd486d");
  expect(dialogueId("bob", "alice")).toBe("d:f_LZyNCkMEbVJwHRBGZW2iUkiDynF9mrmBwqGtF8Zew");
  expect(groupId("alice", fromHex("00".repeat(16)))).toMatch(/^g:[\w-]{43}$/);
  for (const good of ["a", "ж".repeat(32), "\u{1F600}"]) expect(isName(good)).toBe(true);
  for (const bad of ["", "ж".repeat(33), "a\nb", "\ud800"]) expect(isName(bad)).toBe(false);
});

test("the inbox shows rows in order and once; a hole is passed only by a row or page that says so", () => {
  const inbox = new Inbox([], 0);
  const t = inbox.get("c");
  expect(inbox.offer(t, row(1, 0)).map((r) => r.seq)).toEqual([1]);
  expect(inbox.offer(t, row(9, 4))).toEqual([]); // early
  expect(t.behind).toBe(true);
  expect(inbox.offer(t, row(1, 0))).toEqual([]); // seen
  const [rows, moved] = inbox.page(t, [row(3, 1), row(4, 3)], 2, 4, 9);
  expect([rows.map((r) => r.seq), moved, t.cursor, t.behind]).toEqual([[3, 4, 9], true, 9, false]);
  expect(inbox.page(t, [row(20, 12)], 12, 20, 20)).toEqual([[], false]); // begins beyond the cursor
});

test("a conversation that is new and long begins at its end", () => {
  const inbox = new Inbox([], 300);
  const t = inbox.get("c");
  inbox.hint(t, 1_000);
  inbox.place(t, 0);
  expect([t.cursor, t.floor]).toEqual([700, 700]);
  const short = inbox.get("d");
  inbox.hint(short, 200);
  inbox.place(short, 10);
  expect([short.cursor, short.floor]).toEqual([10, 10]);
});

test("numbers: nothing behind a loss is acknowledged before the Sync that heals it", () => {
  const line = new PushLine();
  line.adopt(5n, 0);
  expect([line.arrive(5n, 1), line.acknowledgement()]).toEqual(["next", [5n, 1]]);
  expect(line.arrive(5n, 4)).toBe("jump");
  expect(line.acknowledgement()).toBeNull();
  line.synced(["c"]);
  expect(line.acknowledgement()).toBeNull(); // its gap is not pulled yet
  line.release("c");
  expect(line.acknowledgement()).toEqual([5n, 4]);
  expect(line.arrive(4n, 9)).toBe("stale");
  expect([line.arrive(5n, 4), line.acknowledgement()]).toEqual(["repeat", [5n, 4]]);
  expect([line.arrive(6n, 3), line.acknowledgement()]).toEqual(["jump", null]);
});

test("the outbox: in order, never re-numbered; EXPECTED goes back, BUSY waits, a commit sends all again", () => {
  const outbox = new Outbox([], [["c", 5]], new Timing(), never);
  for (let n = 0; n < 3; n++) outbox.add("c", `k${n}`, "", 0, utf8("x"), 0);
  const sent = (at: number) => outbox.takeReady(at).map(([e, acked]) => [e.clientId, acked]);
  expect(sent(0)).toEqual([[5, 4], [6, 4], [7, 4]]);
  expect(outbox.answer("c", 7, Code.EXPECTED, 5, 1)).toBe("nothing");
  expect(sent(1)).toEqual([[5, 4]]); // alone, until it is answered
  expect(outbox.answer("c", 5, Code.BUSY, 0, 2)).toBe("nothing");
  expect(sent(100)).toEqual([]);
  expect(sent(300)).toEqual([[5, 4]]);
  expect(outbox.answer("c", 5, Code.OK, 0, 301)).toBe("accepted");
  expect(sent(302)).toEqual([[6, 4], [7, 4]]);
  expect(outbox.settle("k0")?.clientId).toBe(5);
  outbox.rewindAll();
  expect(sent(400)).toEqual([[6, 5], [7, 5]]);
  expect(outbox.answer("c", 6, Code.NOT_WELCOME, 0, 401)).toBe("refused");
  outbox.settle("k1"); // as the caller does
  expect(outbox.answer("c", 7, Code.TOO_FAST, 0, 402, 5_000)).toBe("nothing");
  expect(sent(5_000)).toEqual([]);
  expect(sent(5_402)).toEqual([[7, 6]]);
  for (const at of [7_403, 11_404]) [outbox.expire(at), sent(at)];
  expect(outbox.expire(60_000)).toBe(false); // the third time unanswered: the connection is dead
});

function snapshot(more: Partial<Snapshot> = {}): Snapshot {
  return { deviceId: "7", user: "alice", session: null, gateways: [], lastGateway: null, stateVersion: 0n, places: [], outbox: [], friends: [], ...more };
}

function frame(type: CmdType, schema: Parameters<typeof create>[0], init: object, run = 0n, pushNo = 0n): Uint8Array {
  const Payload = toBinary(schema, create(schema, init as never));
  return toBinary(MsgCmdSchema, create(MsgCmdSchema, { Type: type, Payload, run, pushNo }));
}

const kinds = (frames: Uint8Array[]): CmdType[] => frames.map((f) => wire.openCmd(f).Type);

/** A machine whose first Sync was answered. */
function online(more: Partial<Snapshot> = {}): Machine {
  const machine = new Machine(snapshot(more), { gateways: ["ws://127.0.0.1:1/ws"], listing: false, chance: never, platform: "test", tail: 0 });
  machine.start(0);
  expect(machine.take(0).wantToken).toBe(true);
  machine.tokened("t", 1);
  expect(machine.take(1).connects).toEqual([{ linkNo: 1, address: "ws://127.0.0.1:1/ws" }]);
  expect(machine.opened(1, 2)).toBe(true);
  expect(kinds(machine.take(2).frames)).toEqual([CmdType.LOGIN]);
  machine.frames(1, [frame(CmdType.ACK, ACKMsgSchema, { Type: CmdType.LOGIN, ConnID: 9n, secret: utf8("s"), userId: "alice", heartbeatMs: 30_000 })], 3);
  expect(kinds(machine.take(3).frames)).toEqual([CmdType.SYNC]);
  machine.frames(1, [frame(CmdType.ACK, ACKMsgSchema, { Type: CmdType.SYNC, ref: 1n, run: 3n })], 4);
  const effects = machine.take(4);
  expect(effects.writes.meta.get("session")).toBe("9 73");
  machine.frames(1, [frame(CmdType.SYNCED, SyncedMsgSchema, { ref: 1n })], 5);
  machine.take(5);
  return machine;
}

test("read positions are repeated until the platform says what stands, and end no connection", () => {
  const machine = online();
  machine.traffic.pushed(create(PushMsgSchema, { conversationId: "c", seq: 4n, fromUser: "bob", MsgID: 1n }), false, 6);
  machine.traffic.markRead("c", 4);
  const first = machine.take(6);
  expect(first.writes.places.get("c")?.readWanted).toBe(4);
  expect(kinds(first.frames)).toContain(CmdType.READ);
  for (const at of [3_000, 9_000, 20_000, 29_000]) {
    machine.tick(at);
    const again = machine.take(at).frames.filter((f) => wire.openCmd(f).Type === CmdType.READ);
    expect(again.length, `${at}`).toBeLessThanOrEqual(1);
  }
  expect(machine.state.phase).toBe("online");
  const ref = fromBinary(ReadMsgSchema, wire.openCmd(first.frames.find((f) => wire.openCmd(f).Type === CmdType.READ)!).Payload).ref;
  machine.frames(1, [frame(CmdType.ACK, ACKMsgSchema, { Type: CmdType.READ, ref, expected: 3n })], 29_500);
  const place = machine.take(29_500).writes.places.get("c")!;
  expect([place.readSeq, place.readWanted]).toEqual([3, 0]);
});

test("a STATE that does not follow ours is not believed: a Sync asks for what was missed", () => {
  const machine = online();
  const state = (version: bigint, prevVersion: bigint, pinnedAtMs: bigint) => ({ version, prevVersion, conversations: [{ conversationId: "c", pinnedAtMs }] });
  machine.frames(1, [frame(CmdType.STATE, StateMsgSchema, state(1n, 0n, 5n), 3n, 1n)], 6);
  const applied = machine.take(6);
  expect(applied.writes.places.get("c")?.pinnedAtMs).toBe(5);
  expect(applied.writes.meta.get("stateVersion")).toBe("1");
  expect(kinds(applied.frames)).toEqual([CmdType.ACK]);
  machine.frames(1, [frame(CmdType.STATE, StateMsgSchema, state(3n, 2n, 7n), 3n, 2n)], 7);
  const asked = machine.take(7);
  expect(asked.writes.places.get("c")).toBeUndefined();
  expect(kinds(asked.frames)).toEqual([CmdType.SYNC]); // and no ACK before it is answered
  const sync = fromBinary(SyncMsgSchema, wire.openCmd(asked.frames[0]!).Payload);
  expect([sync.wantState, sync.stateVersion]).toEqual([true, 1n]);
  machine.frames(1, [frame(CmdType.SYNCED, SyncedMsgSchema, { ref: sync.ref, state: state(3n, 0n, 7n) })], 8);
  const healed = machine.take(8);
  expect(healed.writes.places.get("c")?.pinnedAtMs).toBe(7);
  expect(kinds(healed.frames)).toEqual([CmdType.ACK]);
});

test("a loss that shows while a Sync runs begins another one after it", () => {
  const machine = online();
  const push = (seq: bigint, run: bigint, no: bigint) => frame(CmdType.PUSH, PushMsgSchema, { conversationId: "c", seq, prevSeq: seq - 1n, MsgID: seq, fromUser: "bob" }, run, no);
  machine.frames(1, [push(1n, 3n, 3n)], 6);
  const [first] = machine.take(6).frames;
  machine.frames(1, [push(2n, 3n, 7n)], 7);
  machine.take(7);
  machine.frames(1, [frame(CmdType.SYNCED, SyncedMsgSchema, { ref: fromBinary(SyncMsgSchema, wire.openCmd(first!).Payload).ref })], 8);
  expect(kinds(machine.take(8).frames)).toEqual([CmdType.SYNC]);
});

test("whom a dialogue is with is asked where only own rows came", () => {
  const machine = online();
  const id = dialogueId("alice", "bob");
  const own = { conversationId: id, seq: 1n, MsgID: 1n, fromUser: "alice" };
  machine.frames(1, [frame(CmdType.PUSH, PushMsgSchema, own, 3n, 1n)], 6);
  const asked = machine.take(6).frames.find((f) => wire.openCmd(f).Type === CmdType.SYNC)!;
  const sync = fromBinary(SyncMsgSchema, wire.openCmd(asked).Payload);
  expect(sync.cursors).toMatchObject([{ conversationId: id, seq: 0n }]); // one too low: it is listed though nothing is newer
  machine.frames(1, [frame(CmdType.SYNCED, SyncedMsgSchema, { ref: sync.ref, items: [{ conversationId: id, newestSeq: 1n, peer: "bob" }] })], 7);
  expect(machine.take(7).writes.places.get(id)?.peer).toBe("bob");
  machine.frames(1, [frame(CmdType.PUSH, PushMsgSchema, { ...own, seq: 2n, prevSeq: 1n, MsgID: 2n }, 3n, 2n)], 8);
  expect(kinds(machine.take(8).frames)).not.toContain(CmdType.SYNC);
});

const group = groupId("alice", fromHex("00".repeat(16)));
const operation = (seq: bigint, msgType: number, init: Parameters<typeof operationBody>[0], fromUser = "bob") => ({
  conversationId: group, seq, prevSeq: seq - 1n, MsgID: seq, fromUser, msgType, Content: operationBody(init),
});
const asksSync = (frames: Uint8Array[]) => frames.find((f) => wire.openCmd(f).Type === CmdType.SYNC);

test("what a Sync told of a group is not changed again by operations that are in it, nor by a Sync that is older than those", () => {
  const machine = online();
  const place = () => machine.traffic.inbox.get(group);
  const told = (ref: bigint, newestSeq: bigint, members: number, title: string) =>
    machine.traffic.synced(create(SyncedMsgSchema, { ref, items: [{ conversationId: group, newestSeq, members, title }] }), { kind: CmdType.SYNC, ref: Number(ref) } as never, 6);
  machine.traffic.startSync(6);
  told(2n, 3n, 3, "three");
  for (const [seq, type, init] of [[1n, MsgType.GROUP_CREATE, { title: "one", users: ["alice", "bob"] }], [2n, MsgType.GROUP_ADD, { users: ["cid"] }], [3n, MsgType.GROUP_RENAME, { title: "three" }]] as const)
    machine.traffic.pushed(create(PushMsgSchema, operation(seq, type, init as never)), false, 7);
  expect([place().members, place().title]).toEqual([3, "three"]);
  machine.traffic.pushed(create(PushMsgSchema, operation(4n, MsgType.GROUP_RENAME, { title: "four" })), false, 8);
  machine.traffic.startSync(8);
  told(3n, 3n, 3, "three");
  expect(place().title).toBe("four");
});

test("who is added to a group again asks what it is like now", () => {
  const machine = online();
  machine.frames(1, [frame(CmdType.PUSH, PushMsgSchema, operation(1n, MsgType.GROUP_CREATE, { title: "old", users: ["alice", "bob"] }), 3n, 1n)], 6);
  machine.frames(1, [frame(CmdType.PUSH, PushMsgSchema, operation(2n, MsgType.GROUP_REMOVE, { users: ["alice"] }), 3n, 2n)], 6);
  expect(asksSync(machine.take(6).frames)).toBeUndefined();
  expect(machine.traffic.inbox.get(group).left).toBe(true);
  machine.frames(1, [frame(CmdType.PUSH, PushMsgSchema, { ...operation(9n, MsgType.GROUP_ADD, { users: ["alice"] }), prevSeq: 2n }, 3n, 3n)], 7);
  const sync = fromBinary(SyncMsgSchema, wire.openCmd(asksSync(machine.take(7).frames)!).Payload);
  expect(sync.cursors).toMatchObject([{ conversationId: group, seq: 8n }]);
  machine.frames(1, [frame(CmdType.SYNCED, SyncedMsgSchema, { ref: sync.ref, items: [{ conversationId: group, newestSeq: 9n, title: "new", members: 2 }] })], 8);
  expect(machine.take(8).writes.places.get(group)).toMatchObject({ title: "new", members: 2, left: false });
});

test("an own operation whose row will not come is settled by its receipt", () => {
  for (const refused of [true, false]) {
    const machine = online();
    machine.frames(1, [frame(CmdType.PUSH, PushMsgSchema, operation(1n, MsgType.GROUP_CREATE, { title: "g", users: ["alice", "bob"] }), 3n, 1n)], 6);
    const key = "ab".repeat(16);
    machine.send(group, key, "", MsgType.GROUP_LEAVE, operationBody({}), 6);
    machine.take(6);
    const receipt = { clientMsgId: fromHex(key), conversationId: group, seq: 5n, prevSeq: 4n, msgId: 77n };
    machine.frames(1, [frame(CmdType.RECEIPT, ReceiptMsgSchema, receipt, 3n, 2n)], 7);
    const pulls = machine.take(7).frames.filter((f) => wire.openCmd(f).Type === CmdType.PULL);
    const ref = fromBinary(PullMsgSchema, wire.openCmd(pulls[0]!).Payload).ref;
    expect(machine.traffic.outbox.entries(group).length).toBe(1);
    const answer = refused ? { ref, code: Code.NOT_A_MEMBER, conversationId: group } : { ref, conversationId: group, coveredFrom: 2n, coveredTo: 5n, newestSeq: 5n };
    machine.frames(1, [frame(CmdType.PULLED, PulledMsgSchema, answer)], 8);
    expect(machine.take(8).notices, `${refused}`).toContainEqual({ kind: "settled", conversationId: group, clientMsgId: key, msgId: "77", seq: 5 });
    expect(machine.traffic.outbox.entries(group)).toEqual([]);
  }
});

test("REPLACED stops for good; the session is forgotten", () => {
  const machine = online();
  machine.frames(1, [frame(CmdType.KICK, KickMsgSchema, { code: Code.REPLACED })], 6);
  const effects = machine.take(6);
  expect([machine.state.phase, machine.state.code, effects.writes.meta.get("session"), machine.deadlineMs()]).toEqual(["stopped", Code.REPLACED, "", null]);
});

test("a lost connection is resumed with the secret, through any gateway", () => {
  const machine = online();
  machine.closed(1, 10);
  expect(machine.take(10).notices).toContainEqual({ kind: "state", state: expect.objectContaining({ phase: "offline" }) });
  machine.tick(machine.deadlineMs()!);
  const [attempt] = machine.take(20).connects;
  machine.opened(attempt!.linkNo, 21);
  expect(kinds(machine.take(21).frames)).toEqual([CmdType.RECONN]);
});

test("edits and recalls change the older row, once, whichever comes last", () => {
  const old = row(3, 2);
  const edit = row(5, 4, { msgType: MsgType.EDIT, body: operationBody({ msgId: 3n, seq: 3n, msgType: 0, body: utf8("new") }) });
  const recall = row(6, 5, { msgType: MsgType.RECALL, body: operationBody({ msgId: 3n, seq: 3n }) });
  const edited = changedRow(old, changeOf(edit)!);
  expect([richOf(0, edited.body)?.text, edited.changedSeq]).toEqual(["new", 5]);
  const gone = changedRow(edited, changeOf(recall)!);
  expect([gone.recalled, gone.body.length]).toEqual([true, 0]);
  expect(changedRow(gone, changeOf(edit)!)).toBe(gone);
  expect(changeOf(row(7, 6))).toBeNull();
});

test("plain words are sent as text, all else as rich", () => {
  expect(saidBody({ text: "hi" })).toEqual([MsgType.TEXT, utf8("hi")]);
  const [type, body] = saidBody({ text: "hi", reply: { msgId: 1n, text: "x" } });
  expect([type, richOf(type, body)?.reply?.text]).toEqual([MsgType.RICH, "x"]);
  expect(richOf(MsgType.RICH, utf8("\u00ff\u00ff"))).toBeNull();
  expect(richOf(77, utf8("x"))).toBeNull();
});

test("gateways, tokens and closes are read with care", () => {
  expect(addresses({ data: [{ ip: "10.0.0.1", ws_port: 8901 }, { ip: "::1", ws_port: 1 }, { ip: 3 }, null, { ip: "x", ws_port: 0 }] }, false)).toEqual(["ws://10.0.0.1:8901/ws", "ws://[::1]:1/ws"]);
  expect(addresses("nonsense", false)).toEqual([]);
  expect(addressOf("h", 5, true)).toBe("wss://h:5/ws");
  expect(subject(`x.${btoa('{"sub":"alice"}')}.y`)).toBe("alice");
  expect(subject("nonsense")).toBeNull();
  expect([codeOf(1006), codeOf(4204), codeOf(1009), codeOf(1003)]).toEqual([null, 204, Code.FRAME_SIZE, Code.MALFORMED]);
});

test("an effect is a fresh one each time", () => {
  expect(noEffects().frames).not.toBe(noEffects().frames);
  expect(new Thread("c").place(1)).not.toHaveProperty("early");
});
