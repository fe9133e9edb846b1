// Where a message is written: text, files, and what it answers or changes.
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { Icon } from "./icons";
import { summary } from "./lines";
import type { Talk } from "./talk";

const MOST_HEIGHT = 180;

export function Composer({ talk, name }: { talk: Talk; name: string }) {
  const area = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const reply = talk.reply.value;
  const editing = talk.editing.value;

  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) area.current?.focus();
  }, [talk]);
  useEffect(() => {
    if (reply || editing) area.current?.focus();
  }, [reply, editing]);
  useLayoutEffect(() => {
    const element = area.current;
    if (!element) return;
    element.style.height = "auto";
    element.style.height = `${Math.min(MOST_HEIGHT, element.scrollHeight)}px`;
  }, [talk.draft.value]);

  const onKey = (e: KeyboardEvent): void => {
    if (e.isComposing) return; // an input method's own Enter
    if (e.key === "Enter" && !e.shiftKey) {
      e.preventDefault();
      void talk.submit();
    } else if (e.key === "Escape") {
      if (!talk.cancel()) area.current?.blur();
    } else if (e.key === "ArrowUp" && talk.draft.value === "" && !e.altKey) {
      e.preventDefault();
      talk.editLast();
    }
  };
  const onPaste = (e: ClipboardEvent): void => {
    const files = [...(e.clipboardData?.files ?? [])];
    if (files.length === 0) return;
    e.preventDefault();
    talk.attach(files);
  };

  return (
    <footer class="composer">
      {(reply || editing) && (
        <div class="about">
          <Icon name={editing ? "pencil" : "reply"} />
          <span>
            <b>{editing ? "Edit message" : `Reply to ${reply!.fromUser === talk.chat.user ? "yourself" : reply!.fromUser}`}</b>
            <span>{summary((editing ?? reply)!, talk.chat.user)}</span>
          </span>
          <button type="button" class="round" aria-label="Cancel" onClick={() => talk.cancel()}>
            <Icon name="close" />
          </button>
        </div>
      )}
      <div class="write">
        <input ref={picker} type="file" multiple hidden aria-hidden="true" tabIndex={-1} onChange={(e) => (talk.attach([...(e.currentTarget.files ?? [])]), (e.currentTarget.value = ""))} />
        <button type="button" class="round" aria-label="Attach pictures or files" title="Attach" onClick={() => picker.current?.click()}>
          <Icon name="attach" />
        </button>
        <textarea ref={area} rows={1} placeholder="Message" aria-label={`Message to ${name}`} value={talk.draft.value} onInput={(e) => talk.write(e.currentTarget.value)} onKeyDown={onKey} onPaste={onPaste} />
        <button type="button" class="round send" aria-label="Send" disabled={talk.draft.value.trim() === ""} onClick={() => void talk.submit()}>
          <Icon name="send" />
        </button>
      </div>
    </footer>
  );
}
