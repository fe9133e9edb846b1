// The client: one device of one user, in one tab. Its machine decides (core/), this edge acts.
//
// A round: frames, timers and calls of the application go into the machine; when the event loop has handed over what it had,
// the round's effects are taken, made durable (writer.ts), and released: frames to the socket, news to the listeners.
import { hex } from "../core/bytes";
import { type MessageInit, said } from "./said";
import { dialogueId, groupId, isName } from "../core/conversations";
import { MsgType, operationBody, type Role } from "../core/content";
import { type Effects, type Entry, type Friend, type Notice, type Row, type State, effectsAny } from "../core/model";
import type { Thread } from "../core/inbox";
import { plain } from "../core/visible";
import { Machine } from "../core/session";
import { Access, type TokenProvider } from "./access";
import { Links } from "./links";
import { Store, storeName } from "./store";
import { Writer } from "./writer";

/** A timer this late means that the page was asleep: what came meanwhile is read before a time-out is believed. */
const ASLEEP_MS = 1_000;
const HISTORY_MS = 5_000;
const LOGOUT_MS = 5_000;

export interface ClientOptions {
  user: string;
  token: TokenProvider;
  /** Where the list of gateways is asked. */
  ipconfigUrl?: string;
  /** Gateways by name, such as "ws://host:8901/ws": tried where there is no list. */
  gateways?: string[];
  /** A conversation that is new to this device and longer begins so many messages before its end; older ones are fetched by
   * `older`. 0: at its beginning. */
  tail?: number;
  /** For statistics. */
  platform?: string;
}

/** What changed, after it is durable. */
export type News =
  | { kind: "conversations"; ids: Set<string>; rows: Row[] }
  | Exclude<Notice, { kind: "history" }>
  | { kind: "disk"; error: unknown };

export class Client {
  private readonly machine: Machine;
  private readonly writer: Writer;
  private readonly links: Links;
  private readonly access: Access;
  private readonly listeners = new Set<(news: News) => void>();
  private readonly pages = new Map<number, (got: boolean) => void>();
  private readonly durable = new Map<string, () => void>(); // by clientMsgId
  private roundDue = false;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private timerMs = 0;
  private closed = false;
  private state_: State;

  private constructor(private readonly options: ClientOptions, readonly store: Store) {
    this.access = new Access(options.token, options.ipconfigUrl ?? null);
    this.machine = new Machine(store.snapshot, {
      gateways: options.gateways ?? [],
      listing: options.ipconfigUrl !== undefined,
      chance: Math.random,
      platform: options.platform ?? "web",
      tail: options.tail ?? 0,
    });
    this.machine.named(options.user);
    this.state_ = this.machine.state;
    this.writer = new Writer(
      (writes) => store.apply(writes),
      (effects) => this.release(effects),
      (error) => this.diskFails(error),
    );
    this.links = new Links({
      opened: (linkNo) => this.moved(this.machine.opened(linkNo, nowMs())),
      frames: (linkNo, payloads) => this.moved(this.machine.frames(linkNo, payloads, nowMs())),
      closed: (linkNo, code) => this.moved(this.machine.closed(linkNo, nowMs(), code)),
    });
  }

  /**
   * Opens the user's store and begins to connect; it is usable at once, also offline: what is sent waits in the durable
   * outbox. One client per user and browser at a time: see `alone`. Rejects when the browser keeps no data.
   */
  static async open(options: ClientOptions): Promise<Client> {
    if (!isName(options.user)) throw new Error(`user ${options.user}: 1 to 64 bytes of UTF-8 without control or invisible characters`);
    const store = await Store.open(storeName(options.user), newDeviceId());
    const client = new Client(options, store);
    client.machine.start(nowMs());
    client.poke();
    addEventListener("online", client.hurry);
    document.addEventListener("visibilitychange", client.hurry);
    return client;
  }

  get user(): string {
    return this.options.user;
  }

  get state(): State {
    return this.state_;
  }

  /** How often this client went over to another gateway while it was online. */
  get moves(): number {
    return this.machine.moves;
  }

  get friends(): Friend[] {
    return [...this.machine.traffic.shared.friends.values()];
  }

  /** Seconds until the next attempt to connect; null: one runs, it is online, or there will be none. */
  get nextTryS(): number | null {
    const due = this.machine.nextRoundMs;
    return due === null ? null : Math.max(0, (due - nowMs()) / 1000);
  }

  /** The user's token as it was last given: for the HTTP API. */
  token(fresh = false): Promise<string | null> {
    return this.access.token(fresh);
  }

