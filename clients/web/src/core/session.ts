// The client's machine: every transition of a connection, from the first attempt to the last code.
//
//                       ┌───────────── no gateway left: back-off ─────────────┐
//                       v                                                     │
//   start ──> waiting ──> listing ──> token ──> connecting ──> hello ──> committing ──> live
//                ^        (ipconfig)  (no session)   │  ^        │  ^        │           │
//                │                                   │  └ next ──┘  └ try again / log in ┤
//                └──── random delay told by the platform ── the socket is gone ──────────┘
//   any ──> stopped at a code of the range "stop" in a Kick or an Error, at logout, at close
//   live ── Redirect: a second link commits elsewhere meanwhile (moving.ts) ──> live, on that link
//
// connecting races over the round's gateways (race.ts). hello sends ReConn if a session is known, else Login. committing has
// sent the first Sync, which commits (R2); its answer makes the session the one that a later ReConn names. Only answers, frames
// and ticks move the machine; each call gets the clock's reading (monotonic, ms) and adds to one `Effects`, which the edge
// takes when its round ends and makes durable before it sends or tells anything of it.
//
// What flows on a committed connection is traffic.ts's. Memory: see there.
import { Backoff } from "./backoff";
import { Action, CONNECTION_STOP_MAX, Code, PeerError, action } from "./codes";
import { Gateways } from "./gateways";
import { type Effects, type Entry, type Phase, type Session, type Snapshot, type State, noEffects } from "./model";
import { HELLOS_PER_LINK, Move, type Outcome, sessionOf, ways } from "./moving";
import { Race } from "./race";
import type { Request, Requests } from "./requests";
import { type Chance, Timing, soonest } from "./timing";
import { Traffic } from "./traffic";
import * as wire from "./wire";
import {
  type ACKMsg, ACKMsgSchema, CmdType, type ErrorMsg, ErrorMsgSchema, KickMsgSchema, NotifyMsgSchema, PulledMsgSchema, PushMsgSchema,
  ReadMsgSchema, ReceiptMsgSchema, type RedirectMsg, RedirectMsgSchema, StateMsgSchema, type SyncedMsg, SyncedMsgSchema, TypingMsgSchema,
} from "../wire/client_pb";

/** A list that is asked for as a wait of this length begins is still fresh at its end. */
export const FRESH_LIST_MS = 5_000;
/** Rounds that `hurry` begins are at least so far apart, however often it is called. */
export const HURRY_MS = 1_000;
export const VERSION = "plato-web/1";

type Step = "waiting" | "listing" | "token" | "connecting" | "hello" | "committing" | "live" | "stopped";

const PHASES: Record<Step, Phase> = {
  waiting: "offline", listing: "connecting", token: "connecting", connecting: "connecting", hello: "logging in",
  committing: "logging in", live: "online", stopped: "stopped",
};
const TOKEN_CODES: number[] = [Code.TOKEN_EXPIRED, Code.TOKEN_NOT_YET_VALID, Code.TOKEN_INVALID, Code.GUESTS_OFF];
const NUMBERED: CmdType[] = [CmdType.PUSH, CmdType.NOTIFY, CmdType.RECEIPT, CmdType.STATE];

export interface MachineOptions {
  /** Addresses that the application named, such as "ws://host:8901/ws". */
  gateways: string[];
  /** There is an ipconfig to ask. */
  listing: boolean;
  chance: Chance;
  platform: string;
  /** See Inbox. */
  tail: number;
}

