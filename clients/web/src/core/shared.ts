// What a user's devices share: read positions, pins, mutes, what was deleted here only, friends.
//
// STATE brings changes with (version, prevVersion); one that does not follow ours means that something was missed: a Sync with
// want_state brings the rest. It is wished for until a page brings us to every version that we heard of, or until no STATE came
// between a Sync and its page: then that page is right. A page below the version that its Sync named: the platform was set back,
// what is shared begins anew. Read positions go out by READ, one per conversation at a time, until the platform says what
// stands. A READ is no sign of life: unanswered it is repeated, and never ends a connection.
import type { Inbox, Thread } from "./inbox";
import { type Effects, type Friend, forgetShared } from "./model";
import { type Chance, type Timing, soonest } from "./timing";
import * as wire from "./wire";
import { Action, action } from "./codes";
import type { ACKMsg, ReadMsg, StateMsg, SyncedMsg } from "../wire/client_pb";
import { isDialogue } from "./conversations";

/** READs in flight at a time. */
export const READS = 4;
const SYNCS = 8;

interface Asked {
  ref: number;
  seq: number;
  dueMs: number;
  times: number;
}

export class Shared {
  version: bigint;
  /** The next Sync is to bring what is newer than `version`. */
  wanted = true;
  readonly friends: Map<string, Friend>;
  private asked = new Map<string, Asked>(); // by conversation
  private states = 0; // STATEs, how many came
  private newest = 0n; // the greatest version of a STATE; 0: no page can be older than what was heard
  private floor = 0n; // the version that the last answered Sync named: older STATEs are not on their way any more
  private syncs = new Map<bigint, { named: bigint; heard: number }>(); // Syncs that wanted the state, by ref
  private unsent = new Set<string>(); // conversations whose read position the platform has not

  constructor(
    version: bigint, friends: Friend[], private readonly inbox: Inbox, private readonly timing: Timing, private readonly chance: Chance,
  ) {
    this.version = version;
    this.friends = new Map(friends.map((f) => [f.user, f]));
    for (const t of inbox.threads()) if (t.readWanted > t.readSeq) this.unsent.add(t.conversationId);
  }

  /** A STATE frame. Returns the conversations that changed; null: changes are missing before it, or the platform was set back. */
  pushed(state: StateMsg, out: Effects): Thread[] | null {
    this.states += 1;
    if (state.version > this.newest) this.newest = state.version;
    if (state.prevVersion === this.version && state.version > this.version) return this.apply(state, out);
    if (this.floor <= state.version && state.version <= this.version) return [];
    this.wanted = true;
    return null;
  }

  /** A Sync of this ref is made: the version it names, null where it does not want the state. */
  ask(ref: number): bigint | null {
    if (!this.wanted) return null;
    this.syncs.set(BigInt(ref), { named: this.version, heard: this.states });
    for (const old of this.syncs.keys()) if (this.syncs.size > SYNCS) this.syncs.delete(old);
    return this.version;
  }

  /** The page of a Sync. If it wanted the state, the wish ends, unless there is more of it or newer was heard of. */
  synced(page: SyncedMsg, out: Effects): Thread[] {
    const sync = this.syncs.get(page.ref);
    const { state } = page;
    if (!sync) {
      this.wanted ||= state !== undefined; // of a Sync that was forgotten: another one tells
      return [];
    }
    this.syncs.delete(page.ref);
    const quiet = sync.heard === this.states;
    if (quiet) this.newest = 0n;
    const back = state !== undefined && state.version < sync.named;
    const taken = state !== undefined && (back || state.version > this.version);
    this.floor = back ? 0n : sync.named;
    const changed = new Set(back ? this.forget(out) : []);
    if (taken) for (const thread of this.apply(state, out)) changed.add(thread);
    const more = state !== undefined && state.more && (back || state.version > sync.named); // also where a STATE came as far
    this.wanted = this.newest > this.version || more || (back && !quiet);
    return [...changed];
  }

  /** The platform was set back: what is shared begins anew, by this page. What this device has yet to tell stays. */
  private forget(out: Effects): Thread[] {
    this.syncs.clear();
    this.newest = 0n;
    this.friends.clear();
    forgetShared(out.writes);
    out.notices.push({ kind: "friends" });
    const threads = this.inbox.threads();
    for (const t of threads) t.readSeq = t.pinnedAtMs = t.mutedUntilMs = t.peerReadSeq = t.clearedSeq = 0;
    return threads;
  }

