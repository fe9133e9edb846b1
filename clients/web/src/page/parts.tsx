// Small parts that more than one view shows.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { hue, initials } from "./lines";
import { Icon } from "./icons";

export function Avatar({ name, group = false, small = false }: { name: string; group?: boolean; small?: boolean }) {
  return (
    <span class={`avatar hue-${hue(name)} ${small ? "small" : ""}`} aria-hidden="true">
      {group ? <Icon name="people" /> : initials(name)}
    </span>
  );
}

const LINK = /\bhttps?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?()[\]{}]/g;

/** Text with links that lead out of this page safely; all else is text. */
export function Text({ text, mark = "" }: { text: string; mark?: string }) {
  const parts: ComponentChildren[] = [];
  let at = 0;
  for (const match of text.matchAll(LINK)) {
    parts.push(<Marked text={text.slice(at, match.index)} mark={mark} />);
    parts.push(
      <a href={match[0]} target="_blank" rel="noopener noreferrer nofollow">
        {match[0]}
      </a>,
    );
    at = match.index + match[0].length;
  }
  parts.push(<Marked text={text.slice(at)} mark={mark} />);
  return <>{parts}</>;
}

function Marked({ text, mark }: { text: string; mark: string }) {
  const at = mark ? text.toLowerCase().indexOf(mark.toLowerCase()) : -1;
  if (at < 0) return <>{text}</>;
  return (
    <>
      {text.slice(0, at)}
      <mark>{text.slice(at, at + mark.length)}</mark>
      {text.slice(at + mark.length)}
    </>
  );
}

/** A modal window; Esc and a click beside it close it. */
export function Modal({ title, onClose, children, wide = false }: { title: string; onClose: () => void; children: ComponentChildren; wide?: boolean }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  return (
    <dialog ref={dialog} class={wide ? "modal wide" : "modal"} aria-label={title} onClose={onClose} onClick={(e) => e.target === dialog.current && onClose()}>
      <div class="modal-body">
        <header>
          <h2>{title}</h2>
          <button type="button" class="round" aria-label="Close" onClick={onClose}>
            <Icon name="close" />
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}

export interface Choice {
  label: string;
  danger?: boolean;
  act: () => void;
}

/** A button that opens a menu. Arrows move, Esc closes. */
export function Menu({ label, choices, icon = "more" }: { label: string; choices: Choice[]; icon?: "more" | "down" }) {
  const [open, setOpen] = useState(false);
  const [up, setUp] = useState(false);
  const root = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (!open) return;
    const away = (e: Event): void => {
      if (!root.current?.contains(e.target as Node)) setOpen(false);
    };
    document.addEventListener("pointerdown", away);
    root.current?.querySelector<HTMLElement>("[role=menuitem]")?.focus();
    return () => document.removeEventListener("pointerdown", away);
  }, [open]);
  const move = (e: KeyboardEvent): void => {
    const all = [...(root.current?.querySelectorAll<HTMLElement>("[role=menuitem]") ?? [])];
    const at = all.indexOf(document.activeElement as HTMLElement);
    if (e.key === "Escape") {
      setOpen(false);
      root.current?.querySelector("button")?.focus();
    } else if (e.key === "ArrowDown") all[(at + 1) % all.length]?.focus();
    else if (e.key === "ArrowUp") all[(at - 1 + all.length) % all.length]?.focus();
    else return;
    e.preventDefault();
    e.stopPropagation();
  };
  const toggle = (e: MouseEvent): void => {
    setUp((e.currentTarget as HTMLElement).getBoundingClientRect().bottom > innerHeight * 0.6);
    setOpen(!open);
  };
  return (
    <div class="menu" ref={root} onKeyDown={open ? move : undefined}>
      <button type="button" class="round" aria-label={label} aria-haspopup="menu" aria-expanded={open} onClick={toggle}>
        <Icon name={icon} />
      </button>
      {open && (
        <div class={up ? "menu-list up" : "menu-list"} role="menu" aria-label={label}>
          {choices.map((c) => (
            <button
              type="button"
              role="menuitem"
              class={c.danger ? "danger" : ""}
              onClick={() => {
                setOpen(false);
                c.act();
              }}
            >
              {c.label}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
