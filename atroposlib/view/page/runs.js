// The list of runs, and several runs over one another.

import { Curves } from "./charts.js";
import { badge, button, control, count, empty, fill, h, key, link, num, own, percent, table, textOf, when } from "./dom.js";
import { CHARTS } from "./metrics.js";
import { address, get, here, site } from "./site.js";

const STATES = { running: ["● running", "good"], ended: ["■ ended"], failed: ["✕ failed", "bad"], interrupted: ["■ interrupted", "warn"], killed: ["✕ killed", "bad"], unknown: ["? state unknown", "warn"] };

export function state(run) {
	const [text, kind] = own(STATES, run.state, STATES.unknown);
	return badge(kind, text);
}

export const steps = (done, run) => num(done ?? 0) + (run.planned_steps ? ` of ${num(run.planned_steps)}` : "");

export function runsView() {
	const chosen = new Set();
	const compare = h("span.muted");
	const list = h("div");
	let shown;

	function tally() {
		const href = address(["compare"], { run: [...chosen] });
		fill(compare, chosen.size > 1 ? button(`Compare ${chosen.size} runs`, href) : "Select two or more runs to compare.");
	}

	function tick({ run }) {
		const choose = (yes) => (chosen[yes ? "add" : "delete"](run), tally());
		return control("", "checkbox", chosen.has(run) && "yes", choose, { id: `compare-${run}`, "aria-label": `Compare ${run}` });
	}

	const name = ({ run }) => link(run, address(["run", run]), { id: `run-${run}`, "data-row": run });
	const columns = [
		["Compare", tick],
		["Run", (run) => [name(run), h("small.command.muted", [run.command].flat().join(" "))]],
		["State", (run) => [state(run), (run.problems ?? []).map((text) => h("small.bad", text))]],
		["Steps", (run) => steps(run.steps_done, run)],
		["Reward", (run) => num(run.latest?.reward_mean)],
		["Held-out accuracy", (run) => percent(run.latest?.accuracy)],
		["Model", (run) => textOf(run.model).split("/").pop()],
		["Started", (run) => when(run.started)],
	];

	function refresh() {
		if (shown === (shown = JSON.stringify(site.runs))) return;
		const runs = site.runs.toSorted((a, b) => textOf(b.started).localeCompare(textOf(a.started)));
		fill(list, runs.length ? table(columns, runs) : empty("No runs here yet. Start one with scripts/quickstart.sh."));
	}
	tally();
	return { title: "Runs", nodes: [h("div.row", h("h1", "Runs"), compare), list], refresh };
}

export function compareView() {
	const names = here().params.getAll("run");
	const curves = new Curves(names);
	const settings = h("div.card", empty("Loading …"));
	const named = ({ run, look }) => h("span", key(look), link(run, address(["run", run])));

	async function differing() {
		const read = (run) => get([run, "settings"]).then((reply) => reply.settings).catch(() => ({}));
		const found = await Promise.all(names.map(read));
		const all = [...new Set(found.flatMap(Object.keys))].sort();
		const value = (values, name) => JSON.stringify(values[name]) ?? "not set";
		const differ = all.filter((name) => new Set(found.map((values) => value(values, name))).size > 1);
		const columns = curves.runs.map((run, i) => [named(run), (name) => value(found[i], name)]);
		if (!all.length) return empty("These runs have no run.yaml.");
		if (!differ.length) return empty(`All ${count(all.length, "setting")} are equal.`);
		return table([["Setting", (name) => name, true], ...columns], differ, "facts");
	}

	async function refresh(polled) {
		if (!(await curves.read()) && polled) return;
		curves.draw(Object.keys(CHARTS));
		if (!polled) fill(settings, h("h2", "Settings that differ"), await differing());
	}

	const title = names.length < 2 ? "Select two or more runs in the list of runs" : `${names.length} runs compared`;
	const head = h("div.row", h("h1", title), h("span.row.legend", curves.runs.map(named)));
	return { title: "Compare", nodes: [head, settings, curves.grid, curves.more], refresh };
}