  /** What holds from here on. Returns the conversations that changed. */
  private apply(state: StateMsg, out: Effects): Thread[] {
    const changed: Thread[] = [];
    for (const c of state.conversations) {
      const thread = this.inbox.get(c.conversationId);
      thread.readSeq = Math.max(thread.readSeq, wire.clipped(c.readSeq));
      thread.pinnedAtMs = wire.clipped(c.pinnedAtMs);
      thread.mutedUntilMs = wire.clipped(c.mutedUntilMs);
      thread.peerReadSeq = Math.max(thread.peerReadSeq, wire.clipped(c.peerReadSeq));
      thread.clearedSeq = Math.max(thread.clearedSeq, wire.clipped(c.clearedSeq));
      changed.push(thread);
    }
    for (const h of state.hidden) out.writes.hidden.push({ conversationId: h.conversationId, seq: wire.clipped(h.seq) });
    for (const f of state.friends) {
      const friend = { user: f.user, status: f.status, words: f.words };
      this.friends.set(f.user, friend);
      out.writes.friends.set(f.user, friend);
    }
    if (state.friends.length > 0) out.notices.push({ kind: "friends" });
    this.version = state.version;
    out.writes.meta.set("stateVersion", this.version.toString());
    return changed;
  }

  /** The application has read up to here. False: that is nothing new. */
  want(thread: Thread, seq: number): boolean {
    if (seq <= Math.max(thread.readSeq, thread.readWanted)) return false;
    thread.readWanted = seq;
    this.unsent.add(thread.conversationId);
    return true;
  }

  /** What to send now, new and again. */
  take(nowMs: number, nextRef: () => number, frames: Uint8Array[]): void {
    for (const [conversationId, asked] of this.asked) {
      if (asked.dueMs > nowMs) continue;
      asked.times += 1;
      asked.dueMs = nowMs + this.timing.backoffMs(asked.times, this.chance);
      frames.push(wire.read(asked.ref, conversationId, asked.seq));
    }
    for (const conversationId of this.unsent) {
      if (this.asked.size >= READS) return;
      if (this.asked.has(conversationId)) continue;
      this.unsent.delete(conversationId);
      const thread = this.inbox.get(conversationId);
      if (thread.readWanted <= thread.readSeq) continue;
      const asked = { ref: nextRef(), seq: thread.readWanted, dueMs: nowMs + this.timing.backoffMs(0, this.chance), times: 0 };
      this.asked.set(conversationId, asked);
      frames.push(wire.read(asked.ref, conversationId, asked.seq));
    }
  }

  /** An ACK to a READ. Returns the conversation that changed. */
  answered(ack: ACKMsg, nowMs: number): Thread | null {
    const ref = Number(ack.ref);
    return this.coded([...this.asked].find(([, a]) => a.ref === ref), ack.Code, wire.clipped(ack.expected), nowMs);
  }

  /** An ERROR that names a READ. */
  refused(ref: number, code: number, nowMs: number): Thread | null {
    const found = [...this.asked].find(([, a]) => a.ref === ref) ?? (ref === 0 && this.asked.size === 1 ? [...this.asked][0] : undefined);
    return this.coded(found, code, 0, nowMs);
  }

  /** The platform tells that a member has read. */
  heard(read: ReadMsg): Thread | null {
    const thread = this.inbox.find(read.conversationId);
    if (!thread || !isDialogue(read.conversationId) || wire.clipped(read.seq) <= thread.peerReadSeq) return null;
    thread.peerReadSeq = wire.clipped(read.seq);
    return thread;
  }

  /** The connection is gone: what was not answered is sent on the next one. */
  end(): void {
    for (const conversationId of this.asked.keys()) this.unsent.add(conversationId);
    this.asked.clear();
  }

  deadlineMs(): number | null {
    return soonest(...[...this.asked.values()].map((a) => a.dueMs));
  }

  private coded(found: [string, Asked] | undefined, code: number, stands: number, nowMs: number): Thread | null {
    if (!found) return null;
    const [conversationId, asked] = found;
    const act = action(code);
    if (act === Action.RETRY) {
      asked.dueMs = nowMs + this.timing.laterMs(asked.times, this.chance);
      asked.times += 1;
      return null;
    }
    if (act !== Action.NONE && act !== Action.STOP) return null;
    this.asked.delete(conversationId);
    const thread = this.inbox.get(conversationId);
    thread.readSeq = Math.max(thread.readSeq, stands);
    if (thread.readWanted <= asked.seq) thread.readWanted = 0;
    else this.unsent.add(conversationId);
    return thread;
  }
}
