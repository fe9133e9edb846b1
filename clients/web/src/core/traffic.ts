// What flows on a committed connection: uplinks out, rows in, gaps pulled, losses healed by Sync, pushes acknowledged.
//
// Down: a pushed frame's number is checked (numbers.ts), its row offered to the inbox; what is readable is written together
// with the cursor; a gap is pulled, and holds the acknowledgement. A lost number starts a Sync, which finds the gaps. Up: the
// outbox says what to send; a receipt, an own row or a refusal settles it. All of it only adds to `out`.
//
// Memory: see inbox.ts and outbox.ts; PULLS pulls, one Sync and HISTORIES history requests at a time.
import { hex } from "./bytes";
import { Action, Code, action } from "./codes";
import { changeOf, isOperation } from "./content";
import { dialogueId, isDialogue } from "./conversations";
import { operate, told } from "./groups";
import { Inbox, Thread } from "./inbox";
import { type Change, type Effects, type Entry, type Row, type Snapshot, noEffects } from "./model";
import { type Arrival, PushLine } from "./numbers";
import { Outbox } from "./outbox";
import { type Request, Requests } from "./requests";
import { Shared } from "./shared";
import { SyncWalk } from "./syncwalk";
import { type Chance, type Timing, soonest } from "./timing";
import * as wire from "./wire";
import {
  type ACKMsg, CmdType, type NotifyMsg, type PulledMsg, type PushMsg, type ReadMsg, type ReceiptMsg, type StateMsg, type SyncedMsg,
  type TypingMsg,
} from "../wire/client_pb";

export const PULLS = 2;
export const PULL_ROWS = 100;
export const WITHIN_MAX_MS = 60_000;
/** With one Sync these stay within the four requests that a connection may have open; a fifth is answered "busy". */
export const HISTORIES = 1;

/** The Sync that commits a connection: its walk, the id of its first page's request, and that request. */
export interface FirstSync {
  walk: SyncWalk;
  ref: number;
  frame: Uint8Array;
}

export class Traffic {
  out: Effects = noEffects();
  user: string | null;
  live = false;
  readonly requests: Requests;
  readonly inbox: Inbox;
  readonly outbox: Outbox;
  readonly shared: Shared;
  private line = new PushLine();
  private walk: SyncWalk | null = null;
  private walkUnsent = false; // the running Sync began in this round, so it covers what this round learns
  private placed = new Map<string, ReceiptMsg>(); // own operations with a place whose rows are still to be pulled
  private untold = false; // a Sync is due, that tells what a group is like now, or whom a dialogue is with
  private walkAgain = false; // something was lost after the running Sync began
  private walkHeals = false; // the running Sync follows a loss on this connection
  private pulls = new Map<string, number>(); // conversation → ref
  private wanted = new Set<string>(); // conversations with a gap, in turn
  private later = new Map<string, number>(); // conversations with a gap that many were told of at once → when to pull
  private histories = new Map<number, { id: string; changes: Change[] }>(); // ref → conversation, and what changed meanwhile
  private ref = 0;
  private dirty = new Set<string>(); // conversations whose Place is to be written

  constructor(snapshot: Snapshot, timing: Timing, private readonly chance: Chance, tail: number) {
    this.user = snapshot.user;
    this.requests = new Requests(timing, chance);
    this.inbox = new Inbox(snapshot.places.map((p) => new Thread(p.conversationId, p)), tail);
    this.outbox = new Outbox(snapshot.outbox, snapshot.places.map((p) => [p.conversationId, p.nextClientId]), timing, chance);
    this.shared = new Shared(snapshot.stateVersion, snapshot.friends, this.inbox, timing, chance);
  }

  // ── the life of a connection ─────────────────────────────────────────────────────────────────────────────────

  /** The first Sync committed; (run, pushNo) are the numbers at that moment, 0 if they were not told. */
  begin(run: bigint, pushNo: number): void {
    this.live = true;
    if (run) {
      this.line.adopt(run, pushNo);
      this.walkAgain = false; // the Sync that committed reads after it, so it covers what came before
    }
    this.outbox.rewindAll();
    this.later.clear();
    for (const id of this.inbox.behind()) this.wanted.add(id);
  }

