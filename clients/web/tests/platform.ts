// A platform small enough to read: one user's conversations, connections with sessions, runs and push numbers. It keeps the
// rules of docs/protocol.md; the test decides what gets lost on the way.
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, MessageInitShape } from "@bufbuild/protobuf";
import { compareIds, hex } from "../src/core/bytes";
import { Code } from "../src/core/codes";
import {
  ACKMsgSchema, CmdType, ErrorMsgSchema, HeartbeatMsgSchema, KickMsgSchema, LoginMsgSchema, MsgCmdSchema, NotifyMsgSchema, PullMsgSchema,
  PulledMsgSchema, PushMsgSchema, ReConnMsgSchema, ReadMsgSchema, ReceiptMsgSchema, RedirectMsgSchema, StateMsgSchema, SyncMsgSchema,
  SyncedMsgSchema, UPMsgSchema,
} from "../src/wire/client_pb";

/** mulberry32: numbers in [0, 1) that depend on the seed alone. */
export function chanceOf(seed: number): () => number {
  let a = seed;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

export interface Stored {
  seq: number;
  prevSeq: number;
  msgId: number;
  from: string;
  key: string;
  clientId: number;
  body: Uint8Array;
}

export interface Connection {
  no: number;
  connId: bigint;
  hello: boolean;
  committed: boolean;
  run: bigint;
  pushNo: number;
  known: Map<string, number>; // conversation → greatest client_id in order
}

export type Deliver = (connection: Connection, frame: Uint8Array) => void;

export class Platform {
  conversations = new Map<string, Stored[]>();
  connections = new Map<number, Connection>();
  live: Connection | null = null;
  version = 0n;
  pins = new Map<string, { version: bigint; atMs: number }>();
  reads = new Map<string, number>();
  resumes = 0;
  commits = 0;
  private secret = Uint8Array.from({ length: 16 }, (_, i) => i);
  private session: bigint | null = null; // conn_id that a RECONN may name
  private nextConn = 100n;
  private nextRun = 1n;
  private nextMsgId = 1;

  constructor(readonly user: string, private readonly chance: () => number, private readonly deliver: Deliver) {}

  open(no: number): void {
    this.connections.set(no, {
      no, connId: this.nextConn++, hello: false, committed: false, run: 0n, pushNo: 0, known: new Map(),
    });
  }

  close(no: number): void {
    const gone = this.connections.get(no);
    this.connections.delete(no);
    if (gone === this.live) this.live = null;
  }

  /** Somebody else writes. */
  write(conversationId: string, from: string, text: string): void {
    const row = this.append(conversationId, from, `other ${this.nextMsgId}`, 0, new TextEncoder().encode(text));
    this.push(conversationId, row);
  }

  /** Another device of the user pins something. */
  pin(conversationId: string, atMs: number): void {
    const prevVersion = this.version++;
    this.pins.set(conversationId, { version: this.version, atMs });
    this.numbered(CmdType.STATE, StateMsgSchema, {
      version: this.version, prevVersion, conversations: [{ conversationId, pinnedAtMs: BigInt(atMs) }],
    });
  }

  /** The shard began anew: a greater run. */
  newRun(): void {
    if (!this.live) return;
    this.live.run = this.nextRun++;
    this.live.pushNo = 0;
    this.live.known.clear();
    this.numbered(CmdType.NOTIFY, NotifyMsgSchema, {});
  }

  redirect(port: number): void {
    if (this.live) this.send(this.live, CmdType.REDIRECT, RedirectMsgSchema, { gateways: [{ name: "edge", ip: "127.0.0.1", port: 1, wsPort: port }] });
  }

  receive(no: number, frame: Uint8Array): void {
    const connection = this.connections.get(no);
    if (!connection) return;
    const cmd = fromBinary(MsgCmdSchema, frame);
    const c = connection;
    switch (cmd.Type) {
      case CmdType.LOGIN: {
        const login = fromBinary(LoginMsgSchema, cmd.Payload);
        if (!login.Head?.DeviceID || login.token !== "token") throw new Error("a bad login");
        c.hello = true;
        return this.ack(c, CmdType.LOGIN, { ConnID: c.connId, secret: this.secret, userId: this.user, heartbeatMs: 30_000, reconnectDelayMs: 1_000 });
      }
      case CmdType.RECONN: {
        const reconn = fromBinary(ReConnMsgSchema, cmd.Payload);
        if (reconn.Head?.ConnID !== this.session) return this.ack(c, CmdType.RECONN, { Code: Code.SECRET_WRONG });
        if (hex(reconn.secret) !== hex(this.secret)) throw new Error("a bad secret");
        c.hello = true;
        this.resumes += 1;
        return this.ack(c, CmdType.RECONN, { ConnID: c.connId, userId: this.user, heartbeatMs: 30_000, reconnectDelayMs: 1_000 });
      }
      case CmdType.SYNC:
        return this.sync(c, cmd.Payload);
      case CmdType.PULL:
        return this.pull(c, cmd.Payload);
      case CmdType.UP:
        return this.up(c, cmd.Payload);
      case CmdType.READ: {
        const read = fromBinary(ReadMsgSchema, cmd.Payload);
        const newest = this.newest(read.conversationId);
        const stands = Math.max(this.reads.get(read.conversationId) ?? 0, Math.min(Number(read.seq), newest));
        this.reads.set(read.conversationId, stands);
        return this.ack(c, CmdType.READ, { ref: read.ref, expected: BigInt(stands) });
      }
      case CmdType.HEARTBEAT:
        fromBinary(HeartbeatMsgSchema, cmd.Payload);
        return this.ack(c, CmdType.HEARTBEAT, { run: c.run, pushNo: BigInt(c.pushNo) });
      case CmdType.LOGOUT:
        this.session = null;
        return this.send(c, CmdType.KICK, KickMsgSchema, { code: Code.LOGGED_OUT });
    }
  }

  newest(conversationId: string): number {
    const rows = this.conversations.get(conversationId) ?? [];
    return rows[rows.length - 1]?.seq ?? 0;
  }

  private append(conversationId: string, from: string, key: string, clientId: number, body: Uint8Array): Stored {
    const rows = this.conversations.get(conversationId) ?? [];
    this.conversations.set(conversationId, rows);
    const prevSeq = this.newest(conversationId);
    const seq = prevSeq + 1 + (this.chance() < 0.2 ? Math.floor(this.chance() * 5) : 0); // numbers may be skipped
    const row = { seq, prevSeq, msgId: this.nextMsgId++, from, key, clientId, body };
    rows.push(row);
    return row;
  }

  private push(conversationId: string, row: Stored): void {
    this.numbered(CmdType.PUSH, PushMsgSchema, this.pushOf(conversationId, row));
  }

  private pushOf(conversationId: string, row: Stored): MessageInitShape<typeof PushMsgSchema> {
    const clientMsgId = row.key.length === 32 ? Uint8Array.from(row.key.match(/../g)!, (x) => parseInt(x, 16)) : new Uint8Array();
    return {
      MsgID: BigInt(row.msgId), Content: row.body, conversationId, seq: BigInt(row.seq), prevSeq: BigInt(row.prevSeq), fromUser: row.from,
      clientMsgId, serverAtMs: 1n,
    };
  }

  private up(c: Connection, payload: Uint8Array): void {
    const up = fromBinary(UPMsgSchema, payload);
    const conversationId = up.Head!.SessionId;
    const clientId = Number(up.Head!.ClientID);
    const name = { ClientID: up.Head!.ClientID, conversationId, clientMsgId: up.clientMsgId };
    if (!c.committed) return this.ack(c, CmdType.UP, { ...name, Code: Code.SYNC_FIRST });
    const known = c.known.get(conversationId) ?? 0;
    const expected = Math.max(known, Number(up.acked)) + 1;
    if (clientId > expected) return this.ack(c, CmdType.UP, { ...name, Code: Code.EXPECTED, expected: BigInt(expected) });
    if (this.chance() < 0.05) {
      c.known.set(conversationId, Math.min(known, clientId - 1));
      return this.ack(c, CmdType.UP, { ...name, Code: Code.BUSY });
    }
    c.known.set(conversationId, Math.max(known, clientId));
    const key = hex(up.clientMsgId);
    let row = this.conversations.get(conversationId)?.find((r) => r.key === key);
    const fresh = row === undefined;
    row ??= this.append(conversationId, this.user, key, clientId, up.UPMsgBody);
    this.ack(c, CmdType.UP, { ...name, Code: fresh ? Code.OK : Code.DUPLICATE });
    this.numbered(CmdType.RECEIPT, ReceiptMsgSchema, {
      code: 0, conversationId, clientMsgId: up.clientMsgId, clientId: BigInt(clientId), msgId: BigInt(row.msgId), seq: BigInt(row.seq),
      prevSeq: BigInt(row.prevSeq), serverAtMs: 1n,
    });
  }

  private sync(c: Connection, payload: Uint8Array): void {
    const sync = fromBinary(SyncMsgSchema, payload);
    if (!c.hello) return this.send(c, CmdType.ERROR, ErrorMsgSchema, { code: Code.LOGIN_FIRST });
    if (!c.committed) {
      if (this.live && this.live !== c) {
        this.live.committed = false;
        this.send(this.live, CmdType.KICK, KickMsgSchema, { code: Code.REPLACED });
      }
      c.committed = true;
      this.live = c;
      this.session = c.connId;
      c.run = this.nextRun++;
      this.commits += 1;
    }
    this.ack(c, CmdType.SYNC, { ref: sync.ref, run: c.run, pushNo: BigInt(c.pushNo) });
    const cursors = new Map(sync.cursors.map((x) => [x.conversationId, Number(x.seq)]));
    const ids = [...this.conversations.keys()].filter((id) => compareIds(id, sync.afterId) > 0 && (!sync.uptoId || compareIds(id, sync.uptoId) <= 0));
    const newer = ids.sort(compareIds).filter((id) => !cursors.has(id) || this.newest(id) > cursors.get(id)!);
    const page = newer.slice(0, 3);
    const state = sync.wantState
      ? {
          version: this.version,
          conversations: [...this.pins].filter(([, p]) => p.version > sync.stateVersion).map(([conversationId, p]) => ({ conversationId, pinnedAtMs: BigInt(p.atMs), readSeq: BigInt(this.reads.get(conversationId) ?? 0) })),
        }
      : undefined;
    this.send(c, CmdType.SYNCED, SyncedMsgSchema, {
      ref: sync.ref,
      items: page.map((conversationId) => ({ conversationId, newestSeq: BigInt(this.newest(conversationId)) })),
      more: newer.length > page.length,
      coveredId: newer.length > page.length ? page[page.length - 1] : sync.uptoId,
      state,
    });
  }

  private pull(c: Connection, payload: Uint8Array): void {
    const pull = fromBinary(PullMsgSchema, payload);
    const rows = this.conversations.get(pull.conversationId) ?? [];
    const from = Math.max(1, Number(pull.fromSeq));
    const to = Number(pull.toSeq) || this.newest(pull.conversationId);
    const inside = rows.filter((r) => r.seq >= from && r.seq <= to);
    const limit = Math.max(1, Math.floor(this.chance() * Math.min(pull.limit || 100, 8)) + 1);
    const page = pull.newestFirst ? inside.slice(-limit) : inside.slice(0, limit);
    const cut = page.length < inside.length;
    this.send(c, CmdType.PULLED, PulledMsgSchema, {
      ref: pull.ref,
      conversationId: pull.conversationId,
      rows: page.map((r) => this.pushOf(pull.conversationId, r)),
      coveredFrom: BigInt(pull.newestFirst && cut ? page[0]!.prevSeq + 1 : from),
      coveredTo: BigInt(!pull.newestFirst && cut ? page[page.length - 1]!.seq : to),
      newestSeq: BigInt(this.newest(pull.conversationId)),
    });
  }

  private ack(c: Connection, Type: CmdType, init: MessageInitShape<typeof ACKMsgSchema>): void {
    this.send(c, CmdType.ACK, ACKMsgSchema, { ...init, Type });
  }

  private numbered<S extends DescMessage>(type: CmdType, schema: S, init: MessageInitShape<S>): void {
    const c = this.live;
    if (!c?.committed) return;
    c.pushNo += 1;
    const Payload = toBinary(schema, create(schema, init));
    this.deliver(c, toBinary(MsgCmdSchema, create(MsgCmdSchema, { Type: type, Payload, run: c.run, pushNo: BigInt(c.pushNo) })));
  }

  private send<S extends DescMessage>(c: Connection, type: CmdType, schema: S, init: MessageInitShape<S>): void {
    const Payload = toBinary(schema, create(schema, init));
    this.deliver(c, toBinary(MsgCmdSchema, create(MsgCmdSchema, { Type: type, Payload })));
  }
}
