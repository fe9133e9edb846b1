// STATEs, Syncs and their pages in any order, some lost, the platform set back: when all is quiet, this device's version is the
// platform's, and so is all that it holds.
import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";
import { Inbox } from "../src/core/inbox";
import { type Effects, noEffects } from "../src/core/model";
import { Shared } from "../src/core/shared";
import { Timing } from "../src/core/timing";
import { type StateMsg, StateMsgSchema, SyncedMsgSchema, type SyncedMsg } from "../src/wire/client_pb";
import { chanceOf } from "./platform";

type Value = { version: bigint; value: number };
type Base = { version: bigint; pins: Map<string, Value>; hidden: Map<number, Value>; friends: Map<string, Value> };
const NAMES = ["d:one", "d:two", "g:tea"];

class Line {
  platform: Base = { version: 0n, pins: new Map(), hidden: new Map(), friends: new Map() };
  kept: Base[] = [structuredClone(this.platform)]; // what the database may be set back to
  inbox = new Inbox([], 0);
  shared = new Shared(0n, [], this.inbox, new Timing(), () => 0.5);
  hidden = new Set<number>(); // as the disk holds it
  friends = new Map<string, string>();
  states: StateMsg[] = [];
  asked: { ref: bigint; named: bigint | null }[] = [];
  pages: SyncedMsg[] = [];
  lost = false; // numbers will show it
  anew = 0;
  private ref = 0;

  constructor(readonly chance: () => number) {
    this.ask();
  }

  below(n: number): number {
    return Math.floor(this.chance() * n);
  }

  written({ writes }: Effects): void {
    if (writes.forgotten) {
      this.anew += 1;
      this.hidden.clear();
      this.friends.clear();
    }
    for (const h of writes.hidden) this.hidden.add(h.seq);
    for (const f of writes.friends.values()) this.friends.set(f.user, f.words);
  }

  change(): void {
    const p = this.platform;
    const prevVersion = p.version++;
    const value = { version: p.version, value: 1 + this.below(9) };
    const kind = this.below(3);
    if (kind === 0) p.pins.set(NAMES[this.below(3)]!, value);
    else if (kind === 1) p.hidden.set(value.value, value);
    else p.friends.set("xyz"[this.below(3)]!, value);
    const what = this.newer(prevVersion, 9);
    this.states.push(create(StateMsgSchema, { ...what, prevVersion }));
    if (this.chance() < 0.1) this.kept.push(structuredClone(p));
  }

  newer(version: bigint, limit: number): StateMsg {
    const p = this.platform;
    const all = [
      ...[...p.pins].map(([conversationId, v]) => ({ v, conversations: [{ conversationId, pinnedAtMs: BigInt(v.value) }] })),
      ...[...p.hidden].map(([seq, v]) => ({ v, hidden: [{ conversationId: "c", seq: BigInt(seq) }] })),
      ...[...p.friends].map(([user, v]) => ({ v, friends: [{ user, words: `${v.value}` }] })),
    ].filter(({ v }) => v.version > version).sort((a, b) => Number(a.v.version - b.v.version));
    const more = all.length > limit;
    const page = all.slice(0, limit);
    return create(StateMsgSchema, {
      version: more ? page[page.length - 1]!.v.version : p.version,
      more,
      conversations: page.flatMap((e) => ("conversations" in e ? e.conversations : [])),
      hidden: page.flatMap((e) => ("hidden" in e ? e.hidden : [])),
      friends: page.flatMap((e) => ("friends" in e ? e.friends : [])),
    });
  }

  ask(most = 1): void {
    if (this.asked.length + this.pages.length >= most) return;
    this.ref += 1;
    this.asked.push({ ref: BigInt(this.ref), named: this.shared.ask(this.ref) });
  }

  tell(): void {
    const state = this.states.shift();
    const out = noEffects();
    if (state && this.shared.pushed(state, out) === null) this.ask();
    this.written(out);
  }