/** One device of one user. `take` ends a round. */
export class Machine {
  readonly timing = new Timing();
  readonly deviceId: string;
  readonly traffic: Traffic;
  /** The link that may speak, or the newest attempt at one. */
  linkNo = 0;
  /** How often this client went over to a second link; it was online all the time. */
  moves = 0;
  private lastLinkNo = 0;
  private move: Move | null = null;
  private firstGone = false; // the link that stood is gone, the move's commit may come any moment
  private syncedElsewhere = false; // a second link's Sync is unanswered: it may have replaced the first
  private toldReplaced = false; // it has, or somebody else
  private readonly requests: Requests;
  private session: Session | null;
  private candidate: Session | null = null; // of this link, until its Sync is answered
  private token: string | null = null;
  private tokenRefused = false; // since the last commit
  private readonly book: Gateways;
  private readonly race: Race;
  private list: string[] | null = null; // a fresh one, until a round takes it
  private listAsked = false;
  private step: Step = "waiting";
  private untilMs = 0; // waiting: when it is over
  private address: string | null = null;
  private readonly backoff: Backoff;
  private roundMs = -HURRY_MS; // when the last round began
  private liveSinceMs = 0;
  private hellos = 0; // on this link
  private beatMs = 0; // when the next heartbeat is due
  private loggingOut = false;
  private code: number | null = null;
  private detail = ""; // what the code's own words do not say
  private shown: State | null = null;

  constructor(snapshot: Snapshot, private readonly options: MachineOptions) {
    const { chance } = options;
    this.deviceId = snapshot.deviceId;
    this.traffic = new Traffic(snapshot, this.timing, chance, options.tail);
    this.requests = this.traffic.requests;
    this.session = snapshot.session;
    this.book = new Gateways(options.gateways, snapshot.gateways, snapshot.lastGateway);
    this.race = new Race(this.book, this.timing);
    this.backoff = new Backoff(chance);
  }

  // ── the edge's calls ─────────────────────────────────────────────────────────────────────────────────────────

  get user(): string | null {
    return this.traffic.user;
  }

  get state(): State {
    return { phase: PHASES[this.step], code: this.code, address: this.address, user: this.user, detail: this.detail };
  }

  /** When the next round begins; null: one runs, or a connection stands, or there will be none. */
  get nextRoundMs(): number | null {
    return this.step === "waiting" ? this.untilMs : null;
  }

  /** Begin the first round. */
  start(nowMs: number): void {
    this.beginRound(nowMs);
  }

  /** The user is known before the platform said so (by the token that the edge holds). */
  named(user: string): void {
    if (this.traffic.user !== null) return;
    this.traffic.user = user;
    this.out.writes.meta.set("user", user);
  }

  /** The answer to `wantList`: addresses, best first, or null if none came. */
  listed(addresses: string[] | null, nowMs: number): void {
    this.listAsked = false;
    if (addresses && addresses.length > 0 && addresses.join("\n") !== this.book.listed.join("\n"))
      this.out.writes.meta.set("gateways", addresses.join("\n"));
    if (this.step === "waiting") this.list = addresses;
    else if (this.step === "listing") {
      this.list = addresses;
      this.openRound(nowMs);
    } else if (this.move && !this.move.running) {
      this.move.more(addresses ?? this.book.known);
      this.nextWay(nowMs);
    }
  }

  /** The answer to `wantToken`; null: the provider failed. */
  tokened(token: string | null, nowMs: number): void {
    this.token = token;
    if (this.step === "token") {
      if (token === null) this.waitLonger(nowMs);
      else this.nextGateway(nowMs);
    } else if (this.step === "hello" && this.requests.size === 0) {
      if (token === null) this.drop(nowMs);
      else this.hello(nowMs);
    }
  }

  /** The link is open. False: it is not wanted any more, close it. */
  opened(linkNo: number, nowMs: number): boolean {
    if (this.move && linkNo === this.move.linkNo) {
      this.move.opened(nowMs);
      return true;
    }
    const address = this.race.won(linkNo);
    if (address === undefined) return false;
    this.linkNo = linkNo;
    this.address = address;
    this.out.giveUp.push(...this.race.cancel());
    this.step = "hello";
    this.hellos = 1;
    this.hello(nowMs);
    return true;
  }

  /** The link could not be opened, or is gone. code: why, where the close's status said so. */
  closed(linkNo: number, nowMs: number, code: number | null = null): void {
    if (this.move && linkNo === this.move.linkNo) this.wayFailed(nowMs);
    else if (this.race.failed(linkNo, nowMs)) this.runRace(nowMs);
    else if (linkNo === this.linkNo && this.linked) {
      if (code !== null) this.ended(code, nowMs);
      else this.lost(nowMs);
    }
  }

