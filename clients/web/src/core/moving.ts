// The way to another gateway while the connection stands: a second link, from a REDIRECT to its own commit.
//
//   REDIRECT ──> connecting ──> hello (ReConn) ──> committing (first Sync) ──> committed: the machine goes over to it
//                    ^  └───── the next way, then those of a fresh list ─┘        none left: stay where we are
//
// Nothing here touches the connection that stands: it sends and receives until the Sync is answered. Once a Sync went out
// here, a REPLACED on the first link is most likely our own commit's, ahead of its ACK; that it was another's shows by
// SECRET_WRONG at the next ReConn. Memory: two requests, and the addresses of one REDIRECT or list.
import { Action, Code, PeerError, action } from "./codes";
import type { Session } from "./model";
import { type Request, Requests } from "./requests";
import type { Chance, Timing } from "./timing";
import type { FirstSync, Traffic } from "./traffic";
import * as wire from "./wire";
import { type ACKMsg, ACKMsgSchema, CmdType, type ErrorMsg, ErrorMsgSchema, KickMsgSchema, type RedirectMsg, SyncedMsgSchema } from "../wire/client_pb";

export const HELLOS_PER_LINK = 3;
/** A client begins at one of so many first ways, by chance: not all go to one gateway. */
export const FIRST = 3;

export type Outcome = "goes on" | "committed" | "failed";

/** The address of a gateway, reached as `current` is; "" where it cannot be. */
export function addressOf(ip: string, wsPort: number, secure: boolean): string {
  if (!ip || !wsPort) return "";
  return `${secure ? "wss" : "ws"}://${ip.includes(":") ? `[${ip}]` : ip}:${wsPort}/ws`;
}

/** The addresses to try for a REDIRECT that came on a link to `current`, in their order. */
export function ways(redirect: RedirectMsg, current: string, chance: Chance): string[] {
  const secure = current.startsWith("wss:");
  const found = redirect.gateways.map((g) => addressOf(g.ip, g.wsPort, secure)).filter((a) => a !== "");
  if (found.length > 1) found.unshift(...found.splice(Math.floor(chance() * Math.min(FIRST, found.length)), 1));
  return found;
}

/** One attempt to go over. `linkNo` is 0 while no link is wanted. */
export class Move {
  linkNo = 0;
  address = "";
  step: "listing" | "connecting" | "hello" | "committing" = "listing";
  /** To send on the second link; the machine takes them. */
  frames: Uint8Array[] = [];
  /** A fresh list was asked for; after it there is nothing more to try. */
  listed = false;
  /** Why it failed, where a code said so. */
  code = 0;
  welcome: ACKMsg | null = null;
  committed: [bigint, number] = [0n, 0];
  sync: FirstSync | null = null;
  candidate: Session | null = null;
  private readonly requests: Requests;
  private readonly tried: Set<string>;
  private untilMs = 0;
  private hellos = 0;

  /** session: the one that stands. current: where it stands now. */
  constructor(
    private readonly session: Session, current: string, private addresses: string[], private readonly traffic: Traffic,
    private readonly timing: Timing, chance: Chance,
  ) {
    this.requests = new Requests(timing, chance);
    this.tried = new Set([current]);
  }

  /** Whether a second link is open or opening. */
  get running(): boolean {
    return this.linkNo !== 0;
  }

  /** The fresh list. */
  more(addresses: string[]): void {
    this.addresses.push(...addresses);
  }

  /** Tries the next address, by this number. False: there is none left. */
  nextWay(linkNo: number, nowMs: number): boolean {
    this.cancel();
    for (let address = this.addresses.shift(); address !== undefined; address = this.addresses.shift()) {
      if (this.tried.has(address)) continue;
      this.tried.add(address);
      this.linkNo = linkNo;
      this.address = address;
      this.step = "connecting";
      this.untilMs = nowMs + this.timing.connectTimeoutMs;
      this.hellos = this.code = 0;
      return true;
    }
    return false;
  }

  /** The second link is not wanted any more. */
  cancel(): void {
    this.linkNo = 0;
    this.address = "";
    this.step = "listing";
    this.forget();
  }

