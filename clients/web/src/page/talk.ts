// One open conversation: which of its messages are in view, what is being written, and who has read what.
import { signal } from "@preact/signals";
import { type Attachment, type Entry, type MessageInit, type Quote, type Row, MsgType, isGroup, isOperation, quoted, richOf } from "../index";
import type { RefusedEntry } from "../edge/store";
import { type Chat, isShown } from "./chat";
import { summary, tooLarge } from "./lines";

const PAGE = 50;
const TYPING_EVERY_MS = 3_000;
const QUOTED = 256;
const ROUNDS_MAX = 20;

export interface Upload {
  key: number;
  name: string;
  picture: string; // a blob's URL, "" for what is none
  failed: string;
  again: (() => void) | null;
}

export class Talk {
  /** Of a dialogue that has no message yet. */
  peer = "";
  readonly rows = signal<Row[]>([]);
  readonly waiting = signal<Entry[]>([]);
  readonly refused = signal<RefusedEntry[]>([]);
  readonly uploads = signal<Upload[]>([]);
  readonly atStart = signal(false);
  readonly fetching = signal(false);
  readonly ready = signal(false);
  readonly reply = signal<Row | null>(null);
  readonly editing = signal<Row | null>(null);
  readonly draft = signal("");
  /** Everything up to here was read when the conversation was opened: the line "new messages" stands behind it. */
  readonly newFrom = signal(0);
  readonly target = signal(0);
  readonly readers = signal<Map<string, number>>(new Map());
  /** In a group: whether this user may recall what others said. */
  readonly mayModerate = signal(false);
  readonly online = signal<boolean | null>(null);
  /** Counts what changes the thread itself: its title, members, pins. */
  readonly version = signal(0);
  private from = Number.MAX_SAFE_INTEGER; // rows from here on are in view
  private typedMs = 0;
  private typingTo: ReturnType<typeof setTimeout> | undefined;
  private presence: ReturnType<typeof setInterval> | undefined;
  private closed = false;
  private uploadNo = 0;

  constructor(readonly chat: Chat, readonly id: string) {
    this.draft.value = drafts.get(id) ?? "";
  }

  get thread() {
    return this.chat.client.conversation(this.id);
  }

  async begin(seq: number): Promise<void> {
    const thread = this.thread;
    this.newFrom.value = thread ? Math.max(thread.readSeq, thread.readWanted) : 0;
    const rows = await this.chat.client.history(this.id, Number.MAX_SAFE_INTEGER, PAGE);
    this.from = rows[0]?.seq ?? 0;
    await this.load();
    if (rows.length < PAGE) await this.older();
    if (seq > 0) await this.reach(seq);
    this.ready.value = true;
    void this.look();
    this.presence = setInterval(() => void this.look(), 30_000);
  }

  close(): void {
    this.closed = true;
    clearInterval(this.presence);
    clearTimeout(this.typingTo);
    this.stopTyping();
    if (this.draft.value && !this.editing.value) drafts.set(this.id, this.draft.value);
    else drafts.delete(this.id);
  }

  /** The store has something new of this conversation. */
  async changed(id: string): Promise<void> {
    if (id !== this.id || this.closed) return;
    await this.load();
    this.version.value += 1;
  }

  /** Shows older messages, from the store or from the platform. */
  async older(): Promise<void> {
    if (this.fetching.value || this.atStart.value || this.closed) return;
    this.fetching.value = true;
    try {
      let rows = await this.chat.client.history(this.id, this.from, PAGE);
      if (rows.length === 0 && (await this.chat.client.older(this.id, PAGE))) rows = await this.chat.client.history(this.id, this.from, PAGE);
      if (rows.length > 0) this.from = rows[0]!.seq;
      else this.atStart.value = (this.thread?.floor ?? 0) <= 0;
      await this.load();
    } finally {
      this.fetching.value = false;
    }
  }

  /** Goes back in time until this message is in view, and points at it. */
  async reach(seq: number): Promise<void> {
    for (let round = 0; round < ROUNDS_MAX && this.from > seq && !this.atStart.value; round++) {
      const before = this.from;
      await this.older();
      if (this.from === before) break;
    }
    this.target.value = 0;
    this.target.value = seq;
  }

  /** What is in view was seen. */
  seen(seq: number): void {
    this.chat.client.markRead(this.id, seq);
  }

  heardRead(id: string, user: string, seq: number): void {
    if (id !== this.id || user === this.chat.user) return;
    const known = this.readers.value.get(user) ?? 0;
    if (seq > known) this.readers.value = new Map(this.readers.value).set(user, seq);
  }

  /** Whether somebody else has read up to here. */
  readUpto(): number {
    return Math.max(this.thread?.peerReadSeq ?? 0, ...this.readers.value.values());
  }

  // ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

