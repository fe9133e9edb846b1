// What the chat page shows: the list, the conversation that is open, who types. It reads the store again after each news of
// a conversation, so what is seen is what is durable.
import { type Signal, batch, computed, signal } from "@preact/signals";
import { type Client, type Conversation, type Entry, type News, type Row, type State, isDialogue, isOperation, MsgType, words } from "../index";
import type { Api, Found } from "../edge/api";
import { StoreClosed } from "../edge/store";
import { summary } from "./lines";
import { Talk } from "./talk";

const UNREAD_MOST = 100;
const TYPING_MS = 6_000;
const NOTE_MS = 6_000;
const SEARCHED_ROWS = 20_000;

/** One line of the list. */
export interface Item {
  id: string;
  name: string;
  group: boolean;
  left: boolean;
  last: string;
  lastAtMs: number;
  mine: boolean;
  unread: number;
  pinnedAtMs: number;
  muted: boolean;
  peer: string;
}

export interface Hit {
  conversationId: string;
  seq: number;
  from: string;
  text: string;
  atMs: number;
}

export class Chat {
  readonly user: string;
  readonly state: Signal<State>;
  readonly items = signal<Item[]>([]);
  readonly open = signal<Talk | null>(null);
  readonly typing = signal<Map<string, string[]>>(new Map());
  readonly note = signal("");
  readonly query = signal("");
  readonly hits = signal<Hit[] | null>(null);
  readonly unread = computed(() => this.items.value.reduce((sum, i) => sum + (i.muted ? 0 : i.unread), 0));
  readonly loaded = signal(false);
  private readonly byId = new Map<string, Item>();
  private readonly due = new Set<string>();
  private readonly typers = new Map<string, Map<string, ReturnType<typeof setTimeout>>>();
  private refreshing = false;
  private searching = 0;

  /** bytesMax: the largest file that the server takes. */
  constructor(readonly client: Client, readonly api: Api, readonly bytesMax: number, readonly signOut: () => Promise<void>) {
    this.user = client.user;
    this.state = signal(client.state);
    client.listen((news) => this.hear(news));
    for (const thread of client.conversations()) this.due.add(thread.conversationId);
    void this.refresh();
  }

  // ── what a person does ───────────────────────────────────────────────────────────────────────────────────────

  /** Opens a conversation. seq: scroll to this message. */
  show(id: string, seq = 0): void {
    if (this.open.value?.id === id && seq === 0) return;
    this.open.value?.close();
    this.open.value = new Talk(this, id);
    void whileOpen(this.open.value.begin(seq));
  }

  /** Opens the dialogue with a user, which the first message begins. */
  showUser(user: string, id: string): void {
    this.show(id);
    if (this.open.value) this.open.value.peer = user;
  }

  leavePane(): void {
    this.open.value?.close();
    this.open.value = null;
  }

  /** The next or the previous one of the list. */
  step(by: number): void {
    const list = this.items.value;
    if (list.length === 0) return;
    const at = list.findIndex((item) => item.id === this.open.value?.id);
    this.show(list[Math.max(0, Math.min(list.length - 1, at + by))]!.id);
  }

  /** Does something of which a failure is told. */
  async try(what: Promise<unknown>): Promise<boolean> {
    try {
      await what;
      return true;
    } catch (e) {
      this.tell((e as Error).message);
      return false;
    }
  }

  tell(text: string): void {
    this.note.value = text.charAt(0).toUpperCase() + text.slice(1);
    const said = this.note.value;
    setTimeout(() => {
      if (this.note.value === said) this.note.value = "";
    }, NOTE_MS);
  }

  /** Messages that hold these words: of the platform, else of what is stored here. */
  async search(text: string): Promise<void> {
    const number = ++this.searching;
    const wanted = text.trim();
    if (wanted.length < 2) {
      this.hits.value = null;
      return;
    }
    let hits: Hit[];
    try {
      hits = (await this.api.search(wanted)).filter((f) => !f.recalled).map(hitOf);
    } catch {
      const low = wanted.toLowerCase();
      const rows = await this.client.store.search((row) => summary(row, this.user).toLowerCase().includes(low) && !row.recalled && !isOperation(row.msgType), 30, SEARCHED_ROWS);
      hits = rows
        .map((row) => ({ conversationId: row.conversationId, seq: row.seq, from: row.fromUser, text: summary(row, this.user), atMs: row.serverAtMs }))
        .sort((a, b) => b.atMs - a.atMs);
    }
    if (number === this.searching) this.hits.value = hits;
  }

  // ── news ─────────────────────────────────────────────────────────────────────────────────────────────────────