  /** The Sync that is to commit another connection while this one goes on. */
  firstSync(): FirstSync {
    const walk = new SyncWalk();
    const ref = this.nextRef();
    this.shared.wanted = true;
    return { walk, ref, frame: wire.sync(ref, walk.ask(this.inbox.cursors()), this.shared.ask(ref)) };
  }

  /**
   * `sync` was answered on another connection, with these numbers (0: not told): everything goes on there. What was on its way
   * here is asked or sent again; the page of `sync` is still to come, or comes next.
   */
  goOver(sync: FirstSync, run: bigint, pushNo: number, nowMs: number): void {
    const asked = [...this.histories.keys()].map((ref) => this.requests.find(CmdType.PULL, ref));
    const histories = this.histories;
    this.histories = new Map();
    this.end();
    this.histories = histories;
    this.walk = sync.walk;
    this.requests.ask(CmdType.SYNC, sync.ref, sync.frame, nowMs); // sent already, there
    this.begin(run, pushNo);
    for (const r of asked) if (r) this.out.frames.push(this.requests.ask(CmdType.PULL, r.ref, r.frame, nowMs));
  }

  /** The connection, or its session, is gone: forget all that lives no longer. */
  end(): void {
    this.live = false;
    this.out.frames = [];
    this.requests.clear();
    for (const ref of this.histories.keys()) this.out.notices.push({ kind: "history", ref, page: null });
    this.histories.clear();
    this.pulls.clear();
    this.later.clear();
    this.shared.end();
    this.walk = null;
    this.walkAgain = this.walkHeals = false;
    this.line = new PushLine();
  }

  /** The end of a round: ask for gaps, send what is ready, acknowledge what is stored, note changed conversations. */
  flush(nowMs: number): void {
    if (this.live && this.untold) this.resync(nowMs);
    this.walkUnsent = this.untold = false;
    if (this.live) {
      this.askPulls(nowMs);
      for (const [entry, acked] of this.outbox.takeReady(nowMs)) this.out.frames.push(wire.up(entry, acked));
      this.shared.take(nowMs, () => this.nextRef(), this.out.frames);
      const stored = this.line.acknowledgement();
      if (stored) this.out.frames.push(wire.pushAck(...stored));
    }
    for (const id of this.dirty) this.out.writes.places.set(id, this.inbox.get(id).place(this.outbox.nextClientId(id)));
    this.dirty.clear();
  }

  /** A heartbeat, unless one is unanswered: that one is repeated anyway. */
  beat(nowMs: number): void {
    if (this.requests.find(CmdType.HEARTBEAT, 0)) return;
    this.out.frames.push(this.requests.ask(CmdType.HEARTBEAT, 0, wire.heartbeat(...this.line.stored), nowMs));
  }

  /** A numbered frame. False: it is of a lower run, ignore it. */
  arrived(run: bigint, pushNo: number, nowMs: number): boolean {
    const arrival: Arrival = this.line.arrive(run, pushNo);
    if (arrival === "jump") this.resync(nowMs);
    return arrival !== "stale";
  }

  /** The platform's newest numbers, by an answered heartbeat. */
  newest(run: bigint, pushNo: number, nowMs: number): void {
    if (run && this.line.hint(run, pushNo)) this.resync(nowMs);
  }

  /** When time has something to do here next. */
  deadlineMs(): number | null {
    return soonest(this.outbox.deadlineMs(), this.shared.deadlineMs(), ...this.later.values());
  }

  // ── the application's calls ──────────────────────────────────────────────────────────────────────────────────

