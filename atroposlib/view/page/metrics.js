// The curves of a run: their names and units, and its rows, each read once.

import { own } from "./dom.js";
import { get } from "./site.js";

// As the server says (atroposlib/wire/metric_words.py): charts in their order, and columns in words, by group.
export const CHARTS = {};
export const words = {};
const OTHERS = "Other columns";
export const wordsOf = (name) => {
	const [group, mine] = Object.entries(words).find(([, mine]) => Object.hasOwn(mine, name)) ?? [OTHERS, {}];
	return { group, title: mine[name] ?? name };
};

const VALUES = {
	reward_mean: (row) => [row.reward_mean, row.reward_std],
	throughput: (row) => [row.completion_tokens / row.step_s],
};

export class Metrics {
	rows = [];
	evaluated = { rows: [], versions: [], apart: {} };
	sampled = {}; // {environment: [step, mean score]}, once somebody asks for them
	next = 0;
	generation = null;

	constructor(run) {
		this.run = run;
	}

	// Reads what is new; true if anything is.
	async read(apart) {
		const state = () => [this.next, this.generation, this.evaluations.length, Object.keys(this.sampled)].join();
		const before = state();
		for (let more = true; more; ) {
			const reply = await get([this.run, "metrics"], { after: this.next, generation: this.generation });
			if (reply.reset) this.rows = [];
			for (const chart of reply.charts ?? []) CHARTS[chart.key] = chart;
			Object.assign(words, reply.words, { [OTHERS]: {} });
			for (const values of reply.rows) this.rows.push(Object.fromEntries(reply.columns.map((name, i) => [name, values[i]])));
			({ next: this.next, generation: this.generation = null, more } = reply);
		}
		this.evaluated = await get([this.run, "evaluations"]);
		if (apart) this.sampled = (await get([this.run, "environments"])).apart;
		return state() !== before;
	}

	get evaluations() {
		return this.evaluated.rows;
	}

	get last() {
		return this.rows.at(-1);
	}

	// Columns that hold numbers and have no chart of their own.
	others() {
		const names = this.rows.flatMap((row) => Object.keys(row).filter((name) => Number.isFinite(row[name])));
		const drawn = Object.values(CHARTS).flatMap(({ key, keys }) => [key, ...Object.values(keys ?? {})]);
		return names.filter((name) => !drawn.includes(name) && !["step", "time", "policy_version"].includes(name));
	}

	// [step, value, standard deviation?]: what has a value
	points(key) {
		const value = own(VALUES, key, (row) => [row[key]]);
		const all = this.rows.map((row) => [row.step, ...value(row)]).filter((point) => Number.isFinite(point[1]));
		return key === "accuracy" && this.evaluations.length ? this.evaluated.versions : all;
	}

	// Of the last ten steps.
	recent(value) {
		const found = this.rows.slice(-10).map(value).filter(Number.isFinite);
		return found.length ? found.reduce((sum, one) => sum + one) / found.length : null;
	}
}