  lose(): void {
    if (this.states.length === 0) return;
    const place = this.below(this.states.length);
    this.states.splice(place, 1);
    this.lost ||= place === this.states.length; // else the next STATE shows it
  }

  look(): void {
    if (!this.lost || this.asked.length + this.pages.length > 0) return;
    this.lost = false;
    this.shared.wanted = true;
    this.ask();
  }

  answer(again = false): void {
    const sync = again ? this.asked[0] : this.asked.shift();
    if (!sync) return;
    const state = sync.named === null ? undefined : this.newer(sync.named > this.platform.version ? 0n : sync.named, [1, 2, 99][this.below(3)]!);
    this.pages.push(create(SyncedMsgSchema, { ref: sync.ref, ...(state ? { state } : {}) }));
  }

  page(): void {
    const page = this.pages.shift();
    if (!page) return;
    const [version, anew] = [this.shared.version, this.anew];
    const out = noEffects();
    this.shared.synced(page, out);
    this.written(out);
    expect(this.shared.version >= version || this.anew > anew, "an older page takes nothing back").toBe(true);
    if (this.shared.wanted) this.ask();
  }

  /** It was stopped meanwhile: no answer of before is on its way, and each device syncs before anything changes. */
  setBack(): void {
    if (this.pages.length > 0) return; // twice, before a device heard of the first time: that cannot be told
    this.kept = this.kept.slice(0, 1 + this.below(this.kept.length));
    this.platform = structuredClone(this.kept[this.kept.length - 1]!);
    this.states = [];
    this.lost = false;
    this.shared.wanted = true;
    this.ask(3);
    while (this.asked.length > 0) this.answer();
  }

  settle(): void {
    for (let n = 0; n < 300; n++) {
      this.tell();
      this.answer();
      this.page();
      this.look();
      if (this.states.length + this.asked.length + this.pages.length === 0 && !this.lost) return;
    }
    throw new Error("busy for ever");
  }

  check(): void {
    expect(this.shared.version).toBe(this.platform.version);
    for (const name of NAMES) expect(this.inbox.get(name).pinnedAtMs, name).toBe(this.platform.pins.get(name)?.value ?? 0);
    expect([...this.hidden].sort()).toEqual([...this.platform.hidden.keys()].sort());
    const friends = [...this.platform.friends].map(([user, v]) => [user, `${v.value}`]).sort();
    expect([...this.friends].sort()).toEqual(friends);
    expect([...this.shared.friends.values()].map((f) => [f.user, f.words]).sort()).toEqual(friends);
  }
}

for (const backs of [false, true])
  test(`when all is quiet a device holds what the platform holds${backs ? ", also one that was set back" : ""}`, () => {
    let seen = 0;
    for (let seed = 1; seed <= 400; seed++) {
      const chance = chanceOf(seed + (backs ? 10_000 : 0));
      const line = new Line(chance);
      const steps = [
        () => line.change(), () => line.change(), () => line.tell(), () => line.tell(), () => line.lose(), () => line.answer(),
        () => line.answer(true), () => line.page(), () => line.look(),
        () => { if (chance() < 0.3) { line.shared.wanted = true; line.ask(2); } },
        () => { if (backs && chance() < 0.3) line.setBack(); },
      ];
      for (let n = line.below(60); n > 0; n--) steps[line.below(steps.length)]!();
      line.settle();
      line.check();
      seen += line.anew;
      if (!backs) expect(line.anew, "nobody set it back").toBe(0);
    }
    expect(seen > 50).toBe(backs);
  });

test("a platform that was set back shows with its next change", () => {
  const line = new Line(chanceOf(5));
  for (let n = 0; n < 30; n++) line.change();
  line.settle();
  line.lost = true;
  line.settle(); // a Sync named this version: what is older is not on its way any more
  line.platform = structuredClone(line.kept[0]!);
  line.change();
  line.settle();
  line.check();
});
