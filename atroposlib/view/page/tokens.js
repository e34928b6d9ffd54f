// Every token of a sequence in a colour for one of its numbers.

import { count, fill, find, h, num } from "./dom.js";

const MORE = 2000; // tokens that are drawn at once
const EDGES = [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2];
const LIKELY = [0.1, 0.5, 1, 2, 4, 8];

const level = (edges, value) => `h${edges.filter((edge) => value >= edge).length + 1}`;
const ranges = (edges, sign) => [0, ...edges].map((edge, i) => [`h${i + 1}`, `from ${sign}${num(edge)}`]);

// of: the value that colours a token; look: its class; legend: [class, text]
export const COLOURS = {
	diff: {
		name: "Trainer − sampler",
		of: (t) => t.diff,
		look: (diff) => (diff === 0 ? "same" : level(EDGES, Math.abs(diff))),
		legend: () => [["same", "0 nats: identical bits"], ...ranges(EDGES, "")],
	},
	sampler: {
		name: "Sampler log-probability",
		of: (t) => t.sampler,
		look: (value) => level(LIKELY, -value),
		legend: () => ranges(LIKELY, "−"),
	},
	version: {
		name: "Policy version",
		of: (t) => t.version,
		look: (version) => `v${version % 4}`,
		legend: (tokens) => [...new Set(tokens.map((t) => t.version ?? "none"))].sort().map((one) => [`v${one % 4}`, one]),
	},
	mask: {
		name: "Mask",
		of: (t) => t.trained,
		look: (trained) => (trained ? "same" : "off"),
		legend: () => [["same", "trained on"], ["off", "not trained on: prompt, tool results, padding"]],
	},
};

export const tokensOf = ({ tokens, pieces, mask, versions, sampler_logprobs, trainer_logprobs }) =>
	tokens.map((id, i) => {
		const sampler = sampler_logprobs?.[i] ?? null;
		const trainer = trainer_logprobs?.[i] ?? null;
		const diff = sampler === null || trainer === null ? null : trainer - sampler;
		const text = pieces ? pieces[i] || "◌" : `${id} `;
		return { place: i + 1, id, text, sampler, trainer, diff, version: versions?.[i] ?? null, trained: Boolean(mask[i]) };
	});

export function exactness(tokens) {
	const known = tokens.filter((t) => t.diff !== null);
	if (!known.length) return null;
	const same = known.filter((t) => t.diff === 0).length;
	const largest = known.reduce((most, { diff }) => Math.max(most, Math.abs(diff)), 0);
	const of = `${num(same)} of ${count(known.length, "trained token")}`;
	return `Identical bits in trainer and sampler: ${of}. Largest difference: ${num(largest)} nats.`;
}

export const legend = (colour, tokens) =>
	COLOURS[colour].legend(tokens).map(([look, text]) => h("small.muted", h("i.t", { class: look }), text));

const describe = (t) => [
	`Token ${t.place}, id ${t.id}`,
	`sampler ${t.sampler ?? "–"}`,
	`trainer ${t.trainer ?? "–"}`,
	t.diff === 0 ? "difference 0: identical bits" : t.diff && `difference ${t.diff.toExponential(2)}`,
	t.version !== null && `policy version ${t.version}`,
	t.trained ? "trained on" : "not trained on",
];

const box = h("div.tip.card", { role: "status", hidden: true });
export const untell = () => (box.hidden = true);
function tell({ target }) {
	if (!target.token) return;
	fill(box, describe(target.token).map((text) => text && h("div", text)));
	box.hidden = false;
	find("main").append(box);
	const { left, top, bottom } = target.getBoundingClientRect();
	const { offsetWidth, offsetHeight } = box;
	box.style.left = `${Math.max(0, Math.min(left, innerWidth - offsetWidth))}px`;
	box.style.top = `${bottom + offsetHeight < innerHeight ? bottom + 6 : top - offsetHeight - 6}px`;
}
addEventListener("scroll", untell, true);

export function heat(tokens, colour, from) {
	const { name, of, look } = COLOURS[colour];
	const walk = (event) => {
		const to = event.target[{ ArrowRight: "nextSibling", ArrowLeft: "previousSibling" }[event.key]];
		if (!to) return;
		event.preventDefault();
		event.target.tabIndex = -1;
		to.tabIndex = 0;
		to.focus();
	};
	const listeners = { onpointerover: tell, onpointerleave: untell, onfocusin: tell, onfocusout: untell, onkeydown: walk };
	const node = h("div.tokens", { role: "group", "aria-label": `Tokens by ${name}. Arrow keys walk.`, ...listeners });
	function draw(start) {
		for (const token of tokens.slice(start, start + MORE)) {
			const text = token.text.replace(/\n/g, "↵\n").replace(/\t/g, "→\t");
			const shade = of(token) === null ? "off" : look(of(token));
			const one = h("span.t", { class: shade, tabindex: node.firstChild ? -1 : 0 }, text);
			one.token = token;
			node.append(one);
		}
		const left = tokens.length - start - MORE;
		const more = h("button", { onclick: () => (more.remove(), draw(start + MORE)) }, `Show more of ${count(left, "token")}`);
		if (left > 0) node.append(more);
	}
	draw(from);
	return node;
}