  /** Frames came, in order. A frame that cannot be read ends the link: its content would be missed in silence. */
  frames(linkNo: number, payloads: Uint8Array[], nowMs: number): void {
    for (const payload of payloads) {
      if (this.move && linkNo === this.move.linkNo) {
        this.moving(this.move.frame(payload, nowMs), nowMs);
        if (linkNo !== this.linkNo) continue;
      }
      if (this.firstGone || linkNo !== this.linkNo || !this.linked) return;
      try {
        this.frame(payload, nowMs);
      } catch (e) {
        if (!(e instanceof PeerError)) throw e;
        this.noteCode(Code.MALFORMED);
        this.drop(nowMs);
      }
    }
  }

  /** The network changed, or came back: a connection that stands is asked whether it lives, else a round begins now. */
  hurry(nowMs: number): void {
    if (this.step === "waiting") this.untilMs = Math.min(this.untilMs, Math.max(nowMs, this.roundMs + HURRY_MS));
    else if (this.step === "live") this.traffic.beat(nowMs);
  }

  /** Time passed. To be called once the input at hand is handed in. */
  tick(nowMs: number): void {
    if (this.step === "waiting") {
      if (nowMs >= this.untilMs) this.beginRound(nowMs);
    } else if (this.step === "connecting") this.runRace(nowMs);
    else if (this.firstGone && this.move) this.moving(this.move.tick(nowMs), nowMs);
    else if (this.linked) {
      if (this.move?.running) this.moving(this.move.tick(nowMs), nowMs);
      const again = this.requests.expire(nowMs);
      if (again === null || (this.live && !this.traffic.outbox.expire(nowMs))) {
        this.book.avoid(this.address);
        this.drop(nowMs);
        return;
      }
      this.out.frames.push(...again);
      if (!this.live) return;
      this.traffic.spread(nowMs);
      if (nowMs >= this.beatMs) {
        this.nextBeat(nowMs);
        this.traffic.beat(nowMs);
      }
    }
  }

  /** When `tick` has something to do next; null: time decides nothing now. */
  deadlineMs(): number | null {
    if (this.step === "waiting") return this.untilMs;
    if (this.step === "connecting") return this.race.deadlineMs();
    if (!this.linked) return null;
    const moves = this.move?.running ? this.move.deadlineMs() : null;
    if (this.firstGone) return moves;
    const live = this.live ? soonest(this.traffic.deadlineMs(), this.beatMs) : null;
    return soonest(moves, this.requests.deadlineMs(), live);
  }

  /** Puts a message into the outbox. Throws OutboxFull. */
  send(conversationId: string, clientMsgId: string, toUser: string, msgType: number, body: Uint8Array, madeAtMs: number): Entry {
    return this.traffic.send(conversationId, clientMsgId, toUser, msgType, body, madeAtMs);
  }

  /** Ends the session on the platform as soon as a connection is live, then stops. */
  logout(nowMs: number): void {
    this.loggingOut = true;
    if (this.move && (this.firstGone || this.move.step === "committing")) return; // it is ended on the second link
    if (this.step === "live") {
      this.stay();
      this.out.frames.push(this.requests.ask(CmdType.LOGOUT, 0, wire.logout(), nowMs));
    }
  }

  /** No further attempt. With a final code the session is forgotten, else (null) it waits for the next start. */
  stop(code: number | null, detail = ""): void {
    if (this.step === "stopped") return;
    this.endSession();
    this.out.giveUp.push(...this.race.cancel());
    this.out.connects = [];
    this.out.wantList = this.out.wantToken = false;
    this.out.close = true;
    this.step = "stopped";
    this.code = code;
    this.detail = detail;
    this.address = null;
    if (code !== null) this.forgetSession();
  }

  /** Ends the round: what is to be done now. */
  take(nowMs: number): Effects {
    this.traffic.flush(nowMs);
    const state = this.state;
    if (JSON.stringify(state) !== JSON.stringify(this.shown)) {
      this.shown = state;
      this.out.notices.push({ kind: "state", state });
    }
    const out = this.out;
    out.linkNo = this.linkNo;
    if (this.move) {
      out.secondFrames = this.move.frames;
      this.move.frames = [];
    }
    this.traffic.out = noEffects();
    return out;
  }

