// One run: where it stands, its curves, its timeline and details; and its logs.

import { Curves } from "./charts.js";
import { button, dateOf, dots, fill, h, link, median, num, percent, seconds, table, textOf, when } from "./dom.js";
import { CHARTS } from "./metrics.js";
import { steps } from "./runs.js";
import { findRun, get, hereWith, param, toGroups } from "./site.js";
import { Timeline } from "./timeline.js";

const card = (title, value, ...below) => h("div.card", h("h2.muted", title), value.nodeType ? value : h("p.big", value), h("p.muted", below));
const shown = (value) => (typeof value === "number" ? num(value) : textOf(value));
const fact = ([name, value]) => h("div", h("dt", name), h("dd", shown(value)));

export function runView(name) {
	const curves = new Curves([name]);
	const [{ metrics }] = curves.runs;
	const timeline = new Timeline(name);
	const facts = h("dl.facts.card");
	const cards = h("div.cards");
	const early = h("section.card", { hidden: true });
	const details = h("div");
	const about = h("details.card", h("summary", "Run details and settings"), details);
	let heldOut = [];
	let seen = "";

	function duration(run) {
		const since = (time) => seconds((time - dateOf(run.started)) / 1000);
		if (run.ended) return `took ${since(dateOf(run.ended))}`;
		const left = (run.planned_steps - metrics.last?.step) * median(metrics.rows.slice(-10).map((row) => row.step_s));
		return dots(left > 0 && `about ${seconds(left)} left`, run.state === "running" && `running for ${since(Date.now())}`);
	}

	// "2 wrong of 64": the answers of the newest evaluation
	function wrong() {
		const version = heldOut.at(-1)?.version;
		const sum = (key) => heldOut.reduce((total, row) => total + (row.version === version && row[key]), 0);
		const href = toGroups(name, { source: "held_out", wrong: sum("wrong") && "yes", version });
		return sum("answers") > 0 && link(`${num(sum("wrong"))} wrong of ${num(sum("answers"))}`, href, { id: "wrong" });
	}

	function accuracy() {
		const { before, best, last } = metrics.evaluated;
		const isBest = best?.accuracy === last?.accuracy;
		const part = (value, title, kind) => value != null && h("div", h("p.big", { class: kind }, percent(value)), h("small.muted", title));
		const parts = [
			part(before, "before training"),
			!isBest && part(best?.accuracy, `best: version ${best?.version}`, "good"),
			part(last?.accuracy, `last${isBest ? " and best" : ""}: version ${last?.version}`, isBest && "good"),
		].filter(Boolean);
		return card("Held-out accuracy", parts.length ? h("div.way", parts) : "–", parts.length ? wrong() : "No evaluation has ended yet.");
	}

	function standing(run) {
		const { last, rows } = metrics;
		const done = last?.step ?? run.steps_done ?? 0;
		const progress = run.planned_steps && h("progress", { max: run.planned_steps, value: done, "aria-label": "Steps done" });
		const [step, waiting, training] = ["step_s", "generate_s", "train_s"].map((key) => metrics.recent((row) => row[key]));
		const speed = metrics.recent((row) => row.completion_tokens / row.step_s);
		const sampled = rows.reduce((sum, row) => sum + (row.completion_tokens ?? 0), 0);
		const first = rows.find((row) => row.reward_mean != null);
		const from = first && first !== last && `step ${first.step}: ${num(first.reward_mean)}`;
		return [
			card("Step", steps(done, run), progress, duration(run)),
			accuracy(),
			last && card("Reward", num(last.reward_mean), dots(`± ${num(last.reward_std)}`, from)),
			step != null && card("Time per step", seconds(step), dots(waiting != null && `sampling ${seconds(waiting)}`, training != null && `training ${seconds(training)}`)),
			speed != null && card("Tokens per second", num(Math.round(speed)), sampled > 0 && `${num(sampled)} sampled in all`),
		];
	}

	function loading(run) {
		const bar = ({ name, note, done, total }) => [h("b", name), h("progress", { max: total, value: total && done, "aria-label": `${name}: ${note}` }), h("span.muted", note)];
		const bars = (run.starting ?? []).map(bar);
		return [h("h2", bars.length ? "Starting" : "No curves yet: the first step has not ended."), h("div.bars", bars)];
	}

	async function refresh(polled) {
		const run = findRun(name) ?? {};
		const news = await curves.read();
		if (polled && !news && seen === JSON.stringify(run)) return;
		seen = JSON.stringify(run);
		heldOut = (await get([name, "held_out"])).versions;
		const said = await get([name, "settings"]);
		early.hidden = metrics.last;
		timeline.node.hidden = !metrics.last;
		fill(early, loading(run));
		fill(facts, [...said.facts, ["Started", when(run.started)]].map(fact));
		fill(cards, standing(run));
		fill(details, table([["", ([key]) => key, true], ["", ([, value]) => textOf(value)]], said.details, "facts"));
		curves.draw(Object.keys(CHARTS).filter((key) => metrics.last || (key === "accuracy" && metrics.evaluations.length)));
		if (metrics.last) await timeline.show(metrics.last.step);
	}

	const [bar, grid, folded, more, dialog] = curves.nodes;
	return { title: name, tab: "Overview", nodes: [facts, cards, early, bar, grid, folded, timeline.node, more, about, dialog], refresh };
}

export function logsView(name) {
	const log = h("pre.card.log", { tabindex: 0, "aria-label": "End of the log" });
	const services = h("nav.row", { "aria-label": "Services" });

	async function refresh() {
		const read = (service) => get([name, "logs"], { service, lines: 1000 });
		const reply = await read(param("service") ?? "launcher").catch(() => read());
		const asked = param("service") ?? "launcher";
		const mark = (one) => ({ id: `log-${one}`, "aria-current": one === asked && "page" });
		fill(services, reply.services.map((one) => button(one, hereWith({ service: one }), mark(one))));
		const text = reply.lines.join("\n") || "Nothing is logged here.";
		if (text === log.textContent || !getSelection().isCollapsed) return; // a selection stays
		const { scrollTop, scrollHeight, clientHeight } = log;
		fill(log, text);
		log.scrollTop = scrollHeight - scrollTop - clientHeight < 40 ? log.scrollHeight : scrollTop;
	}
	return { title: `${name}: logs`, tab: "Logs", nodes: [services, log], refresh };
}
