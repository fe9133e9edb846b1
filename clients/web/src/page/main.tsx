// The page: sign-in, or the two panes of the chat.
import { effect } from "@preact/signals";
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Chat } from "./chat";
import { NewConversation, NewGroup } from "./dialogs";
import { List } from "./list";
import { Pane } from "./pane";
import { begin, enter, screen } from "./start";
import { show } from "./theme";

function App() {
  const now = screen.value;
  switch (now.at) {
    case "starting":
      return <p class="center faint" role="status">One moment …</p>;
    case "sign-in":
      return <SignIn why={now.why} />;
    case "elsewhere":
      return (
        <div class="center card">
          <Logo />
          <h1>Open in another tab</h1>
          <p>Your messages are shown in another tab of this browser; one tab at a time keeps them.</p>
          <button type="button" class="primary" onClick={now.ask}>Use this tab instead</button>
        </div>
      );
    case "broken":
      return (
        <div class="center card" role="alert">
          <Logo />
          <h1>That does not work</h1>
          <p>{now.why}</p>
        </div>
      );
    case "chat":
      return <Panes chat={now.chat} />;
  }
}

function SignIn({ why }: { why: string }) {
  const [name, setName] = useState("");
  const submit = (e: Event): void => {
    e.preventDefault();
    if (name.trim() !== "") void enter(name.trim());
  };
  return (
    <form class="center card" onSubmit={submit}>
      <Logo />
      <h1>Plato</h1>
      <label>
        Your name
        <input autofocus value={name} placeholder="alice" autocomplete="username" autocapitalize="none" spellcheck={false} onInput={(e) => setName(e.currentTarget.value)} />
      </label>
      {why && <p class="error" role="alert">{why}</p>}
      <button type="submit" class="primary" disabled={name.trim() === ""}>Sign in</button>
      <p class="faint">A cluster on this machine, to try things: there is no password, and whoever reaches this page may be anybody.</p>
    </form>
  );
}

function Logo() {
  return (
    <svg class="logo" viewBox="0 0 48 48" width="56" height="56" aria-hidden="true">
      <path d="M24 4C12 4 3 12 3 22c0 5.500 2.800 10.400 7.200 13.700L8.500 44l9-4.800c2 .5 4.200.800 6.500.800 12 0 21-8 21-18S36 4 24 4z" fill="currentColor" />
      <path d="M17 32V14h8.500a6 6 0 0 1 0 12H21" fill="none" stroke="var(--ground)" stroke-width="3.500" stroke-linecap="round" stroke-linejoin="round" />
    </svg>
  );
}

function Panes({ chat }: { chat: Chat }) {
  const [window_, setWindow] = useState<"" | "new" | "group">("");
  useEffect(() => {
    const stop = effect(() => {
      document.title = chat.unread.value > 0 ? `(${chat.unread.value}) Plato` : "Plato";
    });
    return stop;
  }, [chat]);
  const talk = chat.open.value;
  return (
    <div class={talk ? "panes talking" : "panes"}>
      <List chat={chat} onNew={() => setWindow("new")} onNewGroup={() => setWindow("group")} />
      {talk ? <Pane key={talk.id} chat={chat} talk={talk} /> : <main class="pane nothing"><Logo /><p>Choose a conversation, or begin a new one.</p></main>}
      {window_ === "new" && <NewConversation chat={chat} onClose={() => setWindow("")} onGroup={() => setWindow("group")} />}
      {window_ === "group" && <NewGroup chat={chat} onClose={() => setWindow("")} />}
      {chat.note.value && <p class="note" role="alert">{chat.note.value}</p>}
    </div>
  );
}

show();
render(<App />, document.getElementById("app")!);
begin();
