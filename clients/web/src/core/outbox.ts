// The outbox: what this device sent and the platform has not settled yet, per conversation in clientId order (R1, R3).
//
// An entry leaves only by a receipt, its own row in a pull, or a refusal; an ACK merely stops its timer. Each conversation is
// sent in order with a bounded number of entries in flight. After any trouble (busy, expected, no answer) it goes back to the
// entry in question and sends that one alone until it is answered, so that a burst of equal answers causes one repeat.
// clientIds are given once and never again: going back re-sends, it never re-numbers.
//
// Memory: at most MAX_ENTRIES entries and MAX_BYTES of bodies.
import { Action, Code, action } from "./codes";
import type { Entry } from "./model";
import { UNANSWERED_MAX } from "./requests";
import type { Chance, Timing } from "./timing";

export const MAX_ENTRIES = 10_000;
export const MAX_BYTES = 64 * 1024 * 1024;
/** Entries in flight over all conversations; below the platform's cap per connection (64). */
export const WINDOW = 32;
/** The platform may tell us to wait for so long, and no longer. */
export const TOLD_MAX_MS = 60_000;

export class OutboxFull extends Error {}

export type Verdict = "nothing" | "accepted" | "refused" | "elsewhere"; // elsewhere: its code concerns the connection

/** One conversation's uplink. Entries from `nextSend` on are to be sent; `flying` ones were sent and await an ACK. */
class Lane {
  entries = new Map<number, Entry>(); // by clientId, rising
  nextSend = 1;
  flying = new Set<number>(); // rising
  probing = false; // after trouble: one at a time, until one is accepted
  later = 0; // "busy" answers in a row
  unanswered = 0; // time-outs in a row
  notBeforeMs = 0;
  dueMs = 0; // when the oldest flying one counts as unanswered

  constructor(public nextClientId = 1) {}

  get first(): number {
    return this.entries.keys().next().value ?? this.nextClientId;
  }

  /** The greatest n for which every clientId ≤ n is settled. */
  get acked(): number {
    return this.first - 1;
  }

  get unsent(): boolean {
    return this.nextSend < this.nextClientId && this.entries.size > 0;
  }
}

export class Outbox {
  private lanes = new Map<string, Lane>();
  private entries_ = new Map<string, Entry>();
  private busy = new Map<string, Lane>(); // lanes with entries, in turn
  private bytes = 0;
  private flying = 0;
  private notBeforeMs = 0; // nothing is sent before: the platform told us to wait

  /** entries: by (conversation, clientId). nextClientIds: of every conversation that was ever sent to. */
  constructor(entries: Entry[], nextClientIds: [string, number][], private readonly timing: Timing, private readonly chance: Chance) {
    for (const [id, n] of nextClientIds) if (n > 1) this.lanes.set(id, new Lane(n));
    for (const entry of entries) {
      let lane = this.lanes.get(entry.conversationId);
      if (!lane) this.lanes.set(entry.conversationId, (lane = new Lane(entry.clientId + 1)));
      this.keep(lane, { ...entry, accepted: false });
    }
    this.rewindAll();
  }

  get size(): number {
    return this.entries_.size;
  }

  entry(clientMsgId: string): Entry | undefined {
    return this.entries_.get(clientMsgId);
  }

  at(conversationId: string, clientId: number): Entry | undefined {
    return this.busy.get(conversationId)?.entries.get(clientId);
  }

  /** The unsettled entries of a conversation, by clientId. */
  entries(conversationId: string): Entry[] {
    return [...(this.busy.get(conversationId)?.entries.values() ?? [])];
  }

  nextClientId(conversationId: string): number {
    return this.lanes.get(conversationId)?.nextClientId ?? 1;
  }

  /** A new entry with the next clientId. Throws OutboxFull. */
  add(conversationId: string, clientMsgId: string, toUser: string, msgType: number, body: Uint8Array, madeAtMs: number): Entry {
    if (this.entries_.size >= MAX_ENTRIES || this.bytes + body.length > MAX_BYTES)
      throw new OutboxFull(`${this.entries_.size} messages wait to be sent; try again later`);
    let lane = this.lanes.get(conversationId);
    if (!lane) this.lanes.set(conversationId, (lane = new Lane()));
    const entry = { conversationId, clientId: lane.nextClientId, clientMsgId, toUser, msgType, body, madeAtMs, accepted: false };
    lane.nextClientId += 1;
    this.keep(lane, entry);
    return entry;
  }

  /** The [entry, acked] to send now, in order; they count as in flight from here on. */
  takeReady(nowMs: number): [Entry, number][] {
    const ready: [Entry, number][] = [];
    if (nowMs < this.notBeforeMs) return ready;
    for (const [conversationId, lane] of [...this.busy]) {
      if (this.flying >= WINDOW) break;
      if (!lane.unsent || lane.notBeforeMs > nowMs) continue;
      const window = lane.probing ? 1 : WINDOW;
      const acked = lane.acked;
      lane.nextSend = Math.max(lane.nextSend, acked + 1);
      while (lane.nextSend < lane.nextClientId && lane.flying.size < window && this.flying < WINDOW) {
        const entry = lane.entries.get(lane.nextSend);
        lane.nextSend += 1;
        if (!entry) continue;
        if (lane.flying.size === 0) lane.dueMs = nowMs + this.timing.backoffMs(lane.unanswered, this.chance);
        lane.flying.add(entry.clientId);
        this.flying += 1;
        ready.push([entry, acked]);
      }
      this.busy.delete(conversationId);
      this.busy.set(conversationId, lane); // to the end: lanes take turns
    }
    return ready;
  }

