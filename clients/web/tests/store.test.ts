// The store on real transactions: whole or not at all, in order, and what a reader gets of it.
import "fake-indexeddb/auto";
import { expect, test } from "vitest";
import { utf8 } from "../src/core/bytes";
import { MsgType, changeOf, operationBody } from "../src/core/content";
import { type Row, noEffects, noWrites } from "../src/core/model";
import { Thread } from "../src/core/inbox";
import { Store } from "../src/edge/store";
import { Writer } from "../src/edge/writer";

let names = 0;
const fresh = (): string => `plato:test ${++names}`;
const row = (seq: number, more: Partial<Row> = {}): Row => ({
  conversationId: "c", seq, prevSeq: seq - 1, msgId: String(seq), fromUser: "bob", msgType: 0, body: utf8(`text ${seq}`), clientMsgId: "", serverAtMs: 1, changedSeq: 0, recalled: false, ...more,
});
const entry = (clientId: number) => ({ conversationId: "c", clientId, clientMsgId: `k${clientId}`, toUser: "", msgType: 0, body: utf8("x"), madeAtMs: 1, accepted: false });

test("what was written is there after a new start, with the device's id of the first", async () => {
  const name = fresh();
  const store = await Store.open(name, "11");
  const writes = noWrites();
  writes.rows.push(row(1), row(2));
  const thread = new Thread("c");
  thread.cursor = 2;
  writes.places.set("c", thread.place(4));
  writes.queued.set("k3", entry(3));
  writes.queued.set("k2", entry(2));
  writes.meta.set("session", "9 abcd");
  writes.meta.set("stateVersion", "7");
  await store.apply(writes);
  store.close();
  const { snapshot } = await Store.open(name, "22");
  expect(snapshot.deviceId).toBe("11");
  expect(snapshot.session).toEqual({ connId: "9", secret: "abcd" });
  expect(snapshot.stateVersion).toBe(7n);
  expect(snapshot.places.map((p) => [p.cursor, p.nextClientId])).toEqual([[2, 4]]);
  expect(snapshot.outbox.map((e) => e.clientId)).toEqual([2, 3]);
});

test("a write that fails leaves nothing behind", async () => {
  const store = await Store.open(fresh(), "1");
  const writes = noWrites();
  writes.rows.push(row(1), { ...row(2), body: (() => 0) as never }); // cannot be stored
  await expect(store.apply(writes)).rejects.toThrow();
  expect(await store.since("c", 0)).toEqual([]);
});

test("an edit changes its row in the same transaction; an older copy does not take it back", async () => {
  const store = await Store.open(fresh(), "1");
  const writes = noWrites();
  writes.rows.push(row(1), row(2));
  writes.changes.push({ conversationId: "c", msgId: "1", seq: 1, bySeq: 2, recalled: false, msgType: 0, body: utf8("new") });
  writes.changes.push({ conversationId: "c", msgId: "99", seq: 99, bySeq: 2, recalled: true, msgType: 0, body: utf8("") });
  await store.apply(writes);
  const again = noWrites();
  again.rows.push(row(1));
  await store.apply(again);
  const [first] = await store.since("c", 0);
  expect([new TextDecoder().decode(first!.body), first!.changedSeq]).toEqual(["new", 2]);
});

test("a message that was edited and recalled is the same in every order of arrival, and so are its edits", async () => {
  const operation = (msgType: number, text: string): Uint8Array => operationBody({ msgId: 1n, seq: 1n, msgType, body: utf8(text) });
  const edit = row(2, { msgType: MsgType.EDIT, body: operation(0, "second") });
  const other = row(3, { msgType: MsgType.EDIT, body: operationBody({ msgId: 77n, seq: 9n, body: utf8("of another") }) });
  const recall = row(4, { msgType: MsgType.RECALL, body: operation(0, "") });
  const gone = { body: new Uint8Array(), changedSeq: 4, recalled: true };
  const steps = [
    { rows: [row(1, { body: utf8("second"), changedSeq: 2 })] },
    { rows: [row(1, gone), row(2, { ...gone, msgType: MsgType.EDIT })] },
    { rows: [edit], changes: [changeOf(edit)!] },
    { rows: [recall], changes: [changeOf(recall)!] },
  ];
  const orders = (left: typeof steps): (typeof steps)[] =>
    left.length === 0 ? [[]] : left.flatMap((s) => orders(left.filter((o) => o !== s)).map((rest) => [s, ...rest]));
  for (const order of orders(steps)) {
    const store = await Store.open(fresh(), "1");
    for (const more of [{ rows: [row(1), other] }, ...order]) await store.apply({ ...noWrites(), ...more });
    expect(await store.since("c", 0)).toEqual([row(1, gone), row(2, { ...gone, msgType: MsgType.EDIT }), other, recall]);
    store.close();
  }
});

test("history, unread, hidden, refused, search", async () => {
  const store = await Store.open(fresh(), "1");
  const writes = noWrites();
  for (let seq = 1; seq <= 30; seq++) writes.rows.push(row(seq, { fromUser: seq % 3 === 0 ? "me" : "bob", msgType: seq === 29 ? 1005 : 0 }));
  writes.rows.push(row(1, { conversationId: "d" }));
  writes.hidden.push({ conversationId: "c", seq: 28 });
  writes.refused.push({ entry: entry(1), code: 436, detail: "" });
  await store.apply(writes);
  expect((await store.history("c", 10, 3)).map((r) => r.seq)).toEqual([7, 8, 9]);
  const hidden = await store.hidden("c");
  expect([...hidden]).toEqual([28]);
  expect(await store.unread("c", 24, "me", hidden, 100)).toBe(2); // 25, 26: 27 and 30 are own, 28 hidden, 29 an operation
  expect(await store.unread("c", 0, "me", hidden, 5)).toBe(5);
  expect((await store.refused("c")).map((r) => r.code)).toEqual([436]);
  expect(await store.refused("d")).toEqual([]);
  expect((await store.search((r) => new TextDecoder().decode(r.body).endsWith("text 7"), 10, 1_000)).map((r) => r.seq)).toEqual([7]);
  expect((await store.byMsgId("12"))?.seq).toBe(12);
});

test("the writer releases only what is durable, in order, and repeats what fails", async () => {
  const log: string[] = [];
  let failures = 1;
  const writer = new Writer(
    async (writes) => {
      if (failures-- > 0) throw new Error("full");
      log.push(`write ${[...writes.meta.keys()].join(" ")}`);
    },
    (effects) => log.push(`release ${effects.linkNo}`),
    (error) => log.push(error === null ? "works" : "fails"),
  );
  for (let n = 1; n <= 3; n++) {
    const effects = noEffects();
    effects.linkNo = n;
    if (n !== 2) effects.writes.meta.set(`m${n}`, "x");
    writer.put(effects);
  }
  await writer.drained();
  expect(log).toEqual(["fails", "write m1 m3", "works", "release 1", "release 2", "release 3"]);
});
