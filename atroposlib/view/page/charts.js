// A chart for each metric, one crosshair for all. A plot is 100 by 100 units, stretched.

import { control, empty, fill, h, key as keyOf, num, own, percent, speak, svg } from "./dom.js";
import { CHARTS, Metrics } from "./metrics.js";
import { here, toGroups, turn } from "./site.js";

// Round numbers from low to high.
function ticks(low, high, whole) {
	const raw = (high - low) / 4 || 1;
	const size = 10 ** Math.floor(Math.log10(raw));
	let step = [1, 2, 5, 10].find((factor) => factor * size >= raw * 0.999) * size;
	if (whole) step = Math.max(1, Math.round(step));
	const found = [];
	for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(9)));
	return found;
}

const edges = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
const at = (points, step) => points.findLast((point) => point[0] <= step);

class Chart {
	constructor(key, curves) {
		const about = own(CHARTS, key, { title: key, unit: "as in metrics.jsonl", fit: true });
		Object.assign(this, { curves, keys: { "": key }, ...about });
		this.format = this.evaluation ? percent : num;
		this.values = h("span.row");
		this.plot = h("div.plot", {
			role: "img",
			onkeydown: (event) => this.typed(event),
			onpointermove: (event) => this.pointed(event),
			onpointerleave: () => curves.move(null),
			onblur: () => curves.move(null),
			onclick: () => this.open(),
		});
		const caption = h("figcaption.row", h("b", this.title), this.values);
		this.below = h("small.muted", this.unit);
		this.node = h("figure.card", { "data-chart": key }, caption, this.below, this.plot);
	}

	// Several runs are compared by the first line of a chart.
	read() {
		const { runs, several } = this.curves;
		const keys = Object.entries(this.keys).slice(0, several ? 1 : 2);
		this.lines = runs
			.flatMap(({ look, metrics }) => keys.map(([name, key], i) => ({ name, look: i ? "look1" : look, points: metrics.points(key) })))
			.filter(({ points }) => points.length);
	}

	draw() {
		this.read();
		this.plot.tabIndex = this.lines.length ? 0 : -1;
		this.plot.setAttribute("aria-label", `${this.title}, ${this.unit}. Arrow keys read values.`);
		if (!this.lines.length) return fill(this.plot, empty(this.empty ?? "Not recorded."));
		const points = this.lines.flatMap((line) => line.points);
		const log = this.log && points.every(([, value]) => value > 0);
		const scale = log ? Math.log10 : (value) => value;
		const [low, high] = this.range(points, scale);
		const [first, last] = this.curves.extent;
		const up = (scaled) => 100 - (100 * (scaled - low)) / (high - low);
		this.x = (step) => (100 * (step - first)) / (last - first || 1);
		this.y = (value) => up(scale(value));
		this.cross = svg("g");
		const marks = ticks(low, high, log);
		fill(
			this.plot,
			svg(
				"svg",
				{ viewBox: "0 0 100 100", preserveAspectRatio: "none" },
				svg("path.grid", { d: marks.map((mark) => `M0 ${up(mark)}h100`).join("") }),
				this.lines.map((line) => this.path(line)),
				this.cross,
			),
			marks.map((mark) => h("small.left", { style: `top: ${up(mark)}%` }, log ? `1e${num(mark)}` : this.format(mark))),
			ticks(first, last, true).map((step) => h("small.below", { style: `left: ${this.x(step)}%` }, step)),
		);
		this.mark();
	}

	range(points, scale) {
		if (this.evaluation) return [0, 1];
		const [low, high] = edges(points.flatMap(([, value, by = 0]) => [value - by, value + by])).map(scale);
		const margin = (high - low) / 20 || Math.abs(low) / 2 || 1;
		if (this.log) return [Math.floor(low), Math.ceil(high + margin)];
		return [this.fit || low < 0 ? low - margin : 0, high + margin];
	}

	path({ points, look }) {
		const spread = this.curves.several ? [] : points.filter((point) => point[2] !== undefined);
		const place = ([step, value, by = 0], sign) => `${this.x(step)} ${this.y(value + sign * by)}`;
		const edge = (all, sign) => all.map((point) => place(point, sign)).join("L");
		// A step without a value breaks the line.
		const gap = (i) => !this.evaluation && points[i][0] - points[i - 1]?.[0] > 1;
		const line = points.map((point, i) => `${gap(i) ? "M" : "L"}${place(point, 0)}h0`).join("");
		return [
			spread.length > 1 && svg("path.band", { d: `M${edge(spread, 1)}L${edge(spread.toReversed(), -1)}Z` }),
			svg("path.line", { class: look, d: `M${line.slice(1)}` }),
			(this.evaluation || points.length === 1) && points.map((point) => this.dot(point, look)),
		];
	}

