// A chart for each metric, one crosshair and one range of steps for all. A plot is 100 by 100 units, stretched.

import { control, empty, fill, find, h, key as keyOf, link, num, own, percent, speak, svg } from "./dom.js";
import { csv, picture } from "./download.js";
import { CHARTS, Metrics, words, wordsOf } from "./metrics.js";
import { MOVES, here, hereWith, moveRange, param, toGroups, turn } from "./site.js";

// Round numbers that contain low to high.
function ticks(low, high, whole) {
	const raw = (high - low) / 4 || 1;
	const size = 10 ** Math.floor(Math.log10(raw));
	let step = [1, 2, 2.5, 5, 10].find((factor) => factor * size >= raw * 0.999) * size;
	if (whole) step = Math.max(1, Math.round(step));
	const found = [];
	for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) found.push(Number((i * step).toPrecision(9)));
	return found;
}

const edges = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
const at = (points, step) => points.findLast((point) => point[0] <= step);

// A band ends where scores can: from low to high they deviate by no more (Bhatia and Davis 2000).
const RANGES = [[0, 1], [-1, 1], [-Infinity, Infinity]];
const bounds = (points) =>
	RANGES.find(([low, high]) => points.every(([, value, by = 0]) => value >= low && value <= high && by * by <= 1.05 * (high - value) * (value - low) + 1e-9));

function smoothed(points, share) {
	let mean = points[0][1];
	return points.map(([step, value]) => [step, (mean = share * mean + (1 - share) * value)]);
}

class Chart {
	constructor(key, curves, isLarge) {
		const about = own(CHARTS, key, { title: wordsOf(key).title, unit: key, fit: true });
		Object.assign(this, { key, curves, ...about, keys: about.keys ?? { "": key } });
		this.format = this.evaluation ? percent : num;
		this.values = h("p.values");
		this.plot = h("div.plot", {
			role: "img",
			onkeydown: (event) => this.typed(event),
			onpointerdown: (event) => this.grab(event),
			onpointermove: (event) => this.pointed(event),
			onpointerup: (event) => this.release(event),
			onpointercancel: () => (this.from = null),
			onpointerleave: () => curves.move(null),
			onblur: () => curves.move(null),
		});
		this.enlarge = !isLarge && link("⤢", "", { class: "icon", id: `enlarge-${key}`, "aria-label": `Enlarge ${this.title}` });
		this.below = h("small.muted.unit");
		this.node = h("figure.card", { "data-chart": key }, h("figcaption.row", h("b", this.title), this.enlarge), this.values, this.below, this.plot);
	}

	read() {
		const { runs, several, apart } = this.curves;
		const keys = Object.entries(this.keys).slice(0, several ? 1 : 2);
		this.isApart = apart && ["reward_mean", "accuracy"].includes(this.key);
		const lines = this.isApart
			? Object.entries(this.evaluation ? runs[0].metrics.evaluated.apart : runs[0].metrics.sampled).map(([name, points], i) => ({ name, look: `look${i % 4}`, points }))
			: runs.flatMap(({ run, look, metrics }) => keys.map(([name, key], i) => ({ name: several ? run : name || key, look: i ? "look1" : look, points: metrics.points(key) })));
		this.all = lines.filter(({ points }) => points.length);
		const [first, last] = this.curves.extent;
		const seen = ({ points, ...line }) => ({ ...line, points: points.filter(([step]) => step >= first && step <= last) });
		this.lines = this.all.map(seen).filter(({ points }) => points.length);
	}

	get flat() {
		if (!this.all.length) return this.none ?? "not recorded";
		const [low, high] = edges(this.all.flatMap(({ points }) => points.map(([, value]) => value)));
		return low === high && this.all.every(({ points }) => points.length > 2) && `always ${this.format(low)}`;
	}

	draw() {
		this.read();
		this.plot.tabIndex = this.lines.length ? 0 : -1;
		this.plot.setAttribute("aria-label", `${this.title}, ${this.unit}. Arrow keys read values, + and − zoom.`);
		if (this.enlarge) this.enlarge.href = hereWith({ chart: this.key });
		fill(this.below, this.unit);
		if (!this.lines.length) return fill(this.plot, empty(this.all.length ? "Nothing in these steps." : `Nothing to draw: ${this.flat}.`));
		const points = this.lines.flatMap((line) => line.points);
		this.isLog = (this.log || this.curves.log) && points.every(([, value]) => value > 0);
		const scale = this.isLog ? Math.log10 : (value) => value;
		const [floor, ceiling] = bounds(points);
		this.held = !this.curves.several && !this.isApart && !this.isLog && ((value) => Math.min(ceiling, Math.max(floor, value)));
		const marks = this.isLog ? ticks(...edges(points.map(([, value]) => scale(value))), true) : ticks(...this.range(points));
		const [low, high] = marks.length > 1 ? edges(marks) : [marks[0] - 1, marks[0] + 1];
		const [first, last] = this.curves.extent;
		const up = (scaled) => 100 - (100 * (scaled - low)) / (high - low);
		this.x = (step) => (100 * (step - first)) / (last - first || 1);
		this.y = (value) => up(scale(value));
		this.cross = svg("g");
		const shown = marks.length > 6 ? marks.filter((_, i) => (marks.length - 1 - i) % 2 === 0) : marks;
		fill(
			this.plot,
			svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none" }, svg("path.grid", { d: shown.map((mark) => `M0 ${up(mark)}h100`).join("") }), this.lines.map((line) => this.path(line)), this.cross),
			shown.map((mark) => h("small.left", { style: `top: ${up(mark)}%` }, this.isLog ? num(10 ** mark) : this.format(mark))),
			ticks(first, last, true).filter((step) => step >= first && step <= last).map((step) => h("small.below", { style: `left: ${this.x(step)}%` }, num(step))),
			h("small.axis", this.evaluation ? "policy version" : "step"),
		);
		this.mark();
	}

