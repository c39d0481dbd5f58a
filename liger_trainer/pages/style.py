"""The look of a page. Charts and page share its colours, which follow the reader's choice of light or dark."""

COLOURS = 6  # of lines, told apart by readers with a colour vision deficiency; further lines are dashed

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2127; --faint: #626a75; --rule: #e1e4e9;
  --c0: #0b64c0; --c1: #c2410c; --c2: #067a57; --c3: #9b3fae; --c4: #8a6a00; --c5: #47525f; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --text: #e4e7eb; --faint: #9aa3af; --rule: #2c323a;
  --c0: #6cb2ff; --c1: #ff9a62; --c2: #46cf9f; --c3: #da92ea; --c4: #e0bd4a; --c5: #b4bfcc; } }
* { box-sizing: border-box; }
body { max-width: 72rem; margin: 0 auto; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.125rem; margin: 2rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--rule); }
section { display: grid; gap: 1rem 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
section > * { grid-column: 1 / -1; margin: 0; min-width: 0; }
section > figure { grid-column: auto; }
p { white-space: pre-wrap; }
figcaption { font-size: .8125rem; color: var(--faint); }
figcaption b { display: block; font-size: .9375rem; font-weight: 600; color: var(--text); }
figcaption span { display: inline-block; margin-right: .9em; }
svg { display: block; width: 100%; height: auto; }
figcaption svg { display: inline-block; width: 1.6em; height: .6em; margin-right: .35em; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); }
svg path { fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
svg path.grid { stroke: var(--rule); stroke-width: 1; }
svg path.dots { stroke-width: 5; stroke-dasharray: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule);
  white-space: pre-wrap; overflow-wrap: break-word; min-width: 5rem; max-width: 36rem; }
th:last-child, td:last-child { min-width: 8rem; }
th { color: var(--faint); font-weight: 500; }
td.number { text-align: right; }
@media print { figure, tr { break-inside: avoid; } }
"""
