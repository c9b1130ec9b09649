// Elements, and the form of numbers. Text reaches the document as text nodes only, because replies cannot be trusted.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. An attribute that is a function listens to the event of that name. */
export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** A box of fixed height whose picture is drawn again when its width changes. */
export function picture(height, label, draw) {
  const box = h("div", { class: "picture" });
  box.style.height = `${height}px`;
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.floor(box.clientWidth);
    if (width === 0 || width === drawn) return;
    drawn = width;
    const frame = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label };
    box.replaceChildren(s("svg", frame, draw(width)));
  }).observe(box);
  return box;
}

/** A table in a group that can scroll sideways; `columns` are [title, class, row => cell]. */
export function table(caption, columns, rows) {
  const head = columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((row) =>
    h("tr", {}, columns.map(([title, kind, cell], i) =>
      h(i ? "td" : "th", { class: kind, scope: i ? null : "row", "data-title": title }, cell(row)))));
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

/** An option of a select; without a text it shows its value. */
export function option(value, text, chosen) {
  return h("option", { value, selected: value === chosen }, text ?? value);
}

export function badge(text, kind, title) {
  return h("span", { class: `badge ${kind}`, title }, text);
}

/** Content behind a line that opens it. */
export function fold(title, ...content) {
  return h("details", {}, h("summary", {}, title), content);
}

/** Pairs of a name and its value, without those that have no value. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([name, value, kind]) => h("div", { class: kind }, h("dt", {}, name), h("dd", {}, value))));
}

export function button(text, click, more) {
  return h("button", { type: "button", click, ...more }, text);
}

/** An input under its label. */
export function field(name, label, more) {
  return h("label", {}, label, h("input", { name, autocomplete: "off", spellcheck: "false", ...more }));
}

/** A select under its label; `values` are [value, text]. */
export function choice(name, label, values, chosen) {
  return h("label", {}, label, h("select", { name }, values.map(([value, text]) => option(value, text, chosen))));
}

/** The values of a form that are not empty. */
export function values(form) {
  return Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value));
}

/** Badges of a rollout or a step: its status, its fallback, its cap. */
export function badges(row) {
  const kind = { done: "good", failed: "bad" }[row.status] ?? "odd";
  return h("span", { class: "badges" },
    badge(row.status, kind, row.error_code ?? null),
    row.fallback ? badge("fallback", "odd", row.fallback) : null,
    row.capped ? badge(`capped: ${row.capped}`, "odd") : null);
}

export function usd(nano) {
  const dollars = Number(nano ?? 0) / 1e9;
  if (dollars === 0) return "$0";
  if (dollars >= 1) return `$${dollars.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
  const digits = Math.min(9, 2 - Math.floor(Math.log10(dollars)));
  return `$${dollars.toFixed(digits).replace(/0+$/, "")}`;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.1) return "< 0.1 ms";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1_000) return `${(value / 1000).toFixed(2)} s`;
  return `${value >= 10 ? Math.round(value) : Math.round(value * 10) / 10} ms`;
}

export function count(value) {
  return Number(value ?? 0).toLocaleString("en");
}

/** Microseconds since the epoch of a time in the API's form; null for null. */
export function micros(iso) {
  if (!iso) return null;
  const [, whole, part] = /^(.*?)(?:\.(\d+))?Z$/.exec(iso);
  return Date.parse(`${whole}Z`) * 1000 + Number((part ?? "0").padEnd(6, "0").slice(0, 6));
}

/** A local time of day, with the date unless it is today. */
export function clock(iso) {
  const at = new Date(iso);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString("sv")} `;
  return h("time", { datetime: iso, title: iso }, `${day}${at.toLocaleTimeString("sv")}`);
}
