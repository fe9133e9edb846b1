// From nobody to a running chat: who signs in, which tab may run, the client and the HTTP API.
import { signal } from "@preact/signals";
import { Client, alone } from "../index";
import { Api } from "../edge/api";
import { Chat } from "./chat";

/** What the page's own server answers on a sign-in. */
interface SignIn {
  user: string;
  token: string;
  ipconfig_url: string;
  msg_urls: string[];
  attachment_bytes_max: number;
}

export type Screen =
  | { at: "sign-in"; why: string }
  | { at: "starting" }
  | { at: "elsewhere"; ask: () => void }
  | { at: "chat"; chat: Chat }
  | { at: "broken"; why: string };

const NAME = "plato.name";
export const screen = signal<Screen>({ at: "starting" });

/** Goes on as who signed in before, else asks. The name may stand in the address: #alice. */
export function begin(): void {
  const name = decodeURIComponent(location.hash.slice(1)) || stored();
  if (name) void enter(name);
  else screen.value = { at: "sign-in", why: "" };
}

export async function enter(name: string): Promise<void> {
  screen.value = { at: "starting" };
  let first: SignIn;
  try {
    first = await signIn(name);
  } catch (e) {
    screen.value = { at: "sign-in", why: (e as Error).message };
    return;
  }
  remember(first.user);
  try {
    await run(first);
  } catch (e) {
    screen.value = { at: "broken", why: `This browser keeps no data for the page: ${(e as Error).message}` };
  }
}

async function run(first: SignIn): Promise<void> {
  let client: Client | undefined;
  const asked = (ask: () => void): void => {
    screen.value = { at: "elsewhere", ask };
  };
  const yielded = async (): Promise<void> => {
    await client?.close();
    screen.value = { at: "elsewhere", ask: () => location.reload() };
  };
  const place = await alone(`plato:${first.user}`, asked, yielded);
  let token: string | null = first.token;
  const provider = async (): Promise<string> => {
    const given = token ?? (await signIn(first.user)).token;
    token = null; // asked again, it is another one that is wanted
    return given;
  };
  client = await Client.open({ user: first.user, token: provider, ipconfigUrl: first.ipconfig_url, tail: 300, platform: "web" });
  const running = client;
  const api = new Api(first.msg_urls, (fresh) => running.token(fresh));
  const chat = new Chat(client, api, first.attachment_bytes_max, async () => {
    await running.logout();
    place.release();
    forget();
    history.replaceState(null, "", location.pathname);
    screen.value = { at: "sign-in", why: "" };
  });
  screen.value = { at: "chat", chat };
}

async function signIn(name: string): Promise<SignIn> {
  let response: Response;
  try {
    response = await fetch("sign-in", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ name }),
    });
  } catch {
    throw new Error("Plato does not answer here; is it up?");
  }
  const said = (await response.json().catch(() => ({}))) as SignIn & { error?: string };
  if (!response.ok) throw new Error(said.error ?? `status ${response.status}`);
  return said;
}

// The tab's own name comes first, so that two tabs may be two people; the browser's is that of the last sign-in.
function stored(): string {
  return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
}

function remember(name: string): void {
  sessionStorage.setItem(NAME, name);
  localStorage.setItem(NAME, name);
}

function forget(): void {
  sessionStorage.removeItem(NAME);
  localStorage.removeItem(NAME);
}
