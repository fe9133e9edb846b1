// Windows: a new conversation, a new group, a group's members, who has read a message.
import { useEffect, useState } from "preact/hooks";
import { type Row, Role, dialogueId, isGroup } from "../index";
import type { Group, Member } from "../edge/api";
import type { Chat } from "./chat";
import { unreachable } from "./lines";
import { Avatar, type Choice, Menu, Modal } from "./parts";
import type { Talk } from "./talk";

export function NewConversation({ chat, onClose, onGroup }: { chat: Chat; onClose: () => void; onGroup: () => void }) {
  const [name, setName] = useState("");
  const [why, setWhy] = useState("");
  const known = people(chat).filter((p) => p.toLowerCase().includes(name.trim().toLowerCase()));
  const go = (user: string): void => {
    const fault = unreachable(user);
    if (fault) return setWhy(fault);
    onClose();
    chat.showUser(user, dialogueId(chat.user, user));
  };
  const submit = (e: Event): void => {
    e.preventDefault();
    go(name.trim());
  };
  return (
    <Modal title="New conversation" onClose={onClose}>
      <form onSubmit={submit}>
        <label>
          To
          <input autofocus value={name} placeholder="Name" autocomplete="off" onInput={(e) => setName(e.currentTarget.value)} />
        </label>
        {why && <p class="error" role="alert">{why}</p>}
        <ul class="people">
          {known.map((p) => (
            <li key={p}>
              <button type="button" onClick={() => go(p)}>
                <Avatar name={p} small /> {p}
              </button>
            </li>
          ))}
        </ul>
        <footer>
          <button type="button" onClick={onGroup}>New group …</button>
          <button type="submit" class="primary" disabled={name.trim() === ""}>Write</button>
        </footer>
      </form>
    </Modal>
  );
}

export function NewGroup({ chat, onClose }: { chat: Chat; onClose: () => void }) {
  const [title, setTitle] = useState("");
  const [users, setUsers] = useState<string[]>([]);
  const submit = async (e: Event): Promise<void> => {
    e.preventDefault();
    let id = "";
    const made = chat.client.createGroup(title.trim(), users).then((made) => (id = made));
    if (!(await chat.try(made))) return;
    onClose();
    chat.show(id);
  };
  return (
    <Modal title="New group" onClose={onClose}>
      <form onSubmit={(e) => void submit(e)}>
        <label>
          Title
          <input autofocus value={title} maxLength={100} placeholder="Title of the group" autocomplete="off" onInput={(e) => setTitle(e.currentTarget.value)} />
        </label>
        <Picker chat={chat} users={users} onChange={setUsers} label="Members" />
        <footer>
          <button type="submit" class="primary" disabled={title.trim() === "" || users.length === 0}>Create</button>
        </footer>
      </form>
    </Modal>
  );
}

/** Names, one after the other; Enter or a comma takes one. */
function Picker({ chat, users, onChange, label, without = [] }: { chat: Chat; users: string[]; onChange: (users: string[]) => void; label: string; without?: string[] }) {
  const [name, setName] = useState("");
  const take = (text: string): void => {
    const found = text.split(/[,\n]/).map((n) => n.trim()).filter((n) => !unreachable(n) && n !== chat.user && !users.includes(n));
    if (found.length > 0) onChange([...users, ...new Set(found)]);
    setName("");
  };
  const onKey = (e: KeyboardEvent): void => {
    if ((e.key === "Enter" || e.key === ",") && name.trim() !== "") {
      e.preventDefault();
      take(name);
    } else if (e.key === "Backspace" && name === "") onChange(users.slice(0, -1));
  };
  const known = people(chat).filter((p) => !users.includes(p) && !without.includes(p) && p.toLowerCase().includes(name.trim().toLowerCase()));
  return (
    <>
      <label>
        {label}
        <span class="chips">
          {users.map((u) => (
            <button type="button" class="chip" key={u} aria-label={`Remove ${u}`} onClick={() => onChange(users.filter((o) => o !== u))}>
              {u} ×
            </button>
          ))}
          <input value={name} placeholder="Name, then Enter" autocomplete="off" onInput={(e) => setName(e.currentTarget.value)} onKeyDown={onKey} onBlur={() => name.trim() !== "" && take(name)} />
        </span>
      </label>
      <ul class="people">
        {known.slice(0, 6).map((p) => (
          <li key={p}>
            <button type="button" onMouseDown={(e) => e.preventDefault()} onClick={() => take(p)}>
              <Avatar name={p} small /> {p}
            </button>
          </li>
        ))}
      </ul>
    </>
  );
}

/** Users with whom there is a dialogue. */
const people = (chat: Chat): string[] => chat.items.value.map((i) => i.peer).filter((p) => p !== "" && p !== chat.user);