  /** Calls `listener` with each news until the function that is returned is called. */
  listen(listener: (news: News) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Its user is waiting, or the network came back: the next attempt to connect is made now. */
  hurry = (): void => {
    if (this.closed || document.visibilityState === "hidden") return;
    this.machine.hurry(nowMs());
    this.poke();
  };

  /**
   * Puts a message into the durable outbox and resolves when it is there; it is sent whenever there is a connection. Messages
   * of one conversation keep the order of their calls. Rejects: the body is too long, the outbox is full.
   */
  async send(to: { user: string } | { conversationId: string }, message: MessageInit): Promise<Entry> {
    const [msgType, body] = said(message);
    if (body.length > this.machine.timing.maxBodyBytes)
      throw new Error(`the message is too long: ${body.length} bytes, ${this.machine.timing.maxBodyBytes} are taken`);
    if ("user" in to) {
      if (!isName(to.user)) throw new Error("a name has 1 to 64 bytes and no control or invisible characters");
      return this.put(dialogueId(this.user, to.user), to.user, msgType, body);
    }
    return this.put(to.conversationId, "", msgType, body);
  }

  /** Makes a group of which this user is the owner; resolves with its id once that is in the outbox. */
  async createGroup(title: string, users: string[]): Promise<string> {
    const key = crypto.getRandomValues(new Uint8Array(16));
    const id = groupId(this.user, key);
    await this.put(id, "", MsgType.GROUP_CREATE, operationBody({ title: plain(title), users }), hex(key));
    return id;
  }

  addMembers(conversationId: string, users: string[]): Promise<Entry> {
    return this.put(conversationId, "", MsgType.GROUP_ADD, operationBody({ users }));
  }

  removeMembers(conversationId: string, users: string[]): Promise<Entry> {
    return this.put(conversationId, "", MsgType.GROUP_REMOVE, operationBody({ users }));
  }

  leave(conversationId: string): Promise<Entry> {
    return this.put(conversationId, "", MsgType.GROUP_LEAVE, operationBody({}));
  }

  rename(conversationId: string, title: string): Promise<Entry> {
    return this.put(conversationId, "", MsgType.GROUP_RENAME, operationBody({ title: plain(title) }));
  }

  giveRole(conversationId: string, user: string, role: Role): Promise<Entry> {
    return this.put(conversationId, "", MsgType.GROUP_ROLE, operationBody({ users: [user], role }));
  }

  /** Takes a message back, for everybody. */
  recall(row: Row): Promise<Entry> {
    return this.put(row.conversationId, "", MsgType.RECALL, operationBody({ msgId: BigInt(row.msgId) }));
  }

  edit(row: Row, message: MessageInit): Promise<Entry> {
    const [msgType, body] = said(message);
    return this.put(row.conversationId, "", MsgType.EDIT, operationBody({ msgId: BigInt(row.msgId), msgType, body }));
  }

  /** This user has read up to here, on every device. */
  markRead(conversationId: string, seq: number): void {
    this.machine.traffic.markRead(conversationId, seq);
    this.poke();
  }

  typing(conversationId: string, stopped = false): void {
    this.machine.traffic.typing(conversationId, stopped);
    this.poke();
  }

  /** Every conversation that this device knows, in no order. */
  conversations(): Thread[] {
    return this.machine.traffic.inbox.threads();
  }

  conversation(conversationId: string): Thread | undefined {
    return this.machine.traffic.inbox.find(conversationId);
  }

  /** Own messages of this device that have no place yet, in order. */
  unsettled(conversationId: string): Entry[] {
    return this.machine.traffic.outbox.entries(conversationId);
  }

  /** Messages with seq < before that are stored here, the newest `limit`, by rising seq. */
  history(conversationId: string, before = Number.MAX_SAFE_INTEGER, limit = 50): Promise<Row[]> {
    return this.store.history(conversationId, before, limit);
  }

  /** Fetches what is older than all that is stored here, and stores it. False: there is nothing, or no connection. */
  older(conversationId: string, limit = 50): Promise<boolean> {
    const thread = this.conversation(conversationId);
    if (!thread || thread.floor <= 0) return Promise.resolve(false);
    const ref = this.machine.traffic.history(conversationId, thread.floor + 1, limit, nowMs());
    if (ref === null) return Promise.resolve(false);
    this.poke();
    return new Promise((resolve) => {
      this.pages.set(ref, resolve);
      setTimeout(() => this.paged(ref, false), HISTORY_MS);
    });
  }

  /** Ends the session on the platform and closes; the store stays. */
  async logout(): Promise<void> {
    this.machine.logout(nowMs());
    this.poke();
    await new Promise<void>((resolve) => {
      setTimeout(resolve, LOGOUT_MS);
      this.listen((news) => news.kind === "state" && news.state.phase === "stopped" && resolve());
      if (this.state_.phase !== "online") resolve();
    });
    this.machine.stop(404);
    await this.close();
  }

  /** Closes the connection, not the session: the next start resumes it, within the platform's window. */
  async close(): Promise<void> {
    if (this.closed) return;
    removeEventListener("online", this.hurry);
    document.removeEventListener("visibilitychange", this.hurry);
    this.machine.stop(null);
    this.round();
    await this.writer.drained();
    this.closed = true;
    clearTimeout(this.timer);
    this.links.close();
    this.links.closeSecond();
    this.store.close();
  }

  // ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────

  private put(conversationId: string, toUser: string, msgType: number, body: Uint8Array, key = newKey()): Promise<Entry> {
    if (this.closed) return Promise.reject(new Error("this client is closed"));
    try {
      const entry = this.machine.send(conversationId, key, toUser, msgType, body, Date.now());
      this.poke();
      return new Promise((resolve) => this.durable.set(key, () => resolve(entry)));
    } catch (e) {
      return Promise.reject(e as Error);
    }
  }

  private moved<T>(result: T): T {
    this.poke();
    return result;
  }

  /** A round is due as soon as the event loop has handed over what it has. */
  private poke(): void {
    if (this.roundDue || this.closed) return;
    this.roundDue = true;
    queueMicrotask(() => this.round());
  }

  private round(): void {
    this.roundDue = false;
    if (this.closed) return;
    const effects = this.machine.take(nowMs());
    if (effectsAny(effects)) this.writer.put(effects);
    this.setTimer();
  }

  private setTimer(): void {
    const due = this.machine.deadlineMs();
    if (due === null || (this.timer !== undefined && this.timerMs <= due)) return;
    clearTimeout(this.timer);
    this.timerMs = due;
    this.timer = setTimeout(() => this.tick(due), Math.max(0, due - nowMs()) + 1);
  }

  private tick(due: number): void {
    this.timer = undefined;
    if (this.closed) return;
    if (nowMs() - due > ASLEEP_MS) {
      this.timerMs = nowMs();
      this.timer = setTimeout(() => this.tick(nowMs()), 50);
      return;
    }
    this.machine.tick(nowMs());
    this.round();
  }

  /** The round's writes are durable: everything else may be seen now. */
  private release(effects: Effects): void {
    if (this.closed) return;
    const { links, writes } = { links: this.links, writes: effects.writes };
    if (effects.goOver) links.goOver();
    if (effects.frames.length > 0) links.send(effects.linkNo, effects.frames);
    if (effects.close) links.close();
    for (const linkNo of effects.giveUp) links.giveUp(linkNo);
    for (const { linkNo, address } of effects.connects) links.connect(linkNo, address);
    if (effects.secondClose) links.closeSecond();
    if (effects.second) links.connectSecond(effects.second.linkNo, effects.second.address);
    if (effects.secondFrames.length > 0) links.sendSecond(effects.secondFrames);
    if (effects.wantToken) void this.giveToken(effects.freshToken);
    if (effects.wantList) void this.giveList();
    for (const key of writes.queued.keys()) {
      this.durable.get(key)?.();
      this.durable.delete(key);
    }
    const ids = new Set<string>([...writes.places.keys(), ...writes.hidden.map((h) => h.conversationId)]);
    for (const w of [...writes.rows, ...writes.changes, ...writes.queued.values(), ...writes.unqueued]) ids.add(w.conversationId);
    for (const { entry } of writes.refused) ids.add(entry.conversationId);
    for (const notice of effects.notices) {
      if (notice.kind === "state") this.state_ = notice.state;
      if (notice.kind === "history") this.paged(notice.ref, notice.page !== null);
      else this.tell(notice);
    }
    if (ids.size > 0) this.tell({ kind: "conversations", ids, rows: writes.rows });
  }

  private tell(news: News): void {
    for (const listener of [...this.listeners]) listener(news);
  }

  private diskFails(error: unknown): void {
    if (error !== null) console.warn("plato: the store could not be written, trying again:", error);
    this.tell({ kind: "disk", error });
  }

  private paged(ref: number, got: boolean): void {
    this.pages.get(ref)?.(got);
    this.pages.delete(ref);
  }

  private async giveToken(fresh: boolean): Promise<void> {
    this.machine.tokened(await this.access.token(fresh), nowMs());
    this.poke();
  }

  private async giveList(): Promise<void> {
    this.machine.listed(await this.access.gateways(), nowMs());
    this.poke();
  }
}

const nowMs = (): number => Math.floor(performance.now());
const newKey = (): string => hex(crypto.getRandomValues(new Uint8Array(16)));

/** A random uint64 that is not 0, as decimal text. */
function newDeviceId(): string {
  const [drawn] = crypto.getRandomValues(new BigUint64Array(1));
  return (drawn! || 1n).toString();
}