	range(points) {
		if (this.evaluation) return [0, 1];
		let [low, high] = edges(points.flatMap(([, value, by = 0]) => (this.held ? [this.held(value - by), this.held(value + by)] : [value])));
		const room = Math.abs(low) / 2 || 1;
		if (low === high) [low, high] = [this.fit ? low - room : low, high + room];
		return [this.fit ? low : Math.min(0, low), high];
	}

	path({ points, look }) {
		const spread = this.held ? points.filter((point) => point[2] !== undefined) : [];
		const edge = (all, sign) => all.map(([step, value, by]) => `${this.x(step)} ${this.y(this.held(value + sign * by))}`).join("L");
		// A step without a value breaks the line.
		const gap = (all, i) => !this.evaluation && !this.isApart && all[i][0] - all[i - 1]?.[0] > 1;
		const drawn = (all) => all.map(([step, value], i) => `${gap(all, i) ? "M" : "L"}${this.x(step)} ${this.y(value)}h0`).join("").slice(1);
		const share = !this.evaluation && Number(param("smooth"));
		return [
			spread.length > 1 && svg("path.band", { d: `M${edge(spread, 1)}L${edge(spread.toReversed(), -1)}Z` }),
			svg("path.line", { class: `${look} ${share ? "faint" : ""}`, d: `M${drawn(points)}` }),
			share > 0 && svg("path.line.smooth", { class: look, d: `M${drawn(smoothed(points, share))}` }),
			(this.evaluation || points.length === 1) && points.map((point) => this.dot(point, look)),
		];
	}

	dot([step, value], look) {
		return svg("path.dot", { class: look, d: `M${this.x(step)} ${this.y(value)}h.01` });
	}

	stepAt({ clientX }) {
		const { left, width } = this.plot.getBoundingClientRect();
		const [first, last] = this.curves.extent;
		return Math.min(last, Math.max(first, Math.round(first + ((clientX - left) / width) * (last - first))));
	}

	grab(event) {
		if (event.button || !this.lines.length) return;
		this.from = { step: this.stepAt(event), x: event.clientX };
		this.plot.setPointerCapture(event.pointerId);
	}

	pointed(event) {
		this.to = this.from && Math.abs(event.clientX - this.from.x) > 6 ? this.stepAt(event) : null;
		this.curves.move(this.stepAt(event));
	}

	// A click opens what is there, a drag zooms.
	release() {
		const { from, to } = this;
		this.from = this.to = null;
		if (!from) return;
		if (to == null) return this.open();
		if (from.step !== to) turn({ from: Math.min(from.step, to), to: Math.max(from.step, to) });
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
		const zoom = MOVES.find(([, key]) => "+-".includes(key) && key === event.key);
		if (event.key === "Enter") this.open();
		if (to === undefined && !zoom) return;
		event.preventDefault();
		if (zoom) return moveRange(this.curves.extent, this.curves.whole, zoom);
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
			this.held && point?.[2] >= 0 && h("small", ` ± ${num(point[2])}`),
		);
		fill(this.values, found.map(value));
		const unit = this.held ? this.unit : this.unit.split(", band")[0];
		const where = step === null ? unit : this.evaluation ? `policy version ${num(found[0].point?.[0])}` : `step ${num(step)}`;
		fill(this.below, where, this.curves.log && !this.isLog && " (linear: not all are above 0)");
		const cross = step !== null && [svg("path.cross", { d: `M${this.x(step)} 0v100` }), found.map(({ point, look }) => point && this.dot(point, look))];
		const zoomed = this.from && this.to != null && [this.from.step, this.to].sort((a, b) => a - b).map(this.x);
		fill(this.cross, zoomed && svg("path.zoom", { d: `M${zoomed[0]} 0V100H${zoomed[1]}V0Z` }), cross);
	}
}

export class Curves {
	charts = new Map();
	step = null;
	large = null;

