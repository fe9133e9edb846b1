// One message: a bubble, or a line about what was done.
import { useEffect, useRef } from "preact/hooks";
import { type Attachment, type Entry, type Row, isOperation, richOf } from "../index";
import { Attachments } from "./files";
import { Icon } from "./icons";
import { fullTime, hue, systemLine, time } from "./lines";
import { Avatar, type Choice, Menu, Text } from "./parts";
import type { Talk } from "./talk";

export type Tick = "queued" | "accepted" | "stored" | "read" | "";

export interface Shown {
  said: Row | Entry;
  from: string;
  mine: boolean;
  atMs: number;
  /** The first and the last of a run by one sender. */
  first: boolean;
  last: boolean;
  tick: Tick;
}

export const isRow = (said: Row | Entry): said is Row => "seq" in said;

const TICKS = { queued: ["clock", "Waiting to be sent"], accepted: ["tick", "Sent"], stored: ["ticks", "Delivered"], read: ["ticks", "Read"] } as const;

export function Bubble({ talk, shown, onView, onInfo, group }: { talk: Talk; shown: Shown; onView: (a: Attachment) => void; onInfo: (row: Row) => void; group: boolean }) {
  const { said, mine, from } = shown;
  const element = useRef<HTMLElement>(null);
  const row = isRow(said) ? said : null;
  const target = row !== null && talk.target.value === row.seq;
  useEffect(() => {
    if (!target) return;
    element.current?.scrollIntoView({ block: "center" });
    element.current?.focus();
  }, [target]);
  if (isOperation(said.msgType)) {
    return (
      <p class="system" data-seq={row?.seq}>
        {systemLine(from, said.msgType, said.body, talk.chat.user)}
      </p>
    );
  }
  const recalled = row?.recalled ?? false;
  const edited = !recalled && (row?.changedSeq ?? 0) > 0;
  const rich = recalled ? null : richOf(said.msgType, said.body);
  const pictureOnly = rich !== null && rich.attachments.length > 0 && rich.text === "";
  const choices = row ? choicesOf(talk, row, mine, onInfo) : [];
  const classes = ["message", mine ? "mine" : "theirs", shown.first ? "first" : "", shown.last ? "last" : "", target ? "target" : "", pictureOnly ? "bare" : ""];
  const reply = rich?.reply;
  return (
    <article
      ref={element}
      class={classes.join(" ")}
      tabIndex={-1}
      data-seq={row?.seq}
      aria-label={`${mine ? "You" : from}, ${time(shown.atMs)}`}
      onDblClick={() => row && !recalled && talk.beginReply(row)}
    >
      {group && !mine && <span class="side">{shown.last && <Avatar name={from} small />}</span>}
      <div class="bubble">
        {group && !mine && shown.first && <b class={`sender ink-${hue(from)}`}>{from}</b>}
        {reply && (
          <button type="button" class={`quote edge-${hue(reply.fromUser)}`} onClick={() => void talk.reach(Number(reply.seq))} aria-label={`Answers ${reply.fromUser}: ${reply.text}`}>
            <b>{reply.fromUser === talk.chat.user ? "You" : reply.fromUser}</b>
            <span>{isRecalled(talk, Number(reply.seq)) ? "Message recalled" : reply.text}</span>
          </button>
        )}
        {rich && rich.attachments.length > 0 && <Attachments api={talk.chat.api} list={rich.attachments} onView={onView} onFail={(why) => talk.chat.tell(why)} />}
        <div class="text">
          {recalled ? <i>{mine ? "You recalled this message" : "This message was recalled"}</i> : rich ? <Text text={rich.text} /> : <i>Message of another kind</i>}
          <span class="meta">
            {edited && <span>edited</span>}
            <time title={fullTime(shown.atMs)}>{time(shown.atMs)}</time>
            {mine && shown.tick !== "" && !recalled && (
              <span class={`tick ${shown.tick}`} title={TICKS[shown.tick][1]}>
                <Icon name={TICKS[shown.tick][0]} label={TICKS[shown.tick][1]} />
              </span>
            )}
          </span>
        </div>
      </div>
      {choices.length > 0 && (
        <div class="actions">
          {!recalled && row && (
            <button type="button" class="round" aria-label="Reply" title="Reply" onClick={() => talk.beginReply(row)}>
              <Icon name="reply" />
            </button>
          )}
          <Menu label="Message" choices={choices} icon="down" />
        </div>
      )}
    </article>
  );
}

function choicesOf(talk: Talk, row: Row, mine: boolean, onInfo: (row: Row) => void): Choice[] {
  const { chat } = talk;
  const text = richOf(row.msgType, row.body)?.text ?? "";
  const left = talk.thread?.left ?? false;
  const all: (Choice | false)[] = [
    !row.recalled && !left && { label: "Reply", act: () => talk.beginReply(row) },
    !row.recalled && text !== "" && { label: "Copy text", act: () => void chat.try(navigator.clipboard.writeText(text)) },
    mine && !row.recalled && !left && text !== "" && { label: "Edit", act: () => talk.beginEdit(row) },
    mine && !row.recalled && { label: "Read by …", act: () => onInfo(row) },
    !row.recalled && !left && (mine || talk.mayModerate.value) && { label: "Recall for everybody", danger: true, act: () => void chat.try(chat.client.recall(row)) },
    { label: "Delete for me", danger: true, act: () => void chat.try(chat.api.hide(row.msgId)) },
  ];
  return all.filter((choice) => choice !== false);
}

const isRecalled = (talk: Talk, seq: number): boolean => talk.rows.value.some((row) => row.seq === seq && row.recalled);
