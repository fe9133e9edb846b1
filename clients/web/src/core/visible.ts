// What may stand in a name that people read, as plato.core.visible has it: the same tables, in the same order. What shows
// nothing, and what turns the direction of text, is taken away; joiners, selectors and tags stay where they work.
// libs/plato/tests/visible.json has what both must answer.

type Ranges = readonly (readonly [number, number])[];

const NEVER: Ranges = [
  [0x00, 0x1f],
  [0x7f, 0x9f],
  [0xad, 0xad],
  [0x34f, 0x34f],
  [0x61c, 0x61c],
  [0x115f, 0x1160],
  [0x17b4, 0x17b5],
  [0x200b, 0x200b],
  [0x200e, 0x200f],
  [0x2028, 0x202e],
  [0x2060, 0x206f],
  [0x3164, 0x3164],
  [0xfeff, 0xfeff],
  [0xffa0, 0xffa0],
  [0xfff0, 0xfffc],
  [0x1bca0, 0x1bca3],
  [0x1d159, 0x1d159],
  [0x1d173, 0x1d17a],
  [0xe0000, 0xe001f],
  [0xe0080, 0xe00ff],
  [0xe01f0, 0xe0fff],
];
const JOINING: Ranges = [
  [0x600, 0x8ff],
  [0x900, 0xdff],
  [0xf00, 0x109f],
  [0x1700, 0x18af],
  [0x1900, 0x1cff],
  [0xa800, 0xabff],
  [0x10a00, 0x11fff],
  [0x1e900, 0x1e95f],
];
const VIRAMAS: ReadonlySet<number> = new Set([
  0x94d, 0x9cd, 0xa4d, 0xacd, 0xb4d, 0xbcd, 0xc4d, 0xccd, 0xd4d, 0xdca, 0xf84, 0x1039, 0x103a, 0x1714, 0x1734, 0x17d2, 0x1a60,
  0x1b44, 0x1baa,
]);
const EMOJI: Ranges = [
  [0x2190, 0x2bff],
  [0xfe0f, 0xfe0f],
  [0x1f000, 0x1faff],
  [0xe007f, 0xe007f],
];
const VARIED: Ranges = [
  [0x23, 0x23],
  [0x2a, 0x2a],
  [0x30, 0x39],
  [0xa9, 0xa9],
  [0xae, 0xae],
  [0x1000, 0x109f],
  [0x203c, 0x3299],
  [0x3400, 0x9fff],
  [0xa840, 0xa877],
  [0xf900, 0xfaff],
  [0xff00, 0xffef],
  [0x1f000, 0x1faff],
  [0x20000, 0x3ffff],
];
const HAN: Ranges = [
  [0x3400, 0x9fff],
  [0xf900, 0xfaff],
  [0x20000, 0x3ffff],
];
const MONGOLIAN: Ranges = [
  [0x1800, 0x180a],
  [0x1810, 0x18af],
];
/** [characters, what they must stand behind]. */
const BEHIND: readonly (readonly [Ranges, Ranges])[] = [
  [[[0xfe00, 0xfe0f]], VARIED],
  [[[0xe0100, 0xe01ef]], HAN],
  [[[0x180b, 0x180f]], MONGOLIAN],
  [
    [[0xe0020, 0xe007f]],
    [
      [0x1f3f4, 0x1f3f4],
      [0xe0020, 0xe007e],
    ],
  ],
  [[[0x2800, 0x2800]], [[0x2801, 0x28ff]]],
];
const NON_JOINER = 0x200c;
const JOINER = 0x200d;

const within = (code: number, table: Ranges): boolean => table.some(([first, last]) => first <= code && code <= last);

function joins(code: number, before: number, after: number): boolean {
  if (VIRAMAS.has(before)) return true;
  if (BEHIND.some(([characters]) => within(after, characters))) return false; // it does not stand behind what it must
  if (within(before, JOINING)) return within(after, JOINING);
  return code === JOINER && within(before, EMOJI) && within(after, EMOJI);
}

/** The text without what shows nothing, or turns the rest. */
export function plain(text: string): string {
  const codes = [...text].map((c) => c.codePointAt(0)!).filter((code) => !within(code, NEVER));
  const kept: number[] = [];
  codes.forEach((code, place) => {
    const before = kept[kept.length - 1] ?? 0;
    if (code === NON_JOINER || code === JOINER) {
      if (!joins(code, before, codes[place + 1] ?? 0)) return;
    } else if (BEHIND.some(([characters, behind]) => within(code, characters) && !within(before, behind))) return;
    kept.push(code);
  });
  return kept.map((code) => String.fromCodePoint(code)).join("");
}