	constructor(names) {
		this.runs = names.map((run, i) => ({ run, look: `look${i % 4}`, metrics: new Metrics(run) }));
		this.several = names.length > 1;
		this.grid = h("div.charts");
		this.folded = h("details.card.folded", { hidden: true }, h("summary"), h("div.charts"));
		this.boxes = h("div.boxes");
		this.more = h("details.card", { hidden: true, ontoggle: () => this.offer() }, h("summary", "More metrics"), this.boxes);
		this.tools = h("div.row.tools", { role: "group", "aria-label": "Curves" }, find("tools").content.cloneNode(true));
		for (const field of this.tools.querySelectorAll("select, input")) field.onchange = () => turn({ [field.name]: field.type === "checkbox" ? field.checked && "yes" : field.value });
		const name = () => `${names.join("-")}-${param("chart")}`;
		const acts = [() => turn({ from: null, to: null }), () => picture(this.large.node, name()), () => csv(this.large.all, name()), () => this.dialog.close()];
		this.tools.querySelectorAll("button").forEach((button, i) => (button.onclick = acts[i]));
		this.bar = h("div", { hidden: true }, this.tools);
		this.dialog = h("dialog.full", { onclose: () => param("chart") && turn({ chart: null }) });
	}

	get nodes() {
		return [this.bar, this.grid, this.folded, this.more, this.dialog];
	}

	get log() {
		return param("log") === "yes";
	}

	get apart() {
		return !this.several && param("apart") === "yes";
	}

	async read() {
		return (await Promise.all(this.runs.map(({ metrics }) => metrics.read(this.apart)))).some(Boolean);
	}

	draw(keys) {
		const steps = this.runs.flatMap(({ metrics }) => [...metrics.points("accuracy"), ...metrics.points("step")]);
		this.whole = steps.length ? edges(steps.map(([step]) => step)) : [0, 1];
		const [first, last] = this.whole;
		const from = Math.min(last - 1, Math.max(first, Number(param("from") || first)));
		this.extent = [from, Math.max(from + 1, Math.min(last, Number(param("to") || last)))];
		const chosen = here().params.getAll("more");
		const chart = (key) => this.charts.get(key) ?? this.charts.set(key, new Chart(key, this)).get(key);
		const all = [...keys, ...chosen].map(chart);
		this.shown = all;
		for (const one of all) one.draw();
		const flat = all.filter((one) => one.flat && one.key !== "reward_mean" && !chosen.includes(one.key));
		this.place(this.grid, all.filter((one) => !flat.includes(one)));
		this.place(this.folded.lastChild, flat);
		this.folded.hidden = !flat.length;
		fill(this.folded.firstChild, `Empty or constant: ${flat.map((one) => `${one.title} (${one.flat})`).join(", ")}`);
		this.bar.hidden = this.more.hidden = !this.runs.some(({ metrics }) => metrics.last);
		this.offer();
		this.tool();
		this.enlarged();
	}

	place(grid, charts) {
		const { children } = grid;
		if (charts.length !== children.length || charts.some(({ node }, i) => node !== children[i])) fill(grid, charts.map(({ node }) => node));
	}

	// One chart over the page, which stays where it is.
	enlarged() {
		const key = param("chart");
		if (!key) {
			this.large = null;
			this.dialog.close();
			return this.bar.contains(this.tools) || this.bar.append(this.tools);
		}
		if (this.large?.key !== key) {
			this.large = new Chart(key, this, true);
			this.bar.style.minHeight = `${this.bar.offsetHeight}px`;
			fill(this.dialog, this.tools, this.large.node);
			this.dialog.setAttribute("aria-label", this.large.title);
		}
		if (!this.dialog.open) this.dialog.showModal();
		this.large.draw();
		this.shown = [...this.shown, this.large];
	}

	tool() {
		const [smooth, log, apart, range, whole] = ["select", "[name=log]", "[name=apart]", "span", "button"].map((what) => this.tools.querySelector(what));
		const [from, to] = this.extent;
		whole.hidden = from === this.whole[0] && to === this.whole[1];
		range.textContent = whole.hidden ? "Drag over a curve to zoom." : `Steps ${num(from)} to ${num(to)}`;
		smooth.value = param("smooth") ?? "";
		log.checked = this.log;
		apart.checked = this.apart;
		apart.parentNode.hidden = this.several || Object.keys(this.runs[0].metrics.evaluated.apart).length < 2;
	}

	offer() {
		if (!this.more.open) return;
		const names = [...new Set(this.runs.flatMap(({ metrics }) => metrics.others()))].sort();
		if (this.offered === names.join()) return;
		this.offered = names.join();
		const chosen = () => here().params.getAll("more");
		const choose = (name) => (yes) => turn({ more: [...chosen().filter((one) => one !== name), yes && name] });
		const box = (name) => control([wordsOf(name).title, h("small.muted", ` ${name}`)], "checkbox", chosen().includes(name) && "yes", choose(name), { id: `more-${name}` });
		const mine = Object.keys(words).map((group) => [group, names.filter((name) => wordsOf(name).group === group)]).filter(([, found]) => found.length);
		fill(this.boxes, mine.map(([group, found]) => h("fieldset", h("legend", group), found.map(box))));
	}

	move(step) {
		const [first, last] = this.extent;
		this.step = step === null ? null : Math.min(last, Math.max(first, Math.round(step)));
		for (const chart of this.shown) chart.mark();
	}
}