  private get out(): Effects {
    return this.traffic.out;
  }

  private get live(): boolean {
    return this.step === "live";
  }

  private get linked(): boolean {
    return this.step === "hello" || this.step === "committing" || this.step === "live";
  }

  // ── rounds: which gateway, when ──────────────────────────────────────────────────────────────────────────────

  private beginRound(nowMs: number): void {
    this.roundMs = nowMs;
    this.backoff.beginRound();
    if (this.options.listing && this.list === null) {
      this.step = "listing";
      this.askList();
    } else this.openRound(nowMs);
  }

  private askList(): void {
    if (this.options.listing && !this.listAsked) this.listAsked = this.out.wantList = true;
  }

  private openRound(nowMs: number): void {
    this.book.beginRound(this.list, this.options.chance);
    this.list = null;
    this.nextGateway(nowMs);
  }

  private nextGateway(nowMs: number): void {
    this.address = null;
    if (this.session === null && this.token === null) {
      this.step = "token";
      this.askToken();
      return;
    }
    this.step = "connecting";
    this.runRace(nowMs);
  }

  /** Gives up what took too long, begins what is due. */
  private runRace(nowMs: number): void {
    this.out.giveUp.push(...this.race.expire(nowMs));
    for (let address = this.race.next(nowMs); address !== undefined; address = this.race.next(nowMs)) {
      this.linkNo = this.newLinkNo();
      this.address = address;
      this.race.started(this.linkNo, address, nowMs);
      this.out.connects.push({ linkNo: this.linkNo, address });
    }
    if (this.race.lost) this.waitLonger(nowMs);
  }

  private newLinkNo(): number {
    this.lastLinkNo += 1;
    return this.lastLinkNo;
  }

  /** A round failed: exponential back-off, then a fresh list. */
  private waitLonger(nowMs: number): void {
    if (!this.backoff.told) this.code = null; // an older code is not why
    this.wait(nowMs, this.backoff.failedMs());
  }

  private wait(nowMs: number, delayMs: number): void {
    this.step = "waiting";
    this.address = null;
    this.untilMs = nowMs + delayMs;
    this.list = null;
    if (delayMs <= FRESH_LIST_MS) this.askList(); // so that it is there when the wait ends; later it would be old
  }

  /** Close the link ourselves and go on elsewhere. */
  private drop(nowMs: number): void {
    this.out.close = true;
    this.lost(nowMs);
  }

  /** The link is gone. A committed one resumes after the random delay; an attempt goes on with the next gateway. */
  private lost(nowMs: number): void {
    const was = this.step;
    if (was === "live" && this.move?.running) {
      this.firstGone = true;
      return;
    }
    this.endSession();
    if (this.loggingOut) this.stop(Code.LOGGED_OUT);
    else if (was !== "live") this.nextGateway(nowMs);
    else this.wait(nowMs, this.backoff.lostMs(nowMs - this.liveSinceMs, this.timing.reconnectDelayMs));
  }

  private endSession(): void {
    this.stay();
    this.candidate = null;
    this.traffic.end();
  }

  // ── login, resume, commit ────────────────────────────────────────────────────────────────────────────────────

  private askToken(): void {
    this.out.wantToken = true;
    this.out.freshToken = this.tokenRefused;
  }

  private hello(nowMs: number): void {
    if (this.session) this.out.frames.push(this.requests.ask(CmdType.RECONN, 0, wire.reconn(this.session), nowMs));
    else if (this.token !== null) {
      const frame = wire.login(this.deviceId, this.token, this.options.platform, VERSION);
      this.out.frames.push(this.requests.ask(CmdType.LOGIN, 0, frame, nowMs));
    } else this.askToken();
  }

  /** Login or ReConn anew on this socket; a socket on which that does not help is left. */
  private helloAgain(nowMs: number): void {
    this.endSession();
    this.step = "hello";
    this.hellos += 1;
    if (this.hellos > HELLOS_PER_LINK) this.drop(nowMs);
    else this.hello(nowMs);
  }

