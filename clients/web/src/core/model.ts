// What the core remembers and what it asks of its edge.
//
// A call into the machine changes memory and collects one `Effects`. The edge makes its `writes` durable first, in order, and
// only then sends its frames and tells its notices; so nothing is acknowledged, sent or shown that a crash could forget.

/** Cursor of a conversation whose first cursor no Sync has told yet. */
export const UNPLACED = -1;

/** One stored message, as the platform numbered it. ids are text: msgId decimal, clientMsgId hex. */
export interface Row {
  conversationId: string;
  seq: number;
  prevSeq: number;
  msgId: string;
  fromUser: string;
  msgType: number;
  body: Uint8Array;
  clientMsgId: string;
  serverAtMs: number;
  /** seq of the newest EDIT or RECALL that this row shows; 0: none. */
  changedSeq: number;
  recalled: boolean;
}

/** One message in the outbox. clientId and clientMsgId never change; accepted: ACKed in this run of the client. */
export interface Entry {
  conversationId: string;
  clientId: number;
  clientMsgId: string;
  toUser: string;
  msgType: number;
  body: Uint8Array;
  /** When it was written, Unix ms, for display only. */
  madeAtMs: number;
  accepted: boolean;
}

/**
 * A conversation as the store keeps it. cursor: UNPLACED, or everything up to it is stored, from `floor` on: a device that
 * comes late to a long conversation begins at its end, and older rows are fetched when somebody looks at them.
 */
export interface Place {
  conversationId: string;
  peer: string;
  title: string;
  members: number;
  left: boolean;
  /** Title, members and left are as of here; stores of older pages have none. */
  groupSeq?: number;
  cursor: number;
  floor: number;
  newestSeq: number;
  nextClientId: number;
  /** What this user's devices share; readWanted: what this device has read, until the platform said that it stands. */
  readSeq: number;
  readWanted: number;
  pinnedAtMs: number;
  mutedUntilMs: number;
  peerReadSeq: number;
  clearedSeq: number;
}

export interface Hidden {
  conversationId: string;
  seq: number;
}

export interface Friend {
  user: string;
  status: number;
  words: string;
}

/** The last session whose Sync was answered; what ReConn names. connId decimal, secret hex. */
export interface Session {
  connId: string;
  secret: string;
}

/** All that a store holds at start, save the messages. gateways: the last list heard, best first. */
export interface Snapshot {
  deviceId: string;
  user: string | null;
  session: Session | null;
  gateways: string[];
  lastGateway: string | null;
  stateVersion: bigint;
  places: Place[];
  outbox: Entry[];
  friends: Friend[];
}

/** A RECALL or EDIT that became readable: the older row changes in the same transaction; by a RECALL so do the EDITs of it. */
export interface Change {
  conversationId: string;
  msgId: string;
  seq: number;
  bySeq: number;
  recalled: boolean;
  msgType: number;
  body: Uint8Array;
}

/** One transaction. Later values of a key replace earlier ones; rows and changes keep their order. */
export interface Writes {
  rows: Row[];
  changes: Change[];
  places: Map<string, Place>;
  queued: Map<string, Entry>;
  unqueued: Entry[];
  refused: { entry: Entry; code: number; detail: string }[];
  /** What is hidden and who is a friend, before this: a platform that was set back. */
  forgotten: boolean;
  hidden: Hidden[];
  friends: Map<string, Friend>;
  meta: Map<string, string>;
}

export function noWrites(): Writes {
  return {
    rows: [], changes: [], places: new Map(), queued: new Map(), unqueued: [], refused: [], forgotten: false, hidden: [], friends: new Map(),
    meta: new Map(),
  };
}

export function writesAny(w: Writes): boolean {
  return (
    w.rows.length + w.changes.length + w.places.size + w.queued.size + w.unqueued.length + w.refused.length + w.hidden.length +
      w.friends.size + w.meta.size > 0 || w.forgotten
  );
}

/** Nothing is hidden and nobody is a friend, until what comes after this. */
export function forgetShared(w: Writes): void {
  w.forgotten = true;
  w.hidden = [];
  w.friends.clear();
}

/** `later` comes after `first`, and both are one transaction. */
export function joinWrites(first: Writes, later: Writes): void {
  first.rows.push(...later.rows);
  first.changes.push(...later.changes);
  later.places.forEach((place, id) => first.places.set(id, place));
  later.queued.forEach((entry, id) => first.queued.set(id, entry));
  first.unqueued.push(...later.unqueued);
  first.refused.push(...later.refused);
  if (later.forgotten) forgetShared(first);
  first.hidden.push(...later.hidden);
  later.friends.forEach((friend, user) => first.friends.set(user, friend));
  later.meta.forEach((value, name) => first.meta.set(name, value));
}

export type Phase = "offline" | "connecting" | "logging in" | "online" | "stopped";

/** The connection as an application is shown it. code: why it is not online, where a code said so. */
export interface State {
  phase: Phase;
  code: number | null;
  address: string | null;
  user: string | null;
  detail: string;
}

export type Notice =
  | { kind: "accepted"; clientMsgId: string; conversationId: string }
  | { kind: "settled"; conversationId: string; clientMsgId: string; msgId: string; seq: number }
  | { kind: "refused"; conversationId: string; clientMsgId: string; code: number; detail: string }
  | { kind: "history"; ref: number; page: { rows: Row[]; coveredFrom: number } | null }
  | { kind: "state"; state: State }
  | { kind: "read"; conversationId: string; user: string; seq: number }
  | { kind: "typing"; conversationId: string; user: string; stopped: boolean }
  | { kind: "friends" };

/** What the edge does next: writes, then everything else, in this order. */
export interface Effects {
  writes: Writes;
  /** The link that `frames` and `close` belong to; frames of an older link are dropped. */
  linkNo: number;
  frames: Uint8Array[];
  close: boolean;
  notices: Notice[];
  giveUp: number[];
  connects: { linkNo: number; address: string }[];
  /** The second link takes the place of the first, which is closed; `frames` and `close` are the new one's. */
  goOver: boolean;
  secondClose: boolean;
  second: { linkNo: number; address: string } | null;
  secondFrames: Uint8Array[];
  wantList: boolean;
  wantToken: boolean;
  /** With wantToken: the last one was refused, ask for another. */
  freshToken: boolean;
}

export function noEffects(): Effects {
  return {
    writes: noWrites(), linkNo: 0, frames: [], close: false, notices: [], giveUp: [], connects: [], goOver: false,
    secondClose: false, second: null, secondFrames: [], wantList: false, wantToken: false, freshToken: false,
  };
}

export function effectsAny(e: Effects): boolean {
  return (
    writesAny(e.writes) || e.frames.length + e.notices.length + e.giveUp.length + e.connects.length + e.secondFrames.length > 0 ||
    e.close || e.goOver || e.secondClose || e.second !== null || e.wantList || e.wantToken
  );
}
