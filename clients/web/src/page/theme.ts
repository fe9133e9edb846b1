// Light, dark, or as the system is.
import { signal } from "@preact/signals";

export type Theme = "auto" | "light" | "dark";

const KEY = "plato.theme";
const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };
const kept = localStorage.getItem(KEY);
export const theme = signal<Theme>(kept === "light" || kept === "dark" ? kept : "auto");

export function nextTheme(): void {
  theme.value = NEXT[theme.value];
  localStorage.setItem(KEY, theme.value);
  show();
}

export function show(): void {
  if (theme.value === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme.value;
}
