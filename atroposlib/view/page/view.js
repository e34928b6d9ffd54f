// Opens the view that the address names, and asks the server every two seconds for what is new.
// A view is {title, tab, nodes, refresh(polled), step(by)?}.

import { empty, fill, find, h, link, own } from "./dom.js";
import { groupView } from "./group.js";
import { TABS, groupsView } from "./groups.js";
import { logsView, runView } from "./run.js";
import { compareView, editNotes, reason, runsView, state, tagsOf } from "./runs.js";
import { Lost, address, findRun, get, here, site, toGroups } from "./site.js";

const VIEWS = { groups: groupsView, group: groupView, logs: logsView };

let view;
let opened = null; // the path that `view` shows

function make([kind, name, part, id]) {
	if (kind === "compare") return compareView();
	if (kind !== "run") return runsView();
	if (findRun(name)) return own(VIEWS, part, runView)(name, id);
	const nodes = [h("h1", "Run not found"), empty(`There is no run named ${name} in this window.`)];
	return { title: "Run not found", missing: true, nodes, refresh() {} };
}

function head([kind, name]) {
	if (kind !== "run" || view.missing) return [];
	const groups = Object.entries(TABS).map(([source, text]) => [text, toGroups(name, { source })]);
	const tabs = [["Overview", address(["run", name])], ...groups, ["Logs", address(["run", name, "logs"])]];
	const tab = ([text, href]) => link(text, href, { "aria-current": text === view.tab && "page" });
	return [h("div.row.name", h("h1", name), h("div.row", { id: "state" })), h("nav.row.tabs", tabs.map(tab))];
}

// How the run is, and what a person has noted of it.
function tell(name) {
	const run = findRun(name);
	const told = JSON.stringify([run?.state, run?.steps_done, run?.reason, run?.notes]);
	if (!run || !find("state") || find("state").told === told) return;
	find("state").told = told;
	const edit = h("button.icon", { id: "edit", onclick: () => editNotes(findRun(name)) }, "✎ Note");
	fill(find("state"), state(run), reason(run), tagsOf(run), run.notes?.note && h("span.note", run.notes.note), edit);
}

async function show() {
	const { parts, params } = here();
	const path = [...parts, params.getAll("run"), params.get("source")].join("/");
	find("failure")?.remove();
	try {
		if (path !== opened) {
			const again = opened !== null;
			opened = path;
			view = make(parts);
			document.title = `${view.title} · Atropos`;
			fill(find("main"), head(parts), view.nodes);
			scrollTo(0, 0);
			if (again) find("main").focus({ preventScroll: true });
		}
		tell(parts[1]);
		await view.refresh(false);
		heard(true);
	} catch (error) {
		if (path === opened) failed(error);
	}
}

function failed(error) {
	if (error instanceof Lost) return heard(false);
	find("failure")?.remove();
	find("main").append(h("p.reason", { id: "failure", role: "alert" }, error.message));
}

const live = ([kind, name]) => site.runs.some(({ run, state }) => state === "running" && (kind !== "run" || run === name));

function heard(yes) {
	find("lost").hidden = yes;
	find("live").hidden = !yes || !live(here().parts);
}

async function poll() {
	const { parts } = here();
	const lost = !find("lost").hidden;
	const before = live(parts);
	try {
		if (!document.hidden) {
			site.runs = (await get([])).runs;
			heard(true);
			tell(parts[1]);
			if (view.missing && findRun(parts[1])) opened = null;
			if (opened === null || lost) await show();
			else if (before || live(parts)) await view.refresh(true);
		}
	} catch (error) {
		failed(error);
	}
	setTimeout(poll, 2000);
}

const { dataset } = document.documentElement;
function nextTheme() {
	dataset.theme = { light: "dark", dark: "auto" }[dataset.theme] ?? "light";
	fill(find("theme"), `Theme: ${dataset.theme}`);
	localStorage.atropos = dataset.theme;
}

const help = () => (find("keys").open ? find("keys").close() : find("keys").showModal());

function move(by) {
	const rows = [...document.querySelectorAll("[data-row]")];
	const at = rows.indexOf(document.activeElement);
	if (rows.length) rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))].focus();
	else if (view.step?.(by)) location.hash = view.step(by);
}

const KEYS = {
	j: () => move(1),
	k: () => move(-1),
	"/": () => find("f-q")?.focus(),
	"?": help,
	t: nextTheme,
	u: () => (location.hash = find("up")?.hash ?? address(here().parts[2] ? here().parts.slice(0, 2) : [])),
};

addEventListener("keydown", (event) => {
	const { target, key } = event;
	if (event.ctrlKey || event.metaKey || event.altKey) return;
	if (target.matches("input:not([type=checkbox]), select, textarea")) return key === "Escape" && target.blur();
	if (target.closest("dialog") && key !== "?" && key !== "t") return;
	if (!Object.hasOwn(KEYS, key)) return;
	event.preventDefault();
	KEYS[key]();
});

find("help").onclick = help;
find("keys").onclick = help;
find("theme").onclick = nextTheme;
fill(find("theme"), `Theme: ${dataset.theme ?? "auto"}`);
addEventListener("hashchange", show);

try {
	site.runs = (await get([])).runs;
} catch (error) {
	failed(error);
}
if (!location.hash && site.runs.length === 1) history.replaceState(null, "", address(["run", site.runs[0].run]));
await show();
poll();
