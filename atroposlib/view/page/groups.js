// The groups, held-out answers or dead letters of a run. What is filtered stands in the address.

import { badge, button, count, empty, fill, find, gradeOf, h, link, num, own, percent, score, table, when } from "./dom.js";
import { address, get, here, hereWith, param, site, toGroups, turn } from "./site.js";

const LIMIT = 50;
export const TABS = { samples: "Groups", held_out: "Held-out answers", dead_letters: "Dead letters" };
const NOTHING = {
	samples: "No groups yet.",
	held_out: "No held-out answers yet; older runs kept none.",
	dead_letters: "No dead letters: the API could use every group.",
};
export const source = () => (own(TABS, param("source")) ? param("source") : "samples");

export function strip(all) {
	const known = (all ?? []).filter(Number.isFinite).sort((a, b) => b - a);
	const counts = [...new Set(known)].map((one) => [one, known.filter((other) => other === one).length]);
	const part = ([value, n]) => h("i", { class: gradeOf(value), style: `flex: ${n}` });
	const text = counts.slice(0, 4).map(([value, n]) => (n > 1 ? `${num(n)} × ${num(value)}` : num(value))).join(", ");
	return counts.length > 0 && h("div.strip", h("span", { "aria-hidden": true }, counts.map(part)), h("small", counts.length > 4 ? `${text}, …` : text));
}

function mark(row) {
	const value = row.mean ?? row.scores?.[0];
	return value == null ? badge("warn", "not scored") : score(value);
}

const notes = (row) => [
	row.error && badge("bad", row.error),
	row.dropped && badge("warn", `dropped: ${row.dropped}`),
	row.left_out && badge("", `left out: ${row.left_out}`),
	row.failed > 0 && badge("bad", `${num(row.failed)} failed`),
	row.truncated > 0 && badge("", row.scores?.length > 1 ? `${num(row.truncated)} cut off` : "cut off"),
];

function question(row, place) {
	const { parts, params } = here();
	const at = (Number(param("offset")) || 0) + place;
	const href = address(["run", parts[1], "group", row.n], { source: source(), at, offset: null }, params);
	return link(row.question || "(no text)", href, { id: `row-${row.n}`, "data-row": row.n });
}

const VERSION = ["Version", (row) => num(row.policy_version)];
const QUESTION = ["Question", question];
const REFERENCE = ["Reference", (row) => row.reference ?? "–"];
const NOTES = ["Notes", notes];
const COLUMNS = {
	samples: [
		["Step", (row) => num(row.step)],
		VERSION,
		QUESTION,
		["Scores", (row) => strip(row.scores)],
		["Mean", (row) => num(row.mean)],
		["Environment", (row) => row.env],
		REFERENCE,
		["Tokens", (row) => num(row.tokens)],
		NOTES,
	],
	held_out: [VERSION, QUESTION, ["Answer", (row) => row.answer], REFERENCE, ["Score", mark], NOTES],
	dead_letters: [
		["Time", (row) => when(row.time)],
		["Environment", (row) => row.env ?? "–"],
		QUESTION,
		["Reason", (row) => row.error ?? row.dropped ?? "–"],
	],
};

export function groupsView(name) {
	const of = source();
	const noun = of === "held_out" ? "answer" : "group";
	const filters = h("div.row.filters", { role: "search", oninput: typed }, find("filters").content.cloneNode(true));
	for (const label of filters.querySelectorAll("label")) if (!label.dataset.of.includes(of)) label.remove();
	const fields = [...filters.querySelectorAll("[name]")];
	filters.append(button("Clear", toGroups(name, { source: of })));
	const envs = fields.find((field) => field.name === "env");
	const offer = (names) => names.length > envs.options.length - 1 && envs.append(...names.slice(envs.options.length - 1).map((one) => h("option", one)));
	const said = h("p.row", { role: "status" });
	const list = h("div");
	const pager = h("nav.row", { "aria-label": "Pages" });
	let reply = null;
	let asked = 0;
	let waiting;

	const read = (field) => (field.type === "checkbox" ? field.checked && "yes" : field.value.trim());
	function typed() {
		clearTimeout(waiting); // until the typing pauses
		const changes = () => Object.fromEntries(fields.map((field) => [field.name, read(field)]));
		waiting = setTimeout(() => filters.isConnected && turn({ ...changes(), offset: null }), 250);
	}

	function tell(text, more) {
		const { total, complete, indexed_frac } = reply;
		fill(said, total > 0 && text, !complete && badge("warn", `still searching, ${percent(indexed_frac)} indexed`), more);
	}

	function draw() {
		const { rows, total, complete, problem } = reply;
		const offset = Number(param("offset")) || 0;
		const filtered = [...here().params.keys()].some((key) => !["source", "sort", "offset"].includes(key));
		const none = !rows.length && complete && (filtered ? "Nothing matches these filters." : NOTHING[of]);
		const isAlone = new Set(rows.map((row) => row.env)).size < 2;
		const columns = COLUMNS[of].filter(([title]) => title !== "Environment" || !isAlone || of === "dead_letters");
		fill(list, rows.length > 0 && table(columns, rows), none && empty(none), problem && empty(problem));
		find(`row-${site.group}`)?.focus(); // back from a group
		site.group = null;
		const end = offset + rows.length;
		tell(`${num(offset + 1)} to ${num(end)} of ${count(total, noun)}`);
		const step = (text, to) => button(text, hereWith({ offset: to }));
		fill(pager, offset > 0 && step("Previous page", Math.max(0, offset - LIMIT)), end < total && step("Next page", offset + LIMIT));
	}

	// New groups are announced, and shown when asked for.
	async function refresh(polled) {
		const mine = polled ? asked : ++asked;
		for (const field of polled ? [] : fields) {
			field.checked = param(field.name) === "yes";
			if (field !== document.activeElement) field.value = param(field.name) ?? "";
		}
		const next = await get([name, "groups"], { ...Object.fromEntries(here().params), source: of, limit: LIMIT });
		if (mine !== asked || !list.isConnected) return;
		offer(next.environments ?? []);
		if (!polled) envs.value = param("env") ?? "";
		if (!next.complete) setTimeout(() => mine === asked && list.isConnected && refresh(true), 300);
		if (polled && JSON.stringify(next) === JSON.stringify(reply)) return;
		if (!polled || !reply?.complete || !reply.rows.length || JSON.stringify(next.rows) === JSON.stringify(reply.rows)) {
			reply = next;
			return draw();
		}
		const news = next.total - reply.total;
		const show = { id: "new", onclick: () => refresh(false) };
		tell(count(reply.total, noun), h("button", show, news > 0 ? `${count(news, `new ${noun}`)}: show` : "Show changes"));
	}

	return { title: `${name}: ${TABS[of].toLowerCase()}`, tab: TABS[of], nodes: [filters, said, list, pager], refresh };
}
