// Random histories: frames lost, late, doubled, out of order; sockets cut; the client killed between any two writes; runs
// begun anew; redirects. Whatever happened, in the end each message is stored once, in order, and each sent one took effect once.
import { expect, test } from "vitest";
import { Machine } from "../src/core/session";
import { type Effects, type Place, type Row, type Snapshot, type Writes } from "../src/core/model";
import { Platform, chanceOf } from "./platform";

const ME = "alice";

/** What survives a crash. It complains about what no store should be told. */
class Disk {
  rows: Row[] = [];
  places = new Map<string, Place>();
  outbox = new Map<string, Writes["queued"] extends Map<string, infer E> ? E : never>();
  meta = new Map<string, string>();

  apply(writes: Writes): void {
    for (const row of writes.rows) {
      const before = this.rows.filter((r) => r.conversationId === row.conversationId);
      const last = before[before.length - 1];
      expect(row.seq, `seq ${row.seq} of ${row.conversationId} after ${last?.seq}`).toBeGreaterThan(last?.seq ?? 0);
      this.rows.push(row);
    }
    writes.places.forEach((p, id) => this.places.set(id, structuredClone(p)));
    writes.queued.forEach((e, key) => this.outbox.set(key, structuredClone(e)));
    for (const e of writes.unqueued) this.outbox.delete(e.clientMsgId);
    writes.meta.forEach((value, name) => this.meta.set(name, value));
  }

  snapshot(): Snapshot {
    const [connId, secret] = (this.meta.get("session") ?? "").split(" ");
    return {
      deviceId: "7",
      user: this.meta.get("user") ?? null,
      session: connId && secret !== undefined ? { connId, secret } : null,
      gateways: (this.meta.get("gateways") ?? "").split("\n").filter((a) => a !== ""),
      lastGateway: this.meta.get("lastGateway") ?? null,
      stateVersion: BigInt(this.meta.get("stateVersion") ?? "0"),
      places: [...this.places.values()].map((p) => structuredClone(p)),
      outbox: [...this.outbox.values()].sort((a, b) => a.clientId - b.clientId).map((e) => structuredClone(e)),
      friends: [],
    };
  }
}

class World {
  nowMs = 0;
  rough = true;
  disk = new Disk();
  platform: Platform;
  machine!: Machine;
  sent = new Map<string, string[]>(); // conversation → texts, in the order of their calls that became durable
  crashes = 0;
  private events: { atMs: number; no: number; act: () => void }[] = [];
  private eventNo = 0;
  private linkOf = new Map<number, number>(); // platform's connection → machine's link
  private connectionOf = new Map<number, number>();
  private first = 0;
  private second = 0;
  private nextConnection = 1;
  private keyNo = 1;
  private life = 0;

  constructor(readonly chance: () => number) {
    this.platform = new Platform(ME, chance, (connection, frame) => {
      const { no } = connection;
      if (this.rough && this.chance() < 0.04) return; // lost, while the socket stays
      this.after(this.chance() * 30, () => this.handIn(no, frame));
      if (this.rough && this.chance() < 0.03) this.after(this.chance() * 3_000, () => this.handIn(no, frame)); // doubled, and late
    });
    this.boot();
  }

  boot(): void {
    this.life += 1;
    this.machine = new Machine(this.disk.snapshot(), { gateways: ["ws://127.0.0.1:1/ws", "ws://127.0.0.1:2/ws"], listing: false, chance: this.chance, platform: "test", tail: 0 });
    this.machine.start(this.nowMs);
    this.round();
  }

  /** The process dies; what it had not written is gone. */
  crash(): void {
    this.crashes += 1;
    for (const no of [...this.platform.connections.keys()]) this.platform.close(no);
    this.linkOf.clear();
    this.connectionOf.clear();
    this.boot();
  }

  send(conversationId: string, text: string): void {
    const key = (this.keyNo++).toString(16).padStart(32, "0");
    this.machine.send(conversationId, key, "", 0, new TextEncoder().encode(text), this.nowMs);
    this.round();
    if (this.disk.outbox.has(key) || this.disk.rows.some((r) => r.clientMsgId === key)) this.sent.set(conversationId, [...(this.sent.get(conversationId) ?? []), text]);
  }

  cut(): void {
    const no = this.connectionOf.get(this.machine.linkNo);
    if (no === undefined) return;
    this.platform.close(no);
    this.drop(this.machine.linkNo);
    this.machine.closed(this.machine.linkNo, this.nowMs);
    this.round();
  }

  /** Runs until nothing is to be done before `untilMs`. */
  run(untilMs: number): void {
    for (let steps = 0; steps < 200_000; steps++) {
      this.events.sort((a, b) => a.atMs - b.atMs || a.no - b.no);
      const next = this.events[0];
      const due = this.machine.deadlineMs();
      const atMs = Math.min(next?.atMs ?? Infinity, due ?? Infinity);
      if (atMs > untilMs) {
        this.nowMs = untilMs;
        return;
      }
      this.nowMs = Math.max(this.nowMs, atMs);
      if (next && next.atMs <= this.nowMs) {
        this.events.shift();
        next.act();
      } else {
        this.machine.tick(this.nowMs);
        this.round();
      }
    }
    throw new Error("the client is busy for ever");
  }

