// The list of runs, the notes that a person gives them, and several runs over one another.

import { Curves } from "./charts.js";
import { badge, button, control, count, dateOf, dots, empty, fill, find, h, key, link, num, own, percent, seconds, table, textOf, when } from "./dom.js";
import { CHARTS } from "./metrics.js";
import { address, ask, here, param, put, site, turn } from "./site.js";

const STATES = { running: ["●", "good"], finished: ["✓", "good"], ended: ["■"], failed: ["✗", "bad"], interrupted: ["■", "warn"], killed: ["✗", "bad"], unknown: ["?", "warn"] };

export function state(run) {
	const [sign, kind] = own(STATES, run.state, STATES.unknown);
	return badge(kind, `${sign} ${run.state}`);
}

export const reason = (run) => run.reason && h("span", { class: run.state === "interrupted" ? "warn" : "bad" }, run.reason);
export const steps = (done, run) => num(done ?? 0) + (run.planned_steps ? ` of ${num(run.planned_steps)}` : "");

// Opens the dialog for the note and the tags of a run.
export function editNotes(run) {
	const dialog = find("notes");
	const [form, note, tags, failed] = ["form", "textarea", "input", ".bad"].map((what) => dialog.querySelector(what));
	note.value = run.notes?.note ?? "";
	tags.value = (run.notes?.tags ?? []).join(", ");
	fill(dialog.querySelector("h2"), run.run);
	fill(failed);
	form.onsubmit = async (event) => {
		if (event.submitter.value === "cancel") return;
		event.preventDefault();
		const words = tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
		try {
			run.notes = (await put(["runs", run.run, "notes"], { note: note.value.trim(), tags: words })).notes;
			dialog.close();
			dispatchEvent(new Event("hashchange"));
		} catch (error) {
			fill(failed, error.message || "The server does not answer.");
		}
	};
	dialog.showModal();
}

export const tagsOf = ({ notes }) => (notes?.tags ?? []).map((tag) => link(tag, address([], { q: tag }), { class: "badge tag" }));

export function runsView() {
	const chosen = new Set();
	const compare = h("span.muted");
	const list = h("div");
	const search = h("input", { type: "search", id: "f-q", placeholder: "name, tag, note, model, state", oninput: () => turn({ q: search.value }) });
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
	const edit = (run) => h("button.icon", { onclick: () => editNotes(run), "aria-label": `Notes of ${run.run}`, id: `notes-${run.run}` }, "✎");
	const took = (run) => run.ended && run.started && `took ${seconds((dateOf(run.ended) - dateOf(run.started)) / 1000)}`;
	const under = (text) => h("small.muted.under", text);
	const problems = (run) => (run.problems ?? []).map((text) => h("small.bad", text));
	const columns = [
		[null, "Compare", tick],
		["run", "Run", (run) => [h("div.row.tight", name(run), tagsOf(run), edit(run)), run.notes?.note && h("p.note", run.notes.note)]],
		["state", "State", (run) => [state(run), h("small", reason(run)), problems(run)]],
		["steps", "Steps", (run) => steps(run.steps_done, run)],
		["reward", "Reward", (run) => num(run.latest?.reward_mean)],
		["best", "Best accuracy", (run) => percent(run.best?.accuracy)],
		["last", "Last accuracy", (run) => percent(run.latest?.accuracy)],
		["model", "Model", (run) => [textOf(run.model).split("/").pop(), under(dots(run.recipe, run.bridge, run.lr && `lr ${num(run.lr)}`))]],
		["started", "Started", (run) => [when(run.started), under(took(run))]],
	];

	function column([id, title, cell], sort) {
		const next = sort === id ? `-${id}` : id;
		const isUp = (sort === id) === ["run", "state", "model"].includes(id);
		const mine = sort.replace("-", "") === id && { "aria-sort": isUp ? "ascending" : "descending" };
		return [id ? h("button.sort", { id: `sort-${id}`, onclick: () => turn({ sort: next }) }, title) : title, cell, false, mine || {}];
	}

	async function refresh() {
		const [sort, q] = [param("sort") ?? "started", param("q")];
		if (shown === (shown = JSON.stringify([site.runs, sort, q]))) return;
		if (search !== document.activeElement) search.value = q ?? "";
		const { runs } = await ask(["runs"], { sort, q });
		const none = q ? "No run matches the search." : "No runs here yet. Start one with scripts/quickstart.sh.";
		fill(list, runs.length ? table(columns.map((one) => column(one, sort)), runs) : empty(none));
	}
	tally();
	const head = h("div.row", h("h1", "Runs"), h("label.search", h("span.unseen", "Search"), search), compare);
	return { title: "Runs", nodes: [head, list], refresh };
}

export function compareView() {
	const names = here().params.getAll("run");
	const curves = new Curves(names);
	const settings = h("div.card", empty("Loading …"));
	const named = ({ run, look }) => h("span", key(look), link(run, address(["run", run])));

	async function differing() {
		const { runs, differing, compared } = await ask(["compare"], { run: names });
		const cell = (i) => ({ values, defaults }) => [typeof values[i] === "number" ? num(values[i]) : textOf(values[i]) || "not set", defaults[i] && h("small.muted", " (default)")];
		const columns = runs.map((run, i) => [named(curves.runs.find((one) => one.run === run)), cell(i)]);
		if (!compared) return empty("These runs have no run.yaml.");
		if (!differing.length) return empty(`All ${count(compared, "setting")} are equal.`);
		return table([["Setting", ({ name }) => name, true], ...columns], differing, "facts");
	}

	async function refresh(polled) {
		if (!(await curves.read()) && polled) return;
		curves.draw(Object.keys(CHARTS));
		if (!settings.told) fill(settings, h("h2", "Settings that differ"), await differing());
		settings.told = true;
	}

	const title = names.length < 2 ? "Select two or more runs in the list of runs" : `${names.length} runs compared`;
	const head = h("div.row", h("h1", title), h("span.row.legend", curves.runs.map(named)));
	return { title: "Compare", nodes: [head, settings, ...curves.nodes], refresh };
}
