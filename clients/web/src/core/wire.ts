// Builds the frames that a client sends and reads those it gets: protobuf in two steps, no length (WebSocket brings it).
import { type MessageInitShape, create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, MessageShape } from "@bufbuild/protobuf";
import { fromHex, hex } from "./bytes";
import { PeerError } from "./codes";
import type { Entry, Row, Session } from "./model";
import {
  ACKMsgSchema,
  CmdType,
  HeartbeatMsgSchema,
  LoginMsgSchema,
  LogoutMsgSchema,
  type MsgCmd,
  MsgCmdSchema,
  PullMsgSchema,
  type PulledMsg,
  type PushMsg,
  ReConnMsgSchema,
  ReadMsgSchema,
  SyncMsgSchema,
  TypingMsgSchema,
  UPMsgSchema,
} from "../wire/client_pb";

/** What a number of JavaScript counts exactly. Seqs count a conversation's messages: none comes near. */
export const MAX_SEQ = Number.MAX_SAFE_INTEGER;

function frame<S extends DescMessage>(kind: CmdType, schema: S, init: MessageInitShape<S>): Uint8Array {
  const Payload = toBinary(schema, create(schema, init));
  return toBinary(MsgCmdSchema, create(MsgCmdSchema, { Type: kind, Payload }));
}

export const login = (deviceId: string, token: string, platform: string, version: string): Uint8Array =>
  frame(CmdType.LOGIN, LoginMsgSchema, { Head: { DeviceID: BigInt(deviceId) }, token, platform, version });

/** ReConn into the session that was last committed. */
export const reconn = (session: Session): Uint8Array =>
  frame(CmdType.RECONN, ReConnMsgSchema, { Head: { ConnID: BigInt(session.connId) }, secret: fromHex(session.secret) });

/** Heartbeat with the newest (run, push_no) whose content is stored. */
export const heartbeat = (run: bigint, pushNo: number): Uint8Array =>
  frame(CmdType.HEARTBEAT, HeartbeatMsgSchema, { Head: {}, run, pushNo: BigInt(pushNo) });

/** Everything of `run` up to `pushNo` is stored. */
export const pushAck = (run: bigint, pushNo: number): Uint8Array =>
  frame(CmdType.ACK, ACKMsgSchema, { Type: CmdType.PUSH, run, pushNo: BigInt(pushNo) });

/** One uplink. Its client_msg_id is its trace id too: repeated sends are one trace. */
export function up(entry: Entry, acked: number): Uint8Array {
  const clientMsgId = fromHex(entry.clientMsgId);
  return frame(CmdType.UP, UPMsgSchema, {
    Head: { ClientID: BigInt(entry.clientId), SessionId: entry.conversationId },
    UPMsgBody: entry.body,
    acked: BigInt(acked),
    clientMsgId,
    toUser: entry.toUser,
    msgType: entry.msgType,
    traceId: clientMsgId,
  });
}

/** One page of Sync; cursors are sorted by the ids' UTF-8 bytes. */
export const sync = (
  ref: number, page: { afterId: string; uptoId: string; cursors: [string, number][] }, stateVersion: bigint | null,
): Uint8Array =>
  frame(CmdType.SYNC, SyncMsgSchema, {
    ref: BigInt(ref),
    afterId: page.afterId,
    uptoId: page.uptoId,
    cursors: page.cursors.map(([conversationId, seq]) => ({ conversationId, seq: BigInt(seq) })),
    wantState: stateVersion !== null,
    stateVersion: stateVersion ?? 0n,
  });

/** Rows fromSeq..toSeq (0: to the newest), the oldest `limit` of them, or the newest. */
export const pull = (
  ref: number, conversationId: string, fromSeq: number, toSeq: number, limit: number, newestFirst = false,
): Uint8Array =>
  frame(CmdType.PULL, PullMsgSchema, {
    ref: BigInt(ref), conversationId, fromSeq: BigInt(fromSeq), toSeq: BigInt(toSeq), limit, newestFirst,
  });

export const read = (ref: number, conversationId: string, seq: number): Uint8Array =>
  frame(CmdType.READ, ReadMsgSchema, { ref: BigInt(ref), conversationId, seq: BigInt(seq) });

export const typing = (conversationId: string, stopped: boolean): Uint8Array =>
  frame(CmdType.TYPING, TypingMsgSchema, { conversationId, stopped });

export const logout = (): Uint8Array => frame(CmdType.LOGOUT, LogoutMsgSchema, {});

/** Reads bytes as this message. Throws PeerError. */
export function parse<S extends DescMessage>(schema: S, bytes: Uint8Array): MessageShape<S> {
  try {
    return fromBinary(schema, bytes);
  } catch (e) {
    throw new PeerError(`a frame of the platform cannot be read: ${String(e)}`);
  }
}

export const openCmd = (payload: Uint8Array): MsgCmd => parse(MsgCmdSchema, payload);

/** A seq, or another number that is counted from 1. Throws PeerError for one that is none. */
export function count(value: bigint): number {
  if (value > BigInt(MAX_SEQ)) throw new PeerError(`${value} is beyond what is counted`);
  return Number(value);
}

/** As `count`, but a greater number is cut: of hints, which may be wrong. */
export const clipped = (value: bigint): number => Number(value > BigInt(MAX_SEQ) ? BigInt(MAX_SEQ) : value);

/** A Push or a pulled row. Throws PeerError for numbers that no store can keep. */
export function rowOf(push: PushMsg): Row {
  const seq = count(push.seq);
  const prevSeq = count(push.prevSeq);
  if (prevSeq >= seq) throw new PeerError(`seq ${seq} after ${prevSeq}`);
  return {
    conversationId: push.conversationId,
    seq,
    prevSeq,
    msgId: push.MsgID.toString(),
    fromUser: push.fromUser,
    msgType: push.msgType,
    body: push.Content,
    clientMsgId: hex(push.clientMsgId),
    serverAtMs: count(push.serverAtMs),
    changedSeq: count(push.changedSeq),
    recalled: push.recalled,
  };
}

/** The rows of a page, by rising seq; rows without a conversation_id take the page's. Throws PeerError. */
export function rowsOf(pulled: PulledMsg): Row[] {
  const rows = pulled.rows.map(rowOf);
  for (const row of rows) row.conversationId ||= pulled.conversationId;
  return rows.sort((a, b) => a.seq - b.seq);
}