  /** A code of the range "log in": the session is done. A token refused twice in a row waits for better times. */
  private logInAgain(code: number, nowMs: number): void {
    if (this.toldReplaced && code === Code.SECRET_WRONG) {
      this.stop(Code.REPLACED); // by somebody else: to log in would be to take turns with them for ever
      return;
    }
    this.noteCode(code);
    this.forgetSession();
    if (TOKEN_CODES.includes(code)) {
      this.token = null;
      if (this.tokenRefused) {
        this.endSession();
        this.out.close = true;
        this.waitLonger(nowMs);
        return;
      }
      this.tokenRefused = true;
    }
    this.helloAgain(nowMs);
  }

  /** Login or ReConn was answered with OK: now the Sync that commits. */
  private welcomed(ack: ACKMsg, nowMs: number): void {
    this.timing.tune(ack);
    if (ack.userId && ack.userId !== this.user) {
      if (this.user !== null) {
        // the store is another user's: mixing the two would be worse than stopping
        this.stop(Code.TOKEN_INVALID, `the token belongs to ${ack.userId}, not to ${this.user}`);
        return;
      }
      this.named(ack.userId);
    }
    this.candidate = sessionOf(ack, this.session);
    this.step = "committing";
    this.traffic.startSync(nowMs);
  }

  /** The first Sync was answered: this session is the one to resume, and the outbox goes out again, in order. */
  private committed(run: bigint, pushNo: number, nowMs: number): void {
    this.stands(nowMs);
    this.traffic.begin(run, pushNo);
    if (this.loggingOut) this.logout(nowMs);
  }

  /** The candidate's session is the one that a later ReConn names. */
  private stands(nowMs: number): void {
    this.step = "live";
    this.liveSinceMs = nowMs;
    this.code = null;
    this.tokenRefused = this.syncedElsewhere = this.toldReplaced = false;
    if (this.candidate) {
      this.session = this.candidate;
      this.out.writes.meta.set("session", `${this.session.connId} ${this.session.secret}`);
    }
    if (this.address !== null && this.book.served(this.address)) this.out.writes.meta.set("lastGateway", this.address);
    this.nextBeat(nowMs);
  }

  private nextBeat(nowMs: number): void {
    this.beatMs = nowMs + Math.floor(this.timing.heartbeatMs * (1 - this.options.chance() / 10));
  }

  // ── going over to another gateway ────────────────────────────────────────────────────────────────────────────

  /** This gateway is about to close: go on through another one, and leave it when that stands. */
  private redirected(redirect: RedirectMsg, nowMs: number): void {
    if (this.address === null || !this.live || this.move || this.loggingOut || !this.session) return;
    const found = ways(redirect, this.address, this.options.chance);
    this.move = new Move(this.session, this.address, found, this.traffic, this.timing, this.options.chance);
    this.nextWay(nowMs);
  }

  private nextWay(nowMs: number): void {
    const move = this.move;
    if (!move) return;
    if (move.nextWay(this.newLinkNo(), nowMs)) this.out.second = { linkNo: move.linkNo, address: move.address };
    else if (move.listed) this.move = null; // we stay; the Redirect comes again
    else {
      move.listed = true;
      if (this.options.listing) this.askList();
      else {
        move.more(this.book.known);
        this.nextWay(nowMs);
      }
    }
  }

  /** The second link is of no use. Without a first one this is a lost connection as any other. */
  private wayFailed(nowMs: number): void {
    const move = this.move;
    if (!move) return;
    this.out.secondClose = true;
    this.out.second = null;
    if (move.code === Code.REPLACED || (move.code === Code.SECRET_WRONG && this.toldReplaced)) this.stop(Code.REPLACED);
    else if (this.firstGone) {
      this.stay();
      this.lost(nowMs);
    } else if (this.loggingOut) {
      this.stay();
      this.logout(nowMs);
    } else this.nextWay(nowMs);
  }

  private moving(outcome: Outcome, nowMs: number): void {
    if (this.move?.step === "committing") this.syncedElsewhere = true;
    if (outcome === "failed") this.wayFailed(nowMs);
    else if (outcome === "committed") this.wentOver(nowMs);
  }