  /** The second link is open. */
  opened(nowMs: number): void {
    this.hello(nowMs);
  }

  /** Time passed. */
  tick(nowMs: number): Outcome {
    if (this.step === "connecting" && nowMs >= this.untilMs) return "failed";
    const again = this.requests.expire(nowMs);
    if (again === null) return "failed";
    this.frames.push(...again);
    return "goes on";
  }

  deadlineMs(): number | null {
    return this.step === "connecting" ? this.untilMs : this.requests.deadlineMs();
  }

  /** A frame came on the second link. After "committed" it, and all that follow, are the machine's to handle. */
  frame(payload: Uint8Array, nowMs: number): Outcome {
    try {
      const cmd = wire.openCmd(payload);
      switch (cmd.Type) {
        case CmdType.ACK:
          return this.ack(wire.parse(ACKMsgSchema, cmd.Payload), nowMs);
        case CmdType.SYNCED: // the commit's ACK was lost
          return Number(wire.parse(SyncedMsgSchema, cmd.Payload).ref) === this.sync?.ref ? "committed" : "goes on";
        case CmdType.KICK:
          return this.failed(wire.parse(KickMsgSchema, cmd.Payload).code);
        case CmdType.ERROR:
          return this.error(wire.parse(ErrorMsgSchema, cmd.Payload), nowMs);
      }
    } catch (e) {
      if (!(e instanceof PeerError)) throw e;
      return this.failed(Code.MALFORMED);
    }
    return "goes on";
  }

  private forget(): void {
    this.requests.clear();
    this.frames = [];
    this.sync = this.welcome = this.candidate = null;
  }

  private hello(nowMs: number): void {
    this.forget();
    this.hellos += 1;
    this.step = "hello";
    this.frames.push(this.requests.ask(CmdType.RECONN, 0, wire.reconn(this.session), nowMs));
  }

  private ack(ack: ACKMsg, nowMs: number): Outcome {
    const request = this.requests.find(ack.Type, Number(ack.ref));
    if (!request) return "goes on";
    if (ack.Code !== 0) return this.coded(request, ack.Code, nowMs, ack.retryMs);
    if (ack.Type === CmdType.SYNC) {
      this.committed = [ack.run, wire.clipped(ack.pushNo)];
      return "committed";
    }
    this.requests.done(ack.Type, Number(ack.ref));
    if (ack.userId && ack.userId !== this.traffic.user) return this.failed(Code.TOKEN_INVALID);
    this.welcome = ack;
    this.candidate = sessionOf(ack, this.session);
    this.sync = this.traffic.firstSync();
    this.step = "committing";
    this.frames.push(this.requests.ask(CmdType.SYNC, this.sync.ref, this.sync.frame, nowMs));
    return "goes on";
  }

  private error(error: ErrorMsg, nowMs: number): Outcome {
    const request = this.requests.find(error.type, Number(error.ref)) ?? this.requests.only(error.type);
    if (request) return this.coded(request, error.code, nowMs, 0);
    const act = action(error.code);
    return act === Action.RECONNECT || act === Action.STOP ? this.failed(error.code) : "goes on";
  }

  private coded(request: Request, code: number, nowMs: number, retryMs: number): Outcome {
    const act = action(code);
    if (act === Action.NONE) this.requests.pending(request, nowMs);
    else if (act !== Action.RETRY) return this.failed(code);
    else if (code === Code.TRY_AGAIN && request.kind === CmdType.SYNC) {
      if (this.hellos >= HELLOS_PER_LINK) return this.failed(code);
      this.hello(nowMs);
    } else this.requests.putOff(request, nowMs, retryMs);
    return "goes on";
  }

  private failed(code: number): Outcome {
    this.code = code;
    return "failed";
  }
}

/** The session that an answered Login or ReConn brings; the secret stays where none is told. */
export function sessionOf(ack: ACKMsg, before: Session | null): Session {
  let secret = "";
  for (const byte of ack.secret) secret += byte.toString(16).padStart(2, "0");
  return { connId: ack.ConnID.toString(), secret: secret || (before?.secret ?? "") };
}
