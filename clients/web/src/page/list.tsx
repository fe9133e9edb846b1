// The left pane: who I am, whether I am connected, search, and the conversations.
import { useEffect, useRef, useState } from "preact/hooks";
import { dialogueId, words } from "../index";
import type { Chat, Hit, Item } from "./chat";
import { Icon } from "./icons";
import { shortTime, unreachable } from "./lines";
import { Avatar, Menu, Text } from "./parts";
import { nextTheme, theme } from "./theme";

export function List({ chat, onNew, onNewGroup }: { chat: Chat; onNew: () => void; onNewGroup: () => void }) {
  const search = useRef<HTMLInputElement>(null);
  const list = useRef<HTMLDivElement>(null);
  const query = chat.query.value.trim();
  const shown = chat.items.value.filter((item) => item.name.toLowerCase().includes(query.toLowerCase()));

  useEffect(() => {
    const onKey = (e: KeyboardEvent): void => {
      if ((e.ctrlKey || e.metaKey) && e.key.toLowerCase() === "k") {
        e.preventDefault();
        search.current?.focus();
        search.current?.select();
      } else if (e.altKey && (e.key === "ArrowDown" || e.key === "ArrowUp")) {
        e.preventDefault();
        chat.step(e.key === "ArrowDown" ? 1 : -1);
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);

  useEffect(() => {
    const timer = setTimeout(() => void chat.search(query), 250);
    return () => clearTimeout(timer);
  }, [query]);

  /** Arrows walk from the search field through all that can be opened. */
  const walk = (e: KeyboardEvent): void => {
    if (!search.current) return; // who signed out meanwhile
    const all = [search.current, ...(list.current?.querySelectorAll<HTMLElement>("button.line") ?? [])];
    const at = all.indexOf(document.activeElement as HTMLElement);
    if (at < 0) return;
    if (e.key === "ArrowDown" || e.key === "ArrowUp") {
      e.preventDefault();
      all[Math.max(0, Math.min(all.length - 1, at + (e.key === "ArrowDown" ? 1 : -1)))]?.focus();
    } else if (e.key === "Escape") {
      chat.query.value = "";
      search.current?.focus();
    } else if (e.key === "Enter" && at === 0 && shown[0]) {
      chat.query.value = "";
      chat.show(shown[0].id);
    }
  };

  const open = (id: string, seq = 0): void => {
    if (seq === 0) chat.query.value = "";
    chat.show(id, seq);
  };

  return (
    <nav class="list" aria-label="Conversations" onKeyDown={walk}>
      <header class="bar">
        <Avatar name={chat.user} />
        <div class="who">
          <b>{chat.user}</b>
          <Connection chat={chat} />
        </div>
        <button type="button" class="round" aria-label={`Colours: ${theme.value === "auto" ? "as the system" : theme.value}`} title={`Colours: ${theme.value === "auto" ? "as the system" : theme.value}`} onClick={nextTheme}>
          <Icon name={theme.value === "light" ? "sun" : theme.value === "dark" ? "moon" : "auto"} />
        </button>
        <Menu
          label="Menu"
          choices={[
            { label: "New conversation", act: onNew },
            { label: "New group", act: onNewGroup },
            { label: "Sign out", act: () => void chat.signOut() },
          ]}
        />
      </header>
      <div class="search" role="search">
        <Icon name="search" />
        <input ref={search} type="search" placeholder="Search" aria-label="Search conversations and messages" aria-keyshortcuts="Control+K" value={chat.query.value} onInput={(e) => (chat.query.value = e.currentTarget.value)} />
        {query === "" && <kbd aria-hidden="true">Ctrl K</kbd>}
      </div>
      <div class="lines" ref={list}>
        {shown.map((item) => (
          <Line key={item.id} chat={chat} item={item} onOpen={() => open(item.id)} />
        ))}
        {query !== "" && !unreachable(query) && query !== chat.user && !shown.some((i) => i.name === query) && (
          <button type="button" class="line" onClick={() => ((chat.query.value = ""), chat.showUser(query, dialogueId(chat.user, query)))}>
            <Avatar name={query} />
            <span class="line-text">
              <b>Write to {query}</b>
            </span>
          </button>
        )}
        {query !== "" && chat.hits.value && <Hits chat={chat} hits={chat.hits.value} query={query} onOpen={open} />}
        {query === "" && chat.loaded.value && shown.length === 0 && (
          <div class="empty">
            <p>No conversations yet.</p>
            <button type="button" class="primary" onClick={onNew}>
              Write to somebody
            </button>
          </div>
        )}
      </div>
      <button type="button" class="round new" aria-label="New conversation" title="New conversation" onClick={onNew}>
        <Icon name="pencil" />
      </button>
    </nav>
  );
}

function Line({ chat, item, onOpen }: { chat: Chat; item: Item; onOpen: () => void }) {
  const current = chat.open.value?.id === item.id;
  const typing = chat.typing.value.get(item.id) ?? [];
  return (
    <button type="button" class={current ? "line current" : "line"} aria-current={current ? "true" : undefined} onClick={onOpen}>
      <Avatar name={item.name} group={item.group} />
      <span class="line-text">
        <span class="line-top">
          <b>{item.name}</b>
          {item.muted && <Icon name="mute" label="Muted" />}
          <time>{shortTime(item.lastAtMs)}</time>
        </span>
        <span class="line-bottom">
          <span class={typing.length > 0 ? "preview typing" : "preview"}>
            {typing.length > 0 ? (item.group ? `${typing.join(", ")} …` : "typing …") : `${item.mine ? "You: " : ""}${item.last}`}
          </span>
          {item.pinnedAtMs > 0 && <Icon name="pin" label="Pinned" />}
          {item.unread > 0 && (
            <span class={item.muted ? "count muted" : "count"} aria-label={`${item.unread} unread`}>
              {item.unread > 99 ? "99+" : item.unread}
            </span>
          )}
        </span>
      </span>
    </button>
  );
}

function Hits({ chat, hits, query, onOpen }: { chat: Chat; hits: Hit[]; query: string; onOpen: (id: string, seq: number) => void }) {
  return (
    <section aria-label="Messages found">
      <h2 class="lines-title">{hits.length > 0 ? "Messages" : "No messages found"}</h2>
      {hits.map((hit) => {
        const name = chat.items.value.find((i) => i.id === hit.conversationId)?.name ?? hit.from;
        return (
          <button type="button" class="line hit" key={`${hit.conversationId} ${hit.seq}`} onClick={() => onOpen(hit.conversationId, hit.seq)}>
            <Avatar name={name} group={hit.conversationId.startsWith("g:")} />
            <span class="line-text">
              <span class="line-top">
                <b>{name}</b>
                <time>{shortTime(hit.atMs)}</time>
              </span>
              <span class="preview">
                {hit.from === chat.user ? "You: " : ""}
                <Text text={around(hit.text, query)} mark={query} />
              </span>
            </span>
          </button>
        );
      })}
    </section>
  );
}

/** The part of a long text in which the words stand. */
function around(text: string, query: string): string {
  const at = text.toLowerCase().indexOf(query.toLowerCase());
  return at > 30 ? `…${text.slice(at - 20)}` : text;
}

const WORDS = { offline: "Offline", connecting: "Connecting …", "logging in": "Connecting …", online: "Online", stopped: "Signed out" };

function Connection({ chat }: { chat: Chat }) {
  const state = chat.state.value;
  const [, again] = useState(0);
  useEffect(() => {
    if (state.phase !== "offline") return;
    const timer = setInterval(() => again((n) => n + 1), 1_000);
    return () => clearInterval(timer);
  }, [state.phase]);
  const next = chat.client.nextTryS;
  const why = state.code !== null ? `: ${words(state.code)}` : "";
  return (
    <span class={`connection ${state.phase.replace(" ", "-")}`} role="status">
      <i aria-hidden="true" />
      {state.phase === "offline" && next !== null && next >= 1 ? `Offline, again in ${Math.ceil(next)} s` : WORDS[state.phase]}
      {state.phase === "stopped" && why}
      {state.phase === "offline" && next !== null && next >= 2 && (
        <button type="button" class="link" onClick={chat.client.hurry}>
          Try now
        </button>
      )}
    </span>
  );
}