  /**
   * An ACK to an UP. "refused": the entry is still here, the caller settles it. retryMs: nothing is sent before, in no
   * conversation: it is the connection, the user or the platform that is too busy.
   */
  answer(conversationId: string, clientId: number, code: number, expected: number, nowMs: number, retryMs = 0): Verdict {
    const lane = this.busy.get(conversationId);
    const entry = lane?.entries.get(clientId);
    if (!lane || !entry) return "nothing";
    const act = action(code);
    if (act === Action.RECONNECT || act === Action.LOGIN || code === Code.SYNC_FIRST) return "elsewhere";
    if (act === Action.STOP) return "refused";
    lane.unanswered = 0;
    if (code === Code.PENDING) {
      lane.dueMs = nowMs + this.timing.backoffMs(0, this.chance);
      return "nothing";
    }
    if (act === Action.NONE) {
      this.land(lane, clientId);
      lane.dueMs = nowMs + this.timing.backoffMs(0, this.chance);
      lane.probing = false;
      lane.later = 0;
      entry.accepted = true;
      return "accepted";
    }
    if (!lane.flying.has(clientId)) return "nothing"; // it answers an earlier send, its trouble was dealt with already
    lane.probing = true;
    if (retryMs) {
      // Later by chance: others were told the same.
      const wait = Math.min(retryMs, TOLD_MAX_MS) * (1 + this.chance() / 4);
      this.notBeforeMs = Math.max(this.notBeforeMs, nowMs + Math.floor(wait));
      this.rewind(lane, clientId);
      return "nothing";
    }
    if (code === Code.EXPECTED && expected < clientId && lane.entries.has(expected)) {
      this.rewind(lane, expected);
      return "nothing";
    }
    // Busy; or the expected one is settled here, which the platform learns by `acked` when what stands before it is.
    this.putOff(lane, clientId, nowMs);
    return "nothing";
  }

  /** An uplink was answered "later" without being named: everything in flight goes back and waits. */
  laterAll(nowMs: number): void {
    for (const lane of this.busy.values()) {
      const [first] = lane.flying;
      if (first === undefined) continue;
      lane.probing = true;
      this.putOff(lane, first, nowMs);
    }
  }

  /** Takes an entry out: it has its outcome. undefined: it was settled before, or is not ours. */
  settle(clientMsgId: string): Entry | undefined {
    const entry = this.entries_.get(clientMsgId);
    if (!entry) return undefined;
    this.entries_.delete(clientMsgId);
    const lane = this.lanes.get(entry.conversationId)!;
    const first = lane.first === entry.clientId;
    lane.entries.delete(entry.clientId);
    this.land(lane, entry.clientId);
    this.bytes -= entry.body.length;
    if (first && lane.probing && lane.flying.size === 0) lane.notBeforeMs = 0; // `acked` moved: what waited for it may go
    if (lane.entries.size === 0) {
      this.busy.delete(entry.conversationId);
      lane.nextSend = lane.nextClientId;
      this.calm(lane);
    }
    return entry;
  }

  /** A new connection, or a commit: everything unsettled is to be sent (again), in order. */
  rewindAll(): void {
    for (const lane of this.busy.values()) {
      this.rewind(lane, 0);
      this.calm(lane);
    }
  }

  /** A Sync healed a loss on this connection: a lost refusal shows in no pull, so the accepted ones are asked again. */
  rewindAccepted(): void {
    for (const lane of this.busy.values())
      if ([...lane.entries.values()].some((e) => e.accepted && !lane.flying.has(e.clientId))) this.rewind(lane, 0);
  }

  /** Goes back to what is unanswered. False: a third time in a row, the connection is dead. */
  expire(nowMs: number): boolean {
    for (const lane of this.busy.values()) {
      const [first] = lane.flying;
      if (first === undefined || lane.dueMs > nowMs) continue;
      lane.unanswered += 1;
      if (lane.unanswered >= UNANSWERED_MAX) return false;
      lane.probing = true;
      this.rewind(lane, first);
    }
    return true;
  }

  /** When `takeReady` or `expire` has something to do next, as far as time decides it. */
  deadlineMs(): number | null {
    let best: number | null = null;
    for (const lane of this.busy.values()) {
      let due: number;
      if (lane.flying.size > 0) due = lane.dueMs;
      else if (lane.unsent && this.flying < WINDOW) due = Math.max(lane.notBeforeMs, this.notBeforeMs);
      else continue;
      best = best === null ? due : Math.min(best, due);
    }
    return best;
  }

  private keep(lane: Lane, entry: Entry): void {
    lane.entries.set(entry.clientId, entry);
    this.entries_.set(entry.clientMsgId, entry);
    this.bytes += entry.body.length;
    this.busy.set(entry.conversationId, lane);
  }

  private calm(lane: Lane): void {
    lane.probing = false;
    lane.later = lane.unanswered = lane.notBeforeMs = 0;
  }

  private rewind(lane: Lane, clientId: number): void {
    lane.nextSend = Math.min(lane.nextSend, Math.max(clientId, lane.first));
    for (const flown of [...lane.flying]) if (flown >= lane.nextSend) this.land(lane, flown);
  }

  private putOff(lane: Lane, clientId: number, nowMs: number): void {
    this.rewind(lane, clientId);
    lane.notBeforeMs = nowMs + this.timing.laterMs(lane.later, this.chance);
    lane.later += 1;
  }

  private land(lane: Lane, clientId: number): void {
    if (lane.flying.delete(clientId)) this.flying -= 1;
  }
}