  write(text: string): void {
    this.draft.value = text;
    if (text === "") return this.stopTyping();
    const now = Date.now();
    clearTimeout(this.typingTo);
    this.typingTo = setTimeout(() => this.stopTyping(), TYPING_EVERY_MS * 1.5);
    if (now - this.typedMs < TYPING_EVERY_MS || this.editing.value) return;
    this.typedMs = now;
    if (this.thread?.placed) this.chat.client.typing(this.id);
  }

  async submit(): Promise<void> {
    const text = this.draft.value.trim();
    const editing = this.editing.value;
    if (text === "") return;
    if (editing) {
      const old = richOf(editing.msgType, editing.body);
      const message: MessageInit = old ? { text, reply: old.reply, attachments: old.attachments, mentions: old.mentions } : text;
      this.cancel();
      if (old?.text !== text) await this.chat.try(this.chat.client.edit(editing, message));
      return;
    }
    const reply = this.quote();
    this.reply.value = null;
    this.draft.value = "";
    this.stopTyping();
    if (!(await this.chat.try(this.send({ text, reply })))) this.draft.value = text;
  }

  /** Uploads files and sends each as a message. */
  attach(files: Iterable<File>): void {
    for (const file of files) {
      const key = ++this.uploadNo;
      const picture = file.type.startsWith("image/") ? URL.createObjectURL(file) : "";
      const large = tooLarge(file.size, this.chat.bytesMax);
      const change = (failed: string | null): void => {
        const others = this.uploads.value.filter((u) => u.key !== key);
        const again = large ? null : (): void => void run();
        this.uploads.value = failed === null ? others : [...others, { key, name: file.name, picture, failed, again }];
      };
      if (large) {
        change(large);
        continue;
      }
      const run = async (): Promise<void> => {
        change("");
        try {
          const attachment: Attachment = await this.chat.api.upload(file, file.name || "picture.png");
          const reply = this.quote();
          this.reply.value = null;
          await this.send({ text: "", reply, attachments: [attachment] });
          change(null);
          if (picture) setTimeout(() => URL.revokeObjectURL(picture), 10_000);
        } catch (e) {
          change((e as Error).message);
        }
      };
      void run();
    }
  }

  dropUpload(key: number): void {
    this.uploads.value = this.uploads.value.filter((u) => u.key !== key);
  }

  beginReply(row: Row): void {
    this.cancel();
    this.reply.value = row;
  }

  beginEdit(row: Row): void {
    this.reply.value = null;
    this.editing.value = row;
    this.draft.value = richOf(row.msgType, row.body)?.text ?? "";
  }

  /** The newest own message that can be edited. */
  editLast(): void {
    const own = [...this.rows.value].reverse().find((row) => row.fromUser === this.chat.user && !row.recalled && !isOperation(row.msgType) && richOf(row.msgType, row.body)?.text);
    if (own) this.beginEdit(own);
  }

  /** Neither a reply nor an edit. False: there was none. */
  cancel(): boolean {
    if (this.editing.value) {
      this.editing.value = null;
      this.draft.value = "";
      return true;
    }
    const had = this.reply.value !== null;
    this.reply.value = null;
    return had;
  }

  // ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

  private send(message: MessageInit): Promise<Entry> {
    const user = this.peer || this.thread?.peer || "";
    return this.chat.client.send(user ? { user } : { conversationId: this.id }, message);
  }

  private quote(): Quote | undefined {
    const row = this.reply.value;
    if (!row) return undefined;
    const text = [...summary(row, "")].slice(0, QUOTED).join("");
    return quoted({ msgId: BigInt(row.msgId), seq: BigInt(row.seq), fromUser: row.fromUser, text });
  }

  private stopTyping(): void {
    clearTimeout(this.typingTo);
    if (this.typedMs === 0) return;
    this.typedMs = 0;
    if (this.thread?.placed) this.chat.client.typing(this.id, true);
  }

  private async load(): Promise<void> {
    const { store } = this.chat.client;
    const [all, hidden, refused] = await Promise.all([store.since(this.id, this.from), store.hidden(this.id), store.refused(this.id)]);
    if (this.closed) return;
    const cleared = this.thread?.clearedSeq ?? 0;
    this.rows.value = all.filter((row) => isShown(row, cleared, hidden));
    this.waiting.value = this.chat.client.unsettled(this.id).filter((e) => e.msgType !== MsgType.EDIT && e.msgType !== MsgType.RECALL).map((e) => ({ ...e }));
    this.refused.value = refused.filter((r) => !isOperation(r.entry.msgType)).slice(-5);
  }

  private async look(): Promise<void> {
    const peer = this.peer || this.thread?.peer;
    if (isGroup(this.id))
      this.chat.api.group(this.id).then((group) => (this.mayModerate.value = group.role !== "member"), () => undefined);
    if (!peer || peer === this.chat.user || document.visibilityState === "hidden") return;
    try {
      this.online.value = (await this.chat.api.presence([peer]))[peer] ?? null;
    } catch {
      this.online.value = null;
    }
  }
}

const drafts = new Map<string, string>();
