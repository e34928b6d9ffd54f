// What trainer and samplers did when, drawn in seconds and stretched to the width.

import { empty, fill, h, num, percent, seconds, svg } from "./dom.js";
import { MOVES, get, moveRange, param } from "./site.js";

const LANES = [
	["waiting", "Trainer waits for a batch", "idle"],
	["training", "Trainer computes", "look0"],
	["syncing", "Trainer sends weights", "look1"],
	["evaluating", "Trainer waits for an evaluation", "look3"],
	["sampler", "Samplers busy", "look2"],
];
const SHOWN = 40; // steps that are shown at first

export class Timeline {
	constructor(run) {
		this.run = run;
		this.shown = h("span.muted", { role: "status" });
		this.lanes = h("div", { tabindex: 0, onkeydown: (event) => this.typed(event) });
		this.moves = h("span.buttons", MOVES.map((move) => h("button", { onclick: () => this.move(move) }, move[0])));
		this.node = h("section.card", { hidden: true }, h("div.row", h("h2", "Timeline"), this.shown, this.moves), this.lanes);
	}

	get steps() {
		return [Math.max(1, param("from") ?? this.last - SHOWN + 1), Number(param("to")) || this.last];
	}

	move(move) {
		moveRange(this.steps, [0, this.last], move);
	}

	typed(event) {
		const move = MOVES.find(([, key]) => key === event.key);
		if (!move) return;
		event.preventDefault();
		this.move(move);
	}

	async show(lastStep) {
		this.last = lastStep;
		const [from, to] = this.steps;
		const { steps } = await get([this.run, "timeline"], { from, to });
		const spans = steps.flatMap(({ step, trainer, sampler }) => [
			...trainer.map((span) => ({ step, ...span })),
			...sampler.map(([start, end]) => ({ step, start, end, what: "sampler" })),
		]);
		this.moves.hidden = !spans.length;
		if (!spans.length) return fill(this.lanes, empty("This run was recorded without times."));
		const low = Math.min(...steps.flatMap(({ trainer }) => trainer.map(({ start }) => start)));
		const length = Math.max(...spans.map(({ end }) => end)) - low;
		const track = { viewBox: `0 0 ${length} 1`, preserveAspectRatio: "none" };
		const lane = ([activity, name, look]) => {
			const drawn = spans.filter(({ what, end }) => what === activity && end > low);
			const begin = ({ start }) => Math.max(0, start - low); // samplers are often ahead
			const long = (span) => span.end - low - begin(span);
			const share = percent(drawn.reduce((sum, span) => sum + long(span), 0) / length);
			const about = ({ step, start, end }) => svg("title", `Step ${step}: ${name} (${seconds(end - start)})`);
			const bar = (span) => svg("rect", { class: look, x: begin(span), width: long(span), height: 1 }, about(span));
			return h("div.lane", h("span", name), h("span.muted", share), svg("svg", track, drawn.map(bar)));
		};
		fill(this.lanes, LANES.map(lane));
		fill(this.shown, `Steps ${num(from)} to ${num(to)} of ${num(this.last)}, ${seconds(length)}`);
	}
}