  /** Puts a message into the outbox. toUser: a dialogue's other user, else "". Throws OutboxFull. */
  send(conversationId: string, clientMsgId: string, toUser: string, msgType: number, body: Uint8Array, madeAtMs: number): Entry {
    const thread = this.inbox.get(conversationId);
    thread.peer ||= toUser;
    const entry = this.outbox.add(conversationId, clientMsgId, toUser || thread.peer, msgType, body, madeAtMs);
    this.out.writes.queued.set(clientMsgId, entry);
    this.dirty.add(conversationId);
    return entry;
  }

  /** Asks for the newest rows below `before`; the answer is a notice of the ref returned. null: not now. */
  history(conversationId: string, before: number, limit: number, nowMs: number): number | null {
    if (!this.live || this.histories.size >= HISTORIES) return null;
    const ref = this.nextRef();
    this.histories.set(ref, { id: conversationId, changes: [] });
    const frame = wire.pull(ref, conversationId, 1, before - 1, limit, true);
    this.out.frames.push(this.requests.ask(CmdType.PULL, ref, frame, nowMs));
    return ref;
  }

  markRead(conversationId: string, seq: number): void {
    const thread = this.inbox.find(conversationId);
    if (thread && this.shared.want(thread, Math.min(seq, thread.cursor))) this.dirty.add(conversationId);
  }

  typing(conversationId: string, stopped: boolean): void {
    if (this.live) this.out.frames.push(wire.typing(conversationId, stopped));
  }

  // ── uplink ───────────────────────────────────────────────────────────────────────────────────────────────────

  /** An ACK to an UP. False: its code is about the connection, not about the message. */
  upAnswered(ack: ACKMsg, nowMs: number): boolean {
    const known = ack.clientMsgId.length > 0 ? this.outbox.entry(hex(ack.clientMsgId)) : undefined;
    const conversationId = known?.conversationId ?? ack.conversationId;
    const clientId = known?.clientId ?? wire.clipped(ack.ClientID);
    const verdict = this.outbox.answer(conversationId, clientId, ack.Code, wire.clipped(ack.expected), nowMs, ack.retryMs);
    const entry = this.outbox.at(conversationId, clientId);
    if (entry && verdict === "accepted")
      this.out.notices.push({ kind: "accepted", clientMsgId: entry.clientMsgId, conversationId });
    if (entry && verdict === "refused") this.refuse(entry, ack.Code);
    return verdict !== "elsewhere";
  }

  /** The outcome of an UP. It moves the cursor as a push would: its row is the entry's body at the receipt's place. */
  receipt(receipt: ReceiptMsg, numbered: boolean, nowMs: number): void {
    const entry = this.outbox.entry(hex(receipt.clientMsgId));
    const act = action(receipt.code);
    if (act === Action.STOP) {
      if (entry) this.refuse(entry, receipt.code, receipt.msg);
      return;
    }
    if (act !== Action.NONE || receipt.seq === 0n) return;
    if (!entry || isOperation(entry.msgType)) {
      // Settled before: its row is stored, or a pull brings it. An operation's row is not what was sent: the platform adds to it.
      const thread = this.inbox.get(receipt.conversationId);
      this.inbox.hint(thread, wire.clipped(receipt.seq));
      if (entry) {
        this.placed.set(entry.clientMsgId, receipt);
        this.settlePlaced(thread);
      }
      this.touched(thread, numbered, nowMs);
      return;
    }
    const row: Row = {
      conversationId: entry.conversationId,
      seq: wire.count(receipt.seq),
      prevSeq: wire.count(receipt.prevSeq),
      msgId: receipt.msgId.toString(),
      fromUser: this.user ?? "",
      msgType: entry.msgType,
      body: entry.body,
      clientMsgId: entry.clientMsgId,
      serverAtMs: wire.count(receipt.serverAtMs),
      changedSeq: 0,
      recalled: false,
    };
    this.came(row, numbered, nowMs);
  }

  /** A row with its place: if it is ours, its entry leaves the outbox. */
  private settleRow(row: Row): void {
    const entry = this.outbox.entry(row.clientMsgId);
    if (entry && entry.conversationId === row.conversationId && row.fromUser === (this.user ?? ""))
      this.settle(entry, row.msgId, row.seq);
  }

