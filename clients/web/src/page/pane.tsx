// The right pane: one conversation.
import { useComputed } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { type Attachment, type Row, isDialogue, isGroup, isOperation, words } from "../index";
import { type Chat, nameOf, whileOpen } from "./chat";
import { Composer } from "./composer";
import { Members, Readers } from "./dialogs";
import { Viewer } from "./files";
import { Icon } from "./icons";
import { dayName, sameDay, summary } from "./lines";
import { Bubble, type Shown } from "./message";
import { Avatar, Menu } from "./parts";
import type { Talk } from "./talk";

const RUN_MS = 5 * 60_000;
const NEAR_PX = 120;

export function Pane({ chat, talk }: { chat: Chat; talk: Talk }) {
  const [members, setMembers] = useState(false);
  const [info, setInfo] = useState<Row | null>(null);
  const [picture, setPicture] = useState<Attachment | null>(null);
  const [dropping, setDropping] = useState(false);
  void talk.version.value;
  const thread = talk.thread;
  const name = nameOf(thread, chat.user) || talk.peer;
  const group = !isDialogue(talk.id);
  const item = chat.items.value.find((i) => i.id === talk.id);
  const typing = chat.typing.value.get(talk.id) ?? [];

  const status = typing.length > 0
    ? group ? `${typing.join(", ")} ${typing.length > 1 ? "are" : "is"} typing …` : "typing …"
    : thread?.left ? "You are no member any more"
    : group ? (thread && thread.members > 0 ? `${thread.members} ${thread.members === 1 ? "member" : "members"}` : "")
    : talk.online.value === true ? "online" : "";

  const drop = (e: DragEvent): void => {
    e.preventDefault();
    setDropping(false);
    if (e.dataTransfer?.files.length) talk.attach(e.dataTransfer.files);
  };

  return (
    <main class={dropping ? "pane dropping" : "pane"} aria-label={`Conversation with ${name}`} onDragOver={(e) => (e.preventDefault(), setDropping(true))} onDragLeave={() => setDropping(false)} onDrop={drop}>
      <header class="bar">
        <button type="button" class="round back" aria-label="Back to the conversations" onClick={() => chat.leavePane()}>
          <Icon name="back" />
        </button>
        <Avatar name={name} group={group} />
        <div class="who" role="group" aria-label="Conversation">
          <b>{name}</b>
          <span class={typing.length > 0 ? "status typing" : "status"} aria-live="polite">
            {status}
          </span>
        </div>
        {isGroup(talk.id) && (
          <button type="button" class="round" aria-label="Members" title="Members" onClick={() => setMembers(true)}>
            <Icon name="people" />
          </button>
        )}
        <Menu
          label="Conversation"
          choices={[
            { label: item?.pinnedAtMs ? "Unpin" : "Pin to the top", act: () => void chat.try(chat.api.pin(talk.id, !item?.pinnedAtMs)) },
            { label: item?.muted ? "Unmute" : "Mute", act: () => void chat.try(chat.api.mute(talk.id, !item?.muted)) },
            {
              label: "Delete conversation for me",
              danger: true,
              act: () => void chat.try(chat.api.clear(talk.id)).then((done) => done && chat.leavePane()),
            },
          ]}
        />
      </header>
      <Messages key={talk.id} talk={talk} group={group} onView={setPicture} onInfo={setInfo} />
      {thread?.left ? <p class="composer-none">You cannot write here any more.</p> : <Composer talk={talk} name={name} />}
      {members && <Members chat={chat} talk={talk} onClose={() => setMembers(false)} />}
      {info && <Readers chat={chat} row={info} onClose={() => setInfo(null)} />}
      {picture && <Viewer api={chat.api} attachment={picture} onClose={() => setPicture(null)} />}
    </main>
  );
}

