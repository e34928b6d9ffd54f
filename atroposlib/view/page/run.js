// One run: where it stands, its curves, its timeline and details; and its logs.

import { Curves } from "./charts.js";
import { button, dateOf, fill, h, link, median, num, percent, seconds, table, textOf, when } from "./dom.js";
import { CHARTS } from "./metrics.js";
import { steps } from "./runs.js";
import { findRun, get, hereWith, param, toGroups } from "./site.js";
import { Timeline } from "./timeline.js";

const card = (title, value, ...below) => h("div.card", h("h2.muted", title), h("p.big", value), h("p.muted", below));

export function runView(name) {
	const curves = new Curves([name]);
	const [{ metrics }] = curves.runs;
	const timeline = new Timeline(name);
	const cards = h("div.cards");
	const early = h("p.empty", { hidden: true }, "No curves yet: the first step has not ended.");
	const details = h("div");
	const about = h("details.card", h("summary", "Run details"), details);
	let heldOut = [];
	let shown = "";

	function duration(run) {
		if (run.ended) return `took ${seconds((dateOf(run.ended) - dateOf(run.started)) / 1000)}`;
		const left = (run.planned_steps - metrics.last?.step) * median(metrics.rows.slice(-10).map((row) => row.step_s));
		return left > 0 ? `about ${seconds(left)} left` : run.state;
	}

	// "2 wrong of 64": the answers of the newest evaluation
	function wrong() {
		const version = heldOut.at(-1)?.version;
		const sum = (key) => heldOut.reduce((total, row) => total + (row.version === version && row[key]), 0);
		const href = toGroups(name, { source: "held_out", wrong: sum("wrong") && "yes", version });
		return sum("answers") > 0 && link(`${num(sum("wrong"))} wrong of ${num(sum("answers"))}`, href, { id: "wrong" });
	}

	function standing(run) {
		const { last } = metrics;
		const done = last?.step ?? run.steps_done ?? 0;
		const evaluations = metrics.points("accuracy");
		const [version, accuracy] = evaluations.at(-1) ?? [];
		const [best = version, highest] = evaluations.filter(([v]) => v).sort((a, b) => a[1] - b[1]).at(-1) ?? [];
		const progress = run.planned_steps && h("progress", { max: run.planned_steps, value: done, "aria-label": "Steps done" });
		const bestLine = best === version ? "the best so far" : `best: ${percent(highest)} at version ${best}`;
		const evaluated = [`policy version ${version}`, h("br"), bestLine, h("br"), wrong()];
		return [
			card("Step", steps(done, run), progress, duration(run)),
			card("Held-out accuracy", percent(accuracy), version === undefined ? "No evaluation has ended yet." : evaluated),
			card("Reward", num(last?.reward_mean), last ? `± ${num(last.reward_std)} in step ${last.step}` : "No step has ended yet."),
		];
	}

	async function refresh(polled) {
		const run = findRun(name) ?? {};
		const news = await curves.read();
		if (polled && !news && shown === JSON.stringify(run)) return;
		shown = JSON.stringify(run);
		heldOut = (await get([name, "held_out"])).versions;
		early.hidden = metrics.last;
		timeline.node.hidden = !metrics.last;
		fill(cards, standing(run));
		const columns = [["", ([key]) => key.replaceAll("_", " "), true], ["", ([key, value]) => (/^(start|end)ed$/.test(key) ? when(value) : textOf(value))]];
		fill(details, table(columns, Object.entries(run), "facts"));
		curves.draw(Object.keys(CHARTS).filter((key) => metrics.last || (key === "accuracy" && metrics.evaluations.length)));
		if (metrics.last) await timeline.show(metrics.last.step);
	}

	return { title: name, tab: "Overview", nodes: [cards, early, curves.grid, curves.more, timeline.node, about], refresh };
}

export function logsView(name) {
	const log = h("pre.card.log", { tabindex: 0, "aria-label": "End of the log" });
	const services = h("nav.row", { "aria-label": "Services" });

	async function refresh() {
		const read = (service) => get([name, "logs"], { service, lines: 1000 });
		const reply = await read(param("service") ?? "launcher").catch(() => read());
		fill(services, reply.services.map((one) => button(one, hereWith({ service: one }), { id: `log-${one}` })));
		const text = reply.lines.join("\n") || "Nothing is logged here.";
		if (text === log.textContent || !getSelection().isCollapsed) return; // a selection stays
		const { scrollTop, scrollHeight, clientHeight } = log;
		fill(log, text);
		log.scrollTop = scrollHeight - scrollTop - clientHeight < 40 ? log.scrollHeight : scrollTop;
	}
	return { title: `${name}: logs`, tab: "Logs", nodes: [services, log], refresh };
}