  private after(delayMs: number, act: () => void): void {
    this.events.push({ atMs: this.nowMs + delayMs, no: this.eventNo++, act });
  }

  private handIn(connection: number, frame: Uint8Array): void {
    const link = this.linkOf.get(connection);
    if (link === undefined) return;
    this.machine.frames(link, [frame], this.nowMs);
    this.round();
  }

  private round(): void {
    const effects: Effects = this.machine.take(this.nowMs);
    if (this.rough && this.chance() < 0.004) return this.crash(); // before the write
    this.disk.apply(effects.writes);
    if (this.rough && this.chance() < 0.004) return this.crash(); // after it, before anything of it is sent
    if (effects.goOver) {
      this.drop(this.first);
      this.first = this.second;
    }
    for (const frame of effects.frames) if (effects.linkNo === this.first) this.up(this.first, frame);
    if (effects.close) this.drop(this.first);
    for (const link of effects.giveUp) this.drop(link);
    for (const { linkNo } of effects.connects) this.connect(linkNo, false);
    if (effects.secondClose) this.drop(this.second);
    if (effects.second) this.connect(effects.second.linkNo, true);
    for (const frame of effects.secondFrames) this.up(this.second, frame);
    if (effects.wantToken) this.after(5, this.alive(() => this.machine.tokened("token", this.nowMs)));
  }

  private alive(act: () => void): () => void {
    const life = this.life;
    return () => {
      if (life !== this.life) return;
      act();
      this.round();
    };
  }

  private connect(link: number, second: boolean): void {
    if (second) this.second = link;
    const fails = this.rough && this.chance() < 0.15;
    this.after(this.chance() * 50, this.alive(() => {
      if (fails) return this.machine.closed(link, this.nowMs);
      const no = this.nextConnection++;
      this.platform.open(no);
      this.linkOf.set(no, link);
      this.connectionOf.set(link, no);
      if (!this.machine.opened(link, this.nowMs)) this.drop(link);
      else if (!second) this.first = link;
    }));
  }

  private up(link: number, frame: Uint8Array): void {
    const no = this.connectionOf.get(link);
    if (no === undefined || (this.rough && this.chance() < 0.04)) return;
    this.after(this.chance() < 0.5 ? 5 : 5, () => this.platform.receive(no, frame));
  }

  private drop(link: number): void {
    const no = this.connectionOf.get(link);
    if (no === undefined) return;
    this.connectionOf.delete(link);
    this.linkOf.delete(no);
    this.platform.close(no);
  }
}

function live(seed: number): World {
  const chance = chanceOf(seed);
  const world = new World(chance);
  const ids = ["d:one", "g:two", "g:thr\u{1F600}ee", "g:four", "g:five"];
  for (let step = 0; step < 120; step++) {
    const id = ids[Math.floor(chance() * ids.length)]!;
    const what = chance();
    if (what < 0.45) world.platform.write(id, "bob", `from bob ${step}`);
    else if (what < 0.8) world.send(id, `mine ${step}`);
    else if (what < 0.86) world.cut();
    else if (what < 0.9) world.platform.newRun();
    else if (what < 0.94) world.platform.pin(id, step + 1);
    else if (what < 0.97) world.platform.redirect(1 + Math.floor(chance() * 3));
    else {
      world.machine.traffic.markRead(id, world.platform.newest(id));
    }
    world.run(world.nowMs + chance() * 1_500);
  }
  world.rough = false;
  world.run(world.nowMs + 400_000);
  return world;
}

const SEEDS = 60;

test.each(Array.from({ length: SEEDS }, (_, i) => i + 1))("history %i: each message once, in order", (seed) => {
  const world = live(seed);
  expect(world.machine.state.phase).toBe("online");
  expect(world.disk.outbox.size).toBe(0);
  for (const [id, stored] of world.platform.conversations) {
    const here = world.disk.rows.filter((r) => r.conversationId === id);
    expect(here.map((r) => [r.seq, r.prevSeq, r.fromUser, new TextDecoder().decode(r.body)])).toEqual(
      stored.map((r) => [r.seq, r.prevSeq, r.from, new TextDecoder().decode(r.body)]),
    );
    const mine = stored.filter((r) => r.from === ME);
    expect(mine.map((r) => new TextDecoder().decode(r.body)), `what was sent to ${id}`).toEqual(world.sent.get(id) ?? []);
    expect(mine.map((r) => r.clientId)).toEqual(mine.map((_, i) => i + 1));
    expect(world.disk.places.get(id)?.cursor).toBe(world.platform.newest(id));
    const pin = world.platform.pins.get(id);
    if (pin) expect(world.disk.places.get(id)?.pinnedAtMs).toBe(pin.atMs);
    expect(world.disk.places.get(id)?.readWanted ?? 0).toBe(0);
  }
  expect(BigInt(world.disk.meta.get("stateVersion") ?? "0")).toBe(world.platform.version);
});

test("the histories come upon what they are to try: crashes, resumes, moves", () => {
  const worlds = Array.from({ length: 12 }, (_, i) => live(i + 1));
  expect(worlds.reduce((sum, w) => sum + w.crashes, 0)).toBeGreaterThan(12);
  expect(worlds.reduce((sum, w) => sum + w.platform.resumes, 0)).toBeGreaterThan(40);
  expect(worlds.reduce((sum, w) => sum + w.machine.moves, 0)).toBeGreaterThan(0);
});