  /** The second link's Sync was answered: from now on it is the client's only one. */
  private wentOver(nowMs: number): void {
    const move = this.move!;
    this.move = null;
    this.firstGone = false;
    if (move.welcome) this.timing.tune(move.welcome);
    this.moves += 1;
    this.linkNo = move.linkNo;
    this.address = move.address;
    this.candidate = move.candidate;
    this.stands(nowMs);
    this.traffic.goOver(move.sync!, ...move.committed, nowMs);
    this.out.goOver = true;
    this.out.close = false;
    this.out.second = null;
    this.out.secondClose = false;
    if (this.loggingOut) this.logout(nowMs);
  }

  /** No second link. */
  private stay(): void {
    if (this.move?.running) {
      this.out.secondClose = true;
      this.out.second = null;
    }
    this.move = null;
    this.firstGone = false;
  }

  private noteCode(code: number): void {
    this.code = code;
    this.backoff.told = true;
  }

  private forgetSession(): void {
    if (!this.session) return;
    this.session = null;
    this.out.writes.meta.set("session", "");
  }

  // ── frames and codes ─────────────────────────────────────────────────────────────────────────────────────────

  private frame(payload: Uint8Array, nowMs: number): void {
    const cmd = wire.openCmd(payload);
    const bytes = cmd.Payload;
    const numbered = cmd.run !== 0n && NUMBERED.includes(cmd.Type);
    if (numbered && !this.traffic.arrived(cmd.run, wire.count(cmd.pushNo), nowMs)) return;
    switch (cmd.Type) {
      case CmdType.PUSH:
        return this.traffic.pushed(wire.parse(PushMsgSchema, bytes), numbered, nowMs);
      case CmdType.RECEIPT:
        return this.traffic.receipt(wire.parse(ReceiptMsgSchema, bytes), numbered, nowMs);
      case CmdType.NOTIFY:
        return this.traffic.notified(wire.parse(NotifyMsgSchema, bytes), numbered, nowMs);
      case CmdType.STATE:
        return this.traffic.stated(wire.parse(StateMsgSchema, bytes), nowMs);
      case CmdType.READ:
        return this.traffic.read(wire.parse(ReadMsgSchema, bytes));
      case CmdType.TYPING:
        return this.traffic.typed(wire.parse(TypingMsgSchema, bytes));
      case CmdType.ACK:
        return this.ack(wire.parse(ACKMsgSchema, bytes), nowMs);
      case CmdType.SYNCED:
        return this.synced(wire.parse(SyncedMsgSchema, bytes), nowMs);
      case CmdType.PULLED: {
        const page = wire.parse(PulledMsgSchema, bytes);
        const request = this.requests.find(CmdType.PULL, Number(page.ref));
        if (!request) return;
        if (page.code !== 0) return this.coded(request, page.code, nowMs, page.retryMs);
        return this.traffic.pulled(page, request, nowMs);
      }
      case CmdType.REDIRECT:
        return this.redirected(wire.parse(RedirectMsgSchema, bytes), nowMs);
      case CmdType.KICK:
        return this.ended(wire.parse(KickMsgSchema, bytes).code, nowMs);
      case CmdType.ERROR:
        return this.error(wire.parse(ErrorMsgSchema, bytes), nowMs);
      default: // a type of a newer platform
    }
  }

  private ack(ack: ACKMsg, nowMs: number): void {
    if (ack.Type === CmdType.UP) {
      if (this.traffic.upAnswered(ack, nowMs) || !this.live) return;
      if (ack.Code === Code.SYNC_FIRST) this.traffic.resync(nowMs);
      else this.ended(ack.Code, nowMs);
      return;
    }
    if (ack.Type === CmdType.READ) return this.traffic.readAnswered(ack, nowMs);
    const ref = Number(ack.ref);
    const request = this.requests.find(ack.Type, ref);
    if (!request) return;
    if (ack.Code !== 0 || ack.Type === CmdType.PULL) this.coded(request, ack.Code, nowMs, ack.retryMs);
    else if (ack.Type === CmdType.LOGIN || ack.Type === CmdType.RECONN) {
      this.requests.done(ack.Type, ref);
      this.welcomed(ack, nowMs);
    } else if (ack.Type === CmdType.SYNC) {
      this.requests.pending(request, nowMs); // its page follows
      if (this.step === "committing") this.committed(ack.run, wire.clipped(ack.pushNo), nowMs);
    } else if (ack.Type === CmdType.HEARTBEAT) {
      this.requests.done(ack.Type, ref);
      if (ack.heartbeatMs !== 0 && ack.heartbeatMs !== this.timing.heartbeatMs) {
        this.timing.heartbeatMs = ack.heartbeatMs;
        this.nextBeat(nowMs);
      }
      this.traffic.newest(ack.run, wire.clipped(ack.pushNo), nowMs);
    } else if (ack.Type === CmdType.LOGOUT) this.stop(Code.LOGGED_OUT);
  }