  private hear(news: News): void {
    switch (news.kind) {
      case "conversations":
        for (const id of news.ids) this.due.add(id);
        for (const row of news.rows) this.typed(row.conversationId, row.fromUser, true);
        void this.refresh();
        break;
      case "accepted":
        void whileOpen(this.open.value?.changed(news.conversationId) ?? Promise.resolve());
        break;
      case "refused":
        this.tell(`not sent: ${news.detail || words(news.code)}`);
        break;
      case "state":
        this.state.value = news.state;
        break;
      case "typing":
        this.typed(news.conversationId, news.user, news.stopped);
        break;
      case "read":
        this.open.value?.heardRead(news.conversationId, news.user, news.seq);
        break;
      case "disk":
        if (news.error !== null) this.tell("this browser has no room to keep messages; make room, nothing is lost meanwhile");
        break;
    }
  }

  private typed(id: string, user: string, stopped: boolean): void {
    if (user === this.user) return;
    const users = this.typers.get(id) ?? new Map();
    clearTimeout(users.get(user));
    if (stopped && !users.delete(user)) return;
    if (!stopped) users.set(user, setTimeout(() => this.typed(id, user, true), TYPING_MS));
    this.typers.set(id, users);
    this.typing.value = new Map([...this.typers].filter(([, u]) => u.size > 0).map(([key, u]) => [key, [...u.keys()]]));
  }

  private async refresh(): Promise<void> {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      await whileOpen(this.refreshAll());
    } finally {
      this.refreshing = false;
      this.loaded.value = true;
    }
  }

  private async refreshAll(): Promise<void> {
    const failed: string[] = [];
    while (this.due.size > 0) {
      const ids = [...this.due];
      this.due.clear();
      const found = await Promise.allSettled(ids.map((id) => this.item(id)));
      await Promise.all(ids.map((id) => this.open.value?.changed(id)));
      batch(() => {
        found.forEach((item, at) => {
          const id = ids[at]!;
          if (item.status === "rejected") failed.push(id);
          else if (item.value) this.byId.set(id, item.value);
          else this.byId.delete(id);
        });
        this.items.value = [...this.byId.values()].sort(order);
      });
      const broken = found.find((item) => item.status === "rejected");
      if (broken?.reason instanceof StoreClosed) throw broken.reason;
      if (broken) console.warn("plato: a conversation could not be read from the store, trying again with the next news:", broken.reason);
    }
    for (const id of failed) this.due.add(id);
  }

  private async item(id: string): Promise<Item | null> {
    const thread = this.client.conversation(id);
    if (!thread) return null;
    const hidden = await this.client.store.hidden(id);
    const last = await this.last(thread, hidden);
    const unsettled = this.client.unsettled(id).filter((e) => e.msgType < 1010);
    const waiting = unsettled[unsettled.length - 1];
    if (!last && !waiting) return null;
    const read = Math.max(thread.readSeq, thread.readWanted, thread.clearedSeq);
    const unread = await this.client.store.unread(id, read, this.user, hidden, UNREAD_MOST);
    return {
      id,
      name: nameOf(thread, this.user),
      group: !isDialogue(id),
      left: thread.left,
      last: waiting ? summary(waiting, this.user) : last ? summary(last, this.user) : "",
      lastAtMs: waiting?.madeAtMs ?? last?.serverAtMs ?? 0,
      mine: waiting ? true : last?.fromUser === this.user && !isOperation(last.msgType),
      unread,
      pinnedAtMs: thread.pinnedAtMs,
      muted: thread.mutedUntilMs > Date.now(),
      peer: thread.peer,
    };
  }

  /** The newest message that is shown. */
  private async last(thread: Conversation, hidden: Set<number>): Promise<Row | undefined> {
    let before = Number.MAX_SAFE_INTEGER;
    for (let page = 0; page < 4; page++) {
      const rows = await this.client.history(thread.conversationId, before, page === 0 ? 4 : 50);
      const shown = rows.filter((row) => isShown(row, thread.clearedSeq, hidden));
      if (shown.length > 0 || rows.length === 0) return shown[shown.length - 1];
      before = rows[0]!.seq;
    }
    return undefined;
  }
}

/** Waits for work on the store, which may be closed meanwhile: another tab has it, or its user signed out. */
export async function whileOpen(work: Promise<unknown>): Promise<void> {
  try {
    await work;
  } catch (e) {
    if (!(e instanceof StoreClosed)) throw e;
  }
}

/** Whether a row has a place of its own in the conversation. */
export function isShown(row: Row, clearedSeq: number, hidden: Set<number>): boolean {
  return row.seq > clearedSeq && !hidden.has(row.seq) && row.msgType !== MsgType.EDIT && row.msgType !== MsgType.RECALL;
}

export function nameOf(thread: Conversation | undefined, me: string): string {
  if (!thread) return "";
  if (thread.peer) return thread.peer === me ? "Notes to self" : thread.peer;
  return thread.title || (thread.conversationId.startsWith("g:") ? "Group" : thread.conversationId);
}

const order = (a: Item, b: Item): number => b.pinnedAtMs - a.pinnedAtMs || b.lastAtMs - a.lastAtMs || (a.id < b.id ? -1 : 1);

const hitOf = (f: Found): Hit => ({ conversationId: f.conversation_id, seq: f.seq, from: f.from, text: f.text ?? "", atMs: f.server_at });

export type Said = Row | Entry;