export function Members({ chat, talk, onClose }: { chat: Chat; talk: Talk; onClose: () => void }) {
  const [group, setGroup] = useState<Group | null>(null);
  const [members, setMembers] = useState<Member[]>([]);
  const [more, setMore] = useState(false);
  const [why, setWhy] = useState("");
  const [adding, setAdding] = useState<string[] | null>(null);
  const [title, setTitle] = useState<string | null>(null);
  const load = async (after: string): Promise<void> => {
    try {
      setGroup(await chat.api.group(talk.id));
      const page = await chat.api.members(talk.id, after);
      setMembers((known) => [...(after === "" ? [] : known), ...page.members]);
      setMore(page.more);
    } catch (e) {
      setWhy((e as Error).message);
    }
  };
  useEffect(() => void load(""), [talk.version.value]);
  const may = group !== null && group.role !== "member" && !group.left;
  const { client } = chat;
  const choicesOf = (m: Member): Choice[] => {
    const all: (Choice | false)[] = [
      m.user !== chat.user && { label: `Write to ${m.user}`, act: () => (onClose(), chat.showUser(m.user, dialogueId(chat.user, m.user))) },
      group?.role === "owner" && m.role === "member" && { label: "Make administrator", act: () => void chat.try(client.giveRole(talk.id, m.user, Role.ADMINISTRATOR)) },
      group?.role === "owner" && m.role === "administrator" && { label: "Administrator no more", act: () => void chat.try(client.giveRole(talk.id, m.user, Role.MEMBER)) },
      may && m.user !== chat.user && m.role !== "owner" && { label: "Remove from the group", danger: true, act: () => void chat.try(client.removeMembers(talk.id, [m.user])) },
    ];
    return all.filter((c) => c !== false);
  };
  const add = async (): Promise<void> => {
    if (adding && adding.length > 0 && (await chat.try(client.addMembers(talk.id, adding)))) setAdding(null);
  };
  const rename = async (e: Event): Promise<void> => {
    e.preventDefault();
    if (title?.trim() && (await chat.try(client.rename(talk.id, title.trim())))) setTitle(null);
  };
  if (!isGroup(talk.id)) return null;
  return (
    <Modal title={talk.thread?.title || "Group"} onClose={onClose}>
      {title !== null && (
        <form onSubmit={(e) => void rename(e)}>
          <label>
            Title
            <input autofocus value={title} maxLength={100} onInput={(e) => setTitle(e.currentTarget.value)} />
          </label>
          <footer>
            <button type="submit" class="primary">Rename</button>
          </footer>
        </form>
      )}
      {why && <p class="error" role="alert">{why}</p>}
      {adding !== null ? (
        <>
          <Picker chat={chat} users={adding} onChange={setAdding} label="Add members" without={members.map((m) => m.user)} />
          <footer>
            <button type="button" onClick={() => setAdding(null)}>Cancel</button>
            <button type="button" class="primary" disabled={adding.length === 0} onClick={() => void add()}>Add</button>
          </footer>
        </>
      ) : (
        <>
          <ul class="people tall">
            {members.map((m) => (
              <li key={m.user}>
                <Avatar name={m.user} small />
                <span>{m.user === chat.user ? `${m.user} (you)` : m.user}</span>
                {m.role !== "member" && <em>{m.role}</em>}
                {choicesOf(m).length > 0 && <Menu label={`About ${m.user}`} choices={choicesOf(m)} />}
              </li>
            ))}
            {more && (
              <li>
                <button type="button" class="link" onClick={() => void load(members[members.length - 1]?.user ?? "")}>More …</button>
              </li>
            )}
          </ul>
          <footer>
            {group && !group.left && (
              <button type="button" class="danger" onClick={() => void chat.try(client.leave(talk.id)).then((done) => done && onClose())}>Leave</button>
            )}
            {may && <button type="button" onClick={() => setTitle(title === null ? (talk.thread?.title ?? "") : null)}>Rename</button>}
            {may && <button type="button" class="primary" onClick={() => setAdding([])}>Add members</button>}
          </footer>
        </>
      )}
    </Modal>
  );
}

export function Readers({ chat, row, onClose }: { chat: Chat; row: Row; onClose: () => void }) {
  const [users, setUsers] = useState<string[] | null>(null);
  const [more, setMore] = useState(false);
  const [why, setWhy] = useState("");
  useEffect(() => {
    chat.api.readers(row.conversationId, row.seq).then(
      (found) => (setUsers(found.users), setMore(found.more)),
      (e: Error) => setWhy(e.message),
    );
  }, [row.seq]);
  return (
    <Modal title="Read by" onClose={onClose}>
      {why && <p class="error" role="alert">{why}</p>}
      {users?.length === 0 && <p class="faint">Nobody yet.</p>}
      <ul class="people tall">
        {users?.map((u) => (
          <li key={u}>
            <Avatar name={u} small /> {u}
          </li>
        ))}
        {more && <li class="faint">and others</li>}
      </ul>
    </Modal>
  );
}
