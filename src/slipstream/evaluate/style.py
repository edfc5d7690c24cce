"""The style of the report: on a light or dark screen, on a narrow one, and on paper."""

from __future__ import annotations

from slipstream import colours

STYLE = (
    f"\n{colours.STYLE}"
    + """:root {
  --alarm: #d55e00;
  --paper: #fff; --ink: #1d2126; --soft: #59606a; --faint: #8b929c; --line: #e3e6ea; --wash: #f6f7f9;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --alarm: #ee7d33;
    --paper: #15181c; --ink: #e4e7eb; --soft: #a0a8b3; --faint: #7b838e; --line: #2c3138; --wash: #1c2025;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
.sheet { max-width: 1208px; margin: 0 auto; padding: 40px 32px 64px; }
header { display: flex; flex-wrap: wrap; gap: 18px 48px; justify-content: space-between; align-items: flex-end; }
.kicker { margin: 0; color: var(--soft); font-size: 13px; }
h1 { margin: 0; font-size: 24px; font-weight: 600; line-height: 1.25; overflow-wrap: anywhere; }
.measured { margin: 6px 0 0; color: var(--soft); max-width: 48ch; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 12px 36px; margin: 0; }
.figures div { display: flex; flex-direction: column-reverse; }
.figures dt { color: var(--soft); font-size: 12.5px; overflow-wrap: anywhere; }
.figures dd { margin: 0; font-size: 24px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.notes { margin: 22px 0 0; padding: 0; list-style: none; overflow-wrap: anywhere; }
.notes li { margin-top: 6px; padding: 7px 14px; background: var(--wash); border-left: 3px solid var(--faint); }
.notes .warning { border-left: 6px solid var(--alarm); font-weight: 600; }
.provenance { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 24px 0 0; padding: 12px 0; font-size: 12.5px;
  border: solid var(--line); border-width: 1px 0; line-height: 1.35; }
.provenance dt { color: var(--soft); }
.provenance dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: 540px 540px; justify-content: space-between; gap: 0 48px; }
figure { margin: 40px 0 0; }
h2 { margin: 0; font-size: 16px; font-weight: 600; }
figcaption p { margin: 2px 0 14px; color: var(--soft); font-size: 13px; line-height: 1.45; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0 0 10px; padding: 0; list-style: none;
  font-size: 12.5px; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 6px; min-width: 0; overflow-wrap: anywhere; }
.legend svg { flex: none; }
svg { display: block; max-width: 100%; height: auto; overflow: visible; }
.narrow { display: none; }
text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
text.strong { fill: var(--ink); font-weight: 600; }
text.small { font-size: 11px; }
text.end { text-anchor: end; } text.middle { text-anchor: middle; }
text.halo { stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; paint-order: stroke; }
text.iso { fill: var(--faint); font-size: 11px; }
.mark, .key { fill: var(--c); stroke: var(--paper); stroke-width: 1; }
.mark.plain, .key.plain { fill: var(--paper); stroke: var(--soft); stroke-width: 1.5; }
.bar { fill: var(--c); }
.whisker { fill: none; stroke: var(--c); stroke-width: 1.5; }
.grid { stroke: var(--line); } .one { stroke: var(--soft); stroke-width: 1.5; }
path.iso { stroke: var(--faint); stroke-dasharray: 2 4; }
.part, .swatch { stroke: var(--ink); stroke-width: .75; }
.ink { fill: var(--ink); } .grey { fill: var(--faint); } .under { fill: var(--paper); }
.strokes { fill: none; stroke: var(--ink); }
/* A term says what it means on hover and on focus. Its tip lies in the box of the nearest .tips, not in that of the
   term: so nothing that scrolls cuts it off, and it is never wider than the page. */
.tips { position: relative; }
th .term { display: inline-block; }
.term { cursor: help; text-decoration: underline dotted 1px; text-underline-offset: 3px; }
.term:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; border-radius: 2px; }
.tip { --wide: min(340px, 100%); position: absolute; z-index: 2; display: none; width: var(--wide); padding: 8px 12px;
  left: min(var(--at, 0%), 100% - var(--wide)); bottom: calc(100% + 4px); background: var(--ink); color: var(--paper);
  border-radius: 6px; font: 12.5px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans",
  sans-serif; text-align: left; white-space: normal; overflow-wrap: anywhere; }
.below .tip { top: calc(100% + 4px); bottom: auto; }
.term:hover .tip, .term:focus .tip { display: block; }
.numbers { margin-top: 48px; }
.scroll { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 3px 0 3px 14px; text-align: right; white-space: nowrap; font-weight: 400; }
thead th { color: var(--soft); vertical-align: bottom; line-height: 1.3; border-bottom: 1px solid var(--faint); }
th small { display: block; font-size: 11px; }
td small { color: var(--soft); font-size: 11.5px; }
tbody th, thead th:first-child { padding-left: 0; text-align: left; }
tbody .category { padding-top: 14px; font-weight: 600; border-bottom: 1px solid var(--line); }
tbody th { max-width: 22em; overflow: hidden; text-overflow: ellipsis; }
@media (max-width: 1191px) { .charts { display: block; } }
@media screen and (max-width: 610px) {
  .sheet { padding: 24px 24px 48px; }
  .wide { display: none; } .narrow { display: block; }
  .figures { gap: 12px 24px; } .figures dd { font-size: 20px; }
  tbody th { position: sticky; left: 0; background: var(--paper); max-width: 9em; }
}
@media print {
  :root { --ink: #000; --soft: #333; --faint: #777; --line: #ccc; }
  @page { margin: 14mm; }
  .sheet { padding: 0; max-width: none; }
  figure, tr, .notes li { break-inside: avoid; }
  .scroll { overflow: visible; }
  .term { text-decoration: none; } .term .tip { display: none; }
  table { font-size: 7.5pt; } th small, td small { display: block; font-size: 6.5pt; line-height: 1.1; }
  th, td { padding-left: 5px; vertical-align: top; }
  thead th { white-space: normal; }
}
"""
)

# Stages differ by grey and hatching, since hues are used for contestants.
PATTERN = '<pattern id="{}" width="6" height="6" patternUnits="userSpaceOnUse">{}</pattern>'
PATTERNS = "".join(
    PATTERN.format(stage, f'<path class="under" d="M0 0H6V6H0z"/>{drawn}')
    for stage, drawn in {
        "draft": '<path class="ink" d="M0 0H6V6H0z"/>',
        "verify": '<path class="grey" d="M0 0H6V6H0z"/>',
        "host": '<path class="strokes" d="M-1 7L7-1M-1 1L1-1M5 7L7 5"/>',
        "unaccounted": "",
    }.items()
)
DEFINITIONS = f'<svg width="0" height="0" style="position: absolute" aria-hidden="true"><defs>{PATTERNS}</defs></svg>'