  /**
   * Own operations whose rows will not come are settled by their receipts: they stand where this device has read, yet may not
   * look (it was no member in between), or, `unread`, nothing may be read any more.
   */
  private settlePlaced(thread: Thread, unread = false): void {
    if (this.placed.size === 0) return;
    for (const entry of this.outbox.entries(thread.conversationId)) {
      const receipt = this.placed.get(entry.clientMsgId);
      const seq = receipt ? wire.clipped(receipt.seq) : 0;
      if (receipt && (unread || seq <= thread.cursor)) this.settle(entry, receipt.msgId.toString(), seq);
    }
  }

  private settle(entry: Entry, msgId: string, seq: number): void {
    this.placed.delete(entry.clientMsgId);
    this.outbox.settle(entry.clientMsgId);
    this.out.writes.unqueued.push(entry);
    const { conversationId, clientMsgId } = entry;
    this.out.notices.push({ kind: "settled", conversationId, clientMsgId, msgId, seq });
  }

  private refuse(entry: Entry, code: number, words = ""): void {
    const detail = code === Code.REFUSED_BY_HOOK ? words.slice(0, 500) : ""; // else the page has better ones
    this.outbox.settle(entry.clientMsgId);
    this.out.writes.unqueued.push(entry);
    this.out.writes.refused.push({ entry, code, detail });
    const { conversationId, clientMsgId } = entry;
    this.out.notices.push({ kind: "refused", conversationId, clientMsgId, code, detail });
  }

  // ── downlink ─────────────────────────────────────────────────────────────────────────────────────────────────

  /** One message. Throws PeerError. */
  pushed(push: PushMsg, numbered: boolean, nowMs: number): void {
    this.came(wire.rowOf(push), numbered, nowMs);
  }

  /** How far conversations reach; an empty one says: look for yourself. */
  notified(notify: NotifyMsg, numbered: boolean, nowMs: number): void {
    if (notify.newest.length === 0) {
      this.line.syncDue();
      this.resync(nowMs);
    }
    for (const cursor of notify.newest) {
      const thread = this.inbox.get(cursor.conversationId);
      this.inbox.hint(thread, wire.clipped(cursor.seq));
      this.touched(thread, numbered, nowMs, notify.withinMs);
    }
  }

  /** A change of what the devices share. */
  stated(state: StateMsg, nowMs: number): void {
    const changed = this.shared.pushed(state, this.out);
    if (changed === null) {
      this.line.syncDue();
      this.resync(nowMs);
    } else for (const thread of changed) this.dirty.add(thread.conversationId);
  }

  /** Somebody has read, or the platform says what stands of our reading. */
  read(read: ReadMsg): void {
    const thread = this.shared.heard(read);
    if (thread) this.dirty.add(thread.conversationId);
    this.out.notices.push({ kind: "read", conversationId: read.conversationId, user: read.user, seq: wire.clipped(read.seq) });
  }

  readAnswered(ack: ACKMsg, nowMs: number): void {
    const thread = this.shared.answered(ack, nowMs);
    if (thread) this.dirty.add(thread.conversationId);
  }

  readRefused(ref: number, code: number, nowMs: number): void {
    const thread = this.shared.refused(ref, code, nowMs);
    if (thread) this.dirty.add(thread.conversationId);
  }

  typed(typing: TypingMsg): void {
    const { conversationId, user, stopped } = typing;
    this.out.notices.push({ kind: "typing", conversationId, user, stopped });
  }

  /** Pulls what its moment came for. */
  spread(nowMs: number): void {
    for (const [id, dueMs] of [...this.later]) if (dueMs <= nowMs) this.touched(this.inbox.get(id), false, nowMs);
  }

  private came(row: Row, numbered: boolean, nowMs: number): void {
    const thread = this.inbox.get(row.conversationId);
    this.readable(this.inbox.offer(thread, row));
    this.settleRow(row);
    this.touched(thread, numbered, nowMs);
  }