function Messages({ talk, group, onView, onInfo }: { talk: Talk; group: boolean; onView: (a: Attachment) => void; onInfo: (row: Row) => void }) {
  const box = useRef<HTMLDivElement>(null);
  const stick = useRef(true); // the end is in view, and stays there
  const height = useRef({ first: 0, height: 0 });
  const [away, setAway] = useState(false);
  const shown = useComputed(() => shownOf(talk)).value;
  const firstSeq = talk.rows.value[0]?.seq ?? 0;
  const lastSeq = talk.rows.value[talk.rows.value.length - 1]?.seq ?? 0;

  // Older messages that come in above leave what is looked at where it is.
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    if (stick.current) element.scrollTop = element.scrollHeight;
    else if (firstSeq !== height.current.first && height.current.first !== 0) element.scrollTop += element.scrollHeight - height.current.height;
    height.current = { first: firstSeq, height: element.scrollHeight };
  }, [shown, talk.uploads.value, talk.ready.value]);

  // Pictures and a growing composer change the height: the end stays in view.
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const watch = new ResizeObserver(() => {
      if (stick.current) element.scrollTop = element.scrollHeight;
    });
    watch.observe(element);
    return () => watch.disconnect();
  }, []);

  // What is in view of somebody who looks is read.
  useEffect(() => {
    const look = (): void => {
      if (document.visibilityState === "visible" && document.hasFocus() && stick.current && lastSeq > 0) talk.seen(talk.thread?.cursor ?? lastSeq);
    };
    look();
    addEventListener("focus", look);
    document.addEventListener("visibilitychange", look);
    return () => {
      removeEventListener("focus", look);
      document.removeEventListener("visibilitychange", look);
    };
  }, [lastSeq, away, talk.ready.value, talk.version.value]);

  useEffect(() => {
    if (talk.target.value > 0) stick.current = false;
  }, [talk.target.value]);

  const scrolled = (): void => {
    const element = box.current;
    if (!element) return; // a scroll of a conversation that was left meanwhile
    const left = element.scrollHeight - element.scrollTop - element.clientHeight;
    stick.current = left < NEAR_PX;
    setAway(left > 400);
    if (element.scrollTop < 300 && talk.ready.value) void whileOpen(talk.older());
  };

  const toEnd = (): void => {
    stick.current = true;
    box.current?.scrollTo({ top: box.current.scrollHeight, behavior: "smooth" });
  };

  const mine = shown[shown.length - 1]?.mine === true && talk.waiting.value.length > 0;
  useEffect(() => {
    if (mine) toEnd();
  }, [mine, talk.waiting.value.length]);

  return (
    <div class="messages-box">
      <div class="messages" ref={box} onScroll={scrolled} role="log" aria-label="Messages" tabIndex={0}>
        <div class="messages-inner">
          {talk.fetching.value && <p class="system">Loading …</p>}
          {talk.atStart.value && shown.length > 0 && <p class="system faint">Beginning of the conversation</p>}
          {talk.ready.value && shown.length === 0 && talk.uploads.value.length === 0 && <p class="system faint">No messages yet. Say hello!</p>}
          {shown.map((s, at) => (
            <>
              {(at === 0 || !sameDay(shown[at - 1]!.atMs, s.atMs)) && <p class="day" key={`day ${s.atMs}`}><span>{dayName(s.atMs)}</span></p>}
              {isNew(talk, shown, at) && <p class="new-line" key="new" role="separator"><span>New messages</span></p>}
              <Bubble key={"clientMsgId" in s.said && s.said.clientMsgId ? s.said.clientMsgId : at} talk={talk} shown={s} group={group} onView={onView} onInfo={onInfo} />
            </>
          ))}
          {talk.refused.value.map(({ entry, code, detail }) => (
            <article class="message mine first last refused" key={entry.clientMsgId}>
              <div class="bubble">
                <div class="text">{summary(entry, talk.chat.user)}</div>
                <small>Not sent: {detail || words(code)}</small>
              </div>
            </article>
          ))}
          {talk.uploads.value.map((u) => (
            <article class="message mine first last upload" key={u.key}>
              <div class="bubble">
                {u.picture ? <img src={u.picture} alt={u.name} /> : <span>{u.name}</span>}
                {u.failed === "" ? <span class="progress" role="status">Uploading …</span> : (
                  <small>
                    {u.failed} {u.again && <button type="button" class="link" onClick={u.again}>Try again</button>} <button type="button" class="link" onClick={() => talk.dropUpload(u.key)}>Discard</button>
                  </small>
                )}
              </div>
            </article>
          ))}
        </div>
      </div>
      {away && (
        <button type="button" class="round to-end" aria-label="To the newest message" onClick={toEnd}>
          <Icon name="down" />
        </button>
      )}
    </div>
  );
}

/** Whether the line "new messages" stands before this one. */
function isNew(talk: Talk, shown: Shown[], at: number): boolean {
  const from = talk.newFrom.value;
  const seqOf = (s: Shown | undefined): number => (s && "seq" in s.said ? s.said.seq : 0);
  const here = shown[at]!;
  return at > 0 && from > 0 && !here.mine && seqOf(here) > from && !shown.slice(0, at).some((s) => !s.mine && seqOf(s) > from);
}

function shownOf(talk: Talk): Shown[] {
  const me = talk.chat.user;
  void talk.version.value;
  void talk.readers.value;
  const read = talk.readUpto();
  const all: Shown[] = [
    ...talk.rows.value.map((said): Shown => ({
      said, from: said.fromUser, mine: said.fromUser === me, atMs: said.serverAtMs, first: true, last: true, tick: said.seq <= read ? "read" : "stored",
    })),
    ...talk.waiting.value.map((said): Shown => ({
      said, from: me, mine: true, atMs: said.madeAtMs, first: true, last: true, tick: said.accepted ? "accepted" : "queued",
    })),
  ];
  for (let at = 1; at < all.length; at++) {
    const [before, here] = [all[at - 1]!, all[at]!];
    const run = before.from === here.from && here.atMs - before.atMs < RUN_MS && sameDay(before.atMs, here.atMs) && !isOperation(before.said.msgType) && !isOperation(here.said.msgType);
    if (run) before.last = here.first = false;
  }
  return all;
}
