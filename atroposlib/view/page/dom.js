// Elements, numbers and times. Text of a run is hostile: it only ever becomes a text node.

export const find = (id) => document.getElementById(id);

// Replaces the children of a node. What had the focus keeps it, if it has an id.
export function fill(node, ...children) {
	const focus = node.contains(document.activeElement) && document.activeElement.id;
	node.replaceChildren(...children.flat(Infinity).filter((child) => child || child === 0));
	if (focus) find(focus)?.focus({ preventScroll: true });
	return node;
}

// h("p.muted", {title: ...}, child, ...): attributes and children may be left out or null
const maker = (namespace) => (what, ...children) => {
	const [tag, ...classes] = what.split(".");
	const node = document.createElementNS(namespace, tag);
	const { class: more, ...attributes } = children[0]?.constructor === Object ? children.shift() : {};
	const all = [...classes, more].filter(Boolean).join(" ");
	if (all) node.setAttribute("class", all);
	for (const [name, value] of Object.entries(attributes)) {
		if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
		else if (name === "style") node.style.cssText = value; // the server's policy forbids the attribute
		else if (value != null && value !== false) node.setAttribute(name, value);
	}
	return fill(node, children);
};

export const h = maker(document.documentElement.namespaceURI);
export const svg = maker("http://www.w3.org/2000/svg");
export const empty = (...text) => h("p.empty", ...text);
export const badge = (kind, text) => h("span.badge", { class: kind }, text);
export const link = (text, href, more) => h("a", { href, ...more }, text);
export const button = (text, href, more) => h("a.button", { href, ...more }, text);
export const key = (look) => svg("svg.key", { width: 18, height: 4 }, svg("path", { class: look, d: "M0 2h18" }));
export const speak = (text) => fill(find("spoken"), text);

// columns: [title, cell(row, place), true for the heading of its row, attributes of the title]. A row opens its [data-row].
export function table(columns, rows, kind = "list") {
	const cell = (row, place) => ([title, value, heading]) => {
		const label = title.textContent ?? title;
		if (heading) return h("th", { scope: "row" }, value(row, place));
		return h("td", { "data-label": label, class: `in-${label.toLowerCase()}` }, value(row, place));
	};
	function open({ target, currentTarget }) {
		if (!target.closest("a, button, input, label") && getSelection().isCollapsed) currentTarget.querySelector("[data-row]")?.click();
	}
	const head = h("tr", columns.map(([title, , , more]) => h("th", { scope: "col", ...more }, title)));
	return h(`table.${kind}`, h("thead", head), h("tbody", rows.map((row, i) => h("tr", { onclick: open }, columns.map(cell(row, i))))));
}

// A labelled <select>, where `type` is {value: text}, or a checkbox, which is "yes" or "".
export function control(label, type, value, changed, more) {
	const onchange = ({ target }) => changed(type === "checkbox" ? target.checked && "yes" : target.value);
	if (type === "checkbox") return h("label.checkbox", h("input", { type, onchange, checked: value === "yes", ...more }), label);
	const option = ([one, text]) => h("option", { value: one, selected: one === value }, text);
	return h("label", label, h("select", { onchange, ...more }, Object.entries(type).map(option)));
}

const NONE = "–"; // a missing number or time

export function num(value) {
	if (value == null) return NONE;
	const size = Math.abs(value);
	let text = String(Number(value.toPrecision(size < 1 ? 3 : 4)));
	if (Number.isInteger(value)) text = value.toLocaleString("en");
	else if (size < 1e-3 || size >= 1e6) text = value.toExponential(1);
	return text.replace(".0e", "e").replace("e+", "e").replaceAll("-", "−");
}

// A score has a sign and a colour.
export const gradeOf = (score) => (score == null ? "none" : score >= 1 ? "right" : score > 0 ? "partly" : "wrong");
const GRADES = { right: "✓", partly: "◐", wrong: "✗", none: "?" };
export const score = (value) => h("span.score", { class: gradeOf(value) }, `${GRADES[gradeOf(value)]} ${num(value)}`);

export const percent = (value) => (value == null ? NONE : `${Number((100 * value).toFixed(1))} %`);
export const count = (n, one) => `${num(n)} ${one}${n === 1 ? "" : "s"}`;
export const dots = (...parts) => parts.flat().filter(Boolean).join(" · ");
export const textOf = (value) => (typeof value === "string" ? value : value == null ? "" : JSON.stringify(value));
export const median = (values) => values.filter(Number.isFinite).sort((a, b) => a - b)[Math.floor(values.length / 2)];

export function seconds(value) {
	if (value < 1) return `${Math.round(value * 1000)} ms`;
	if (value < 60) return `${Number(value.toFixed(1))} s`;
	const minutes = Math.floor(value / 60);
	return minutes < 60 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const dateOf = (time) => new Date(typeof time === "string" ? time.replace(/([+-]\d\d)(\d\d)$/, "$1:$2") : time * 1000);
export const when = (time) => (time ? dateOf(time).toLocaleString("en-GB") : NONE);

// A run's text may be any word, "constructor" too.
export const own = (table, key, otherwise) => (Object.hasOwn(table, key) ? table[key] : otherwise);