  /** Rows became readable: they, what they change, and the cursor that passed them are one transaction. */
  private readable(rows: Row[]): void {
    for (const row of rows) {
      this.out.writes.rows.push(row);
      this.dirty.add(row.conversationId);
      const change = changeOf(row);
      if (change) {
        this.out.writes.changes.push(change);
        for (const h of this.histories.values()) if (h.id === row.conversationId) h.changes.push(change);
      }
      this.meet(row);
      const thread = this.inbox.get(row.conversationId);
      if (operate(thread, row, this.user)) this.untold ||= thread.untold;
    }
  }

  /** Whom a dialogue is with is known from what the other one writes; else a Sync has to tell it. */
  private meet(row: Row): void {
    const thread = this.inbox.get(row.conversationId);
    if (thread.peer || !isDialogue(row.conversationId)) return;
    if (this.user && row.conversationId === dialogueId(this.user, row.fromUser)) thread.peer = row.fromUser;
    else this.untold = true;
  }

  /**
   * After any news of a conversation: is there a gap, and what is to be done about it. withinMs: not at once, but at a random
   * moment of that time.
   */
  private touched(thread: Thread, numbered: boolean, nowMs: number, withinMs = 0): void {
    const id = thread.conversationId;
    if (!thread.behind) {
      this.later.delete(id);
      this.line.release(id);
      return;
    }
    this.dirty.add(id);
    if (numbered) this.line.hold(id);
    if (withinMs > 0) {
      const momentMs = nowMs + Math.floor(this.chance() * Math.min(withinMs, WITHIN_MAX_MS));
      if (!this.later.has(id)) this.later.set(id, momentMs);
      return;
    }
    this.later.delete(id);
    if (thread.placed) this.wanted.add(id);
    else this.resync(nowMs); // only a Sync tells where its reader starts
  }

  private askPulls(nowMs: number): void {
    for (const id of this.wanted) {
      if (this.pulls.size >= PULLS) return;
      this.wanted.delete(id);
      const thread = this.inbox.get(id);
      if (this.pulls.has(id) || !thread.behind || !thread.placed) continue; // a pull that ends looks again, so does a Sync
      const ref = this.nextRef();
      this.pulls.set(id, ref);
      const first = thread.cursor + 1;
      const frame = wire.pull(ref, id, first, 0, PULL_ROWS);
      this.out.frames.push(this.requests.ask(CmdType.PULL, ref, frame, nowMs, id, first));
    }
  }

  /** The page that `request` asked for. Throws PeerError. */
  pulled(pulled: PulledMsg, request: Request, nowMs: number): void {
    const rows = wire.rowsOf(pulled);
    for (const row of rows) this.settleRow(row);
    if (!request.subject) {
      this.older(request, rows, wire.clipped(pulled.coveredFrom), wire.clipped(pulled.coveredTo));
      return;
    }
    const thread = this.inbox.get(request.subject);
    const [upto, newest] = [wire.clipped(pulled.coveredTo), wire.clipped(pulled.newestSeq)];
    const [readable, moved] = this.inbox.page(thread, rows, wire.clipped(pulled.coveredFrom), upto, newest);
    this.readable(readable);
    this.settlePlaced(thread);
    this.dirty.add(thread.conversationId);
    if (!moved && request.fromSeq === thread.cursor + 1) {
      this.requests.putOff(request, nowMs); // the gap is there, its rows are not: not yet
      return;
    }
    // Also when the cursor passed this request meanwhile: the next one asks from where it stands now.
    this.requests.done(CmdType.PULL, request.ref);
    this.pulls.delete(request.subject);
    this.touched(thread, false, nowMs);
  }

