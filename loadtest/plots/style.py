"""The report's style sheet. Contrast is at least 3:1 for colours and 4.5:1 for text."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f7f7f5; --card: #ffffff; --text: #1d1f24; --muted: #5d636f; --rule: #e3e5e9;
  --one: #2563c9; --two: #c2500a; --quiet: #858b97; --bad: #b3164e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #131519; --card: #1b1e24; --text: #e8eaee; --muted: #a3a9b5; --rule: #30353e;
    --one: #6ea4ff; --two: #f2954e; --quiet: #7d8594; --bad: #ff6f9d;
  }
}
* { box-sizing: border-box; }
body, svg text { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
body {
  margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem;
  background: var(--ground); color: var(--text);
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
p { margin: .25rem 0; }
.muted { color: var(--muted); overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: .75rem 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; gap: 0; } }
.grid {
  display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
}
figure, .wide {
  margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: .5rem;
}
figure { padding: .75rem; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
figure p { color: var(--muted); font-size: .85rem; }
.keys { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .85rem; }
.swatch { display: inline-block; width: 1.2rem; margin-right: .35rem; vertical-align: .25em; }
.swatch { border-top: 3px solid currentColor; }
.swatch.line.two { border-top-style: dashed; }
.swatch.line.quiet { border-top-style: dotted; }
.wide { overflow-x: auto; }
.grid + .wide { margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; color: var(--muted); padding: .5rem .75rem; font-size: .85rem; }
th, td {
  padding: .4rem .75rem; text-align: right; border-top: 1px solid var(--rule);
  white-space: nowrap; font-variant-numeric: tabular-nums;
}
th:first-child, td:first-child { text-align: left; }
thead th { border-top: 0; font-weight: 600; }
.wrong { color: var(--bad); font-weight: 600; }
details { margin-top: 1rem; }
summary { cursor: pointer; font-weight: 600; padding: .5rem 0; }

svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--muted); }
svg .label {
  fill: var(--text); paint-order: stroke; stroke: var(--card); stroke-width: 4px;
  stroke-linejoin: round;
}
.axis, .rule, path.line, path.stroke { fill: none; stroke: currentColor; }
.axis { color: var(--muted); }
.rule { color: var(--rule); }
.line { stroke-width: 2; stroke-linejoin: round; }
.stroke.quiet { opacity: .4; }
.bar, .dot { fill: currentColor; }
.one { color: var(--one); }
.two { color: var(--two); }
.quiet { color: var(--quiet); }
.bad { color: var(--bad); }
.line.two { stroke-dasharray: 6 3; }
.line.quiet { stroke-width: 1.25; stroke-dasharray: 2 2; }
.dot.two { fill: var(--card); stroke: currentColor; stroke-width: 2; }
"""