	// A line without length, but with round ends.
	dot([step, value], look) {
		return svg("path.dot", { class: look, d: `M${this.x(step)} ${this.y(value)}h0` });
	}

	pointed({ clientX }) {
		const { left, width } = this.plot.getBoundingClientRect();
		const [first, last] = this.curves.extent;
		this.curves.move(first + ((clientX - left) / width) * (last - first));
	}

	// A step leads to its groups, an evaluation to its answers.
	open() {
		const { runs, several, step } = this.curves;
		if (several || step === null || !this.lines.length) return;
		const { points } = this.lines[0];
		const [version] = at(points, step) ?? points[0];
		location.hash = toGroups(runs[0].run, this.evaluation ? { source: "held_out", version } : { step });
	}

	typed(event) {
		const [first, last] = this.curves.extent;
		const now = this.curves.step ?? last;
		const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: first, End: last }[event.key];
		if (event.key === "Enter") this.open();
		if (to === undefined) return;
		event.preventDefault();
		this.curves.move(to);
		speak(`Step ${this.curves.step}: ${this.title} ${this.values.textContent}`);
	}

	// The values at the crosshair, or the last ones.
	mark() {
		if (!this.lines.length) return;
		const { step, several } = this.curves;
		const found = this.lines.map((line) => ({ ...line, point: at(line.points, step ?? Infinity) }));
		const value = ({ name, look, point }) => h(
			"span.value",
			found.length > 1 && [keyOf(look), !several && h("small", `${name} `)],
			point ? this.format(point[1]) : "–",
			!several && point?.[2] >= 0 && h("small", ` ± ${num(point[2])}`),
		);
		fill(this.values, found.map(value));
		fill(this.below, step === null ? this.unit : `step ${step}`);
		const cross = [svg("path.cross", { d: `M${this.x(step)} 0v100` }), found.map(({ point, look }) => point && this.dot(point, look))];
		fill(this.cross, step !== null && cross);
	}
}

export class Curves {
	charts = new Map();
	step = null;

	constructor(names) {
		this.runs = names.map((run, i) => ({ run, look: `look${i % 4}`, metrics: new Metrics(run) }));
		this.several = names.length > 1;
		this.grid = h("div.charts");
		this.boxes = h("div.boxes");
		this.more = h("details.card", { hidden: true, ontoggle: () => this.offer() }, h("summary", "More metrics"), this.boxes);
	}

	async read() {
		return (await Promise.all(this.runs.map(({ metrics }) => metrics.read()))).some(Boolean);
	}

	draw(keys) {
		const steps = this.runs.flatMap(({ metrics }) => [...metrics.points("accuracy"), ...metrics.points("step")]);
		this.extent = steps.length ? edges(steps.map(([step]) => step)) : [0, 1];
		this.shown = [...keys, ...here().params.getAll("more")].map((key) => {
			if (!this.charts.has(key)) this.charts.set(key, new Chart(key, this));
			return this.charts.get(key);
		});
		const nodes = this.shown.map((chart) => (chart.draw(), chart.node));
		const { children } = this.grid;
		if (nodes.length !== children.length || nodes.some((node, i) => node !== children[i])) fill(this.grid, nodes);
		this.more.hidden = !this.runs.some(({ metrics }) => metrics.last);
		this.offer();
	}

	offer() {
		if (!this.more.open) return;
		const names = [...new Set(this.runs.flatMap(({ metrics }) => metrics.others()))].sort();
		if (this.boxes.children.length === names.length) return;
		const chosen = () => here().params.getAll("more");
		const choose = (name) => (yes) => turn({ more: [...chosen().filter((one) => one !== name), yes && name] });
		fill(this.boxes, names.map((name) => control(name, "checkbox", chosen().includes(name) && "yes", choose(name))));
	}

	move(step) {
		const [first, last] = this.extent;
		this.step = step === null ? null : Math.min(last, Math.max(first, Math.round(step)));
		for (const chart of this.shown) chart.mark();
	}
}