  /** Rows below what is stored: they are stored too, and the floor sinks, if they touch it. */
  private older(request: Request, rows: Row[], coveredFrom: number, coveredTo: number): void {
    this.requests.done(CmdType.PULL, request.ref);
    const asked = this.histories.get(request.ref);
    const thread = this.inbox.find(asked?.id ?? "");
    this.histories.delete(request.ref);
    if (thread?.placed && coveredTo >= thread.floor && coveredFrom <= thread.floor) {
      this.out.writes.rows.push(...rows.filter((row) => row.seq <= thread.floor));
      this.out.writes.changes.push(...(asked?.changes ?? [])); // the page may be older than they are
      thread.floor = rows.length > 0 ? Math.max(0, coveredFrom - 1) : 0;
      this.dirty.add(thread.conversationId);
    }
    this.out.notices.push({ kind: "history", ref: request.ref, page: { rows, coveredFrom } });
  }

  /** For good: the conversation may not be read (any more). */
  pullRefused(request: Request): void {
    this.requests.done(CmdType.PULL, request.ref);
    if (!request.subject) {
      this.histories.delete(request.ref);
      this.out.notices.push({ kind: "history", ref: request.ref, page: null });
      return;
    }
    this.pulls.delete(request.subject);
    const thread = this.inbox.get(request.subject);
    this.settlePlaced(thread, true);
    this.inbox.giveUp(thread);
    this.line.release(request.subject);
    this.dirty.add(request.subject);
  }

  // ── sync ─────────────────────────────────────────────────────────────────────────────────────────────────────

  /** Something may have been lost on this connection. While a Sync runs, one more follows it. */
  resync(nowMs: number): void {
    if (this.walk) this.walkAgain ||= !this.walkUnsent;
    else if (this.live) {
      this.walkHeals = true;
      this.startSync(nowMs);
    }
  }

  /** A Sync from the first page on; the first one of a connection commits it. */
  startSync(nowMs: number): void {
    this.walk = new SyncWalk();
    this.walkUnsent = true;
    this.walkAgain = false;
    this.shared.wanted = true;
    this.askSync(this.walk, nowMs);
  }

  private askSync(walk: SyncWalk, nowMs: number): void {
    const ref = this.nextRef();
    const frame = wire.sync(ref, walk.ask(this.inbox.cursors()), this.shared.ask(ref));
    this.out.frames.push(this.requests.ask(CmdType.SYNC, ref, frame, nowMs));
  }

  /** The page that `request` asked for. */
  synced(page: SyncedMsg, request: Request, nowMs: number): void {
    const walk = this.walk;
    if (!walk) return;
    for (const item of page.items) {
      const thread = this.inbox.get(item.conversationId);
      thread.peer ||= item.peer;
      told(thread, item, wire.clipped(item.newestSeq));
      this.untold ||= thread.untold && wire.clipped(item.newestSeq) < thread.groupSeq;
      this.inbox.hint(thread, wire.clipped(item.newestSeq));
      this.readable(this.inbox.place(thread, wire.clipped(item.firstCursor)));
      this.dirty.add(item.conversationId);
      this.touched(thread, false, nowMs);
    }
    for (const thread of this.shared.synced(page, this.out)) this.dirty.add(thread.conversationId);
    const way = walk.answered(page.more, page.coveredId);
    if (way === "stuck") {
      this.requests.putOff(request, nowMs);
      return;
    }
    this.requests.done(CmdType.SYNC, request.ref);
    if (way === "on") this.askSync(walk, nowMs);
    else this.walkEnded(nowMs);
  }

  private walkEnded(nowMs: number): void {
    this.walk = null;
    if (this.walkAgain || this.shared.wanted) { // more of what is shared than a page holds, or newer
      this.walkHeals ||= this.walkAgain;
      this.startSync(nowMs);
      return;
    }
    for (const thread of this.inbox.threads()) {
      if (!thread.behind || thread.placed) continue;
      this.readable(this.inbox.place(thread, 0)); // no Sync lists it: its reader starts at the beginning
      this.wanted.add(thread.conversationId);
    }
    this.line.synced(this.inbox.behind());
    if (this.walkHeals) {
      this.walkHeals = false;
      this.outbox.rewindAccepted();
    }
  }

  private nextRef(): number {
    this.ref += 1;
    return this.ref;
  }
}