  private synced(page: SyncedMsg, nowMs: number): void {
    const request = this.requests.find(CmdType.SYNC, Number(page.ref));
    if (!request) return;
    if (page.code !== 0) return this.coded(request, page.code, nowMs, page.retryMs);
    if (this.step === "committing") this.committed(0n, 0, nowMs); // its ACK was lost
    this.traffic.synced(page, request, nowMs);
  }

  /** A request was answered with something else than its result. */
  private coded(request: Request, code: number, nowMs: number, retryMs = 0): void {
    const act = action(code);
    if (act === Action.NONE) this.requests.pending(request, nowMs);
    else if (act === Action.RECONNECT || act === Action.LOGIN) this.ended(code, nowMs);
    else if (act === Action.STOP) {
      if (request.kind === CmdType.PULL) this.traffic.pullRefused(request);
      else if (request.kind === CmdType.LOGIN || request.kind === CmdType.RECONN || code <= CONNECTION_STOP_MAX) this.stop(code);
      else this.requests.putOff(request, nowMs);
    } else if (code === Code.TRY_AGAIN && request.kind === CmdType.SYNC && this.step === "committing") this.helloAgain(nowMs);
    else {
      this.requests.putOff(request, nowMs, retryMs);
      if (code === Code.SYNC_FIRST && request.kind !== CmdType.SYNC) this.traffic.resync(nowMs);
    }
  }

  /** A refusal that belongs to no other frame, or the reason of a close that follows. */
  private error(error: ErrorMsg, nowMs: number): void {
    const { code, type, retryMs } = error;
    const ref = Number(error.ref);
    const request = this.requests.find(type, ref) ?? (ref === 0 ? this.requests.only(type) : undefined);
    const act = action(code);
    if (retryMs !== 0) this.backoff.stayAway(retryMs);
    if (act === Action.LOGIN && !request && !this.live) return; // it answers what was sent before our Login or ReConn
    if ((type === CmdType.READ || type === CmdType.TYPING) && (act === Action.RETRY || act === Action.STOP)) {
      this.traffic.readRefused(ref, code, nowMs); // also a platform that does not know them: nothing of it ends a connection
    } else if (act === Action.RECONNECT || act === Action.LOGIN || (act === Action.STOP && code <= CONNECTION_STOP_MAX))
      this.ended(code, nowMs);
    else if (request) this.coded(request, code, nowMs);
    else if (this.live && code === Code.SYNC_FIRST) this.traffic.resync(nowMs);
    else if (this.live && type === CmdType.UP && act === Action.RETRY) this.traffic.outbox.laterAll(nowMs);
  }

  /** A code that is about the session or the socket. */
  private ended(code: number, nowMs: number): void {
    if (code === Code.REPLACED && this.syncedElsewhere) {
      this.toldReplaced = true; // most likely by our own Sync, whose answer is on its way
      this.drop(nowMs);
      return;
    }
    this.noteCode(code);
    const act = action(code);
    if (act === Action.STOP) this.stop(code);
    else if (act === Action.LOGIN) this.logInAgain(code, nowMs);
    else {
      const full: number[] = [Code.GATEWAY_CLOSING, Code.GATEWAY_FULL, Code.ADDRESS_BUSY];
      if (full.includes(code)) this.book.avoid(this.address);
      this.drop(nowMs);
    }
  }
}
