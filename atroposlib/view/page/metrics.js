// The curves of a run: their names and units, and its rows, each read once.

import { own } from "./dom.js";
import { get } from "./site.js";

// fit: the axis need not show 0. evaluation: a fraction, of few steps. keys: several lines.
export const CHARTS = {
	reward_mean: { title: "Reward", unit: "mean score, band: ± 1 standard deviation", fit: true },
	accuracy: {
		title: "Held-out accuracy",
		unit: "fraction correct",
		evaluation: true,
		empty: "No held-out accuracy yet, or the environment does not evaluate.",
	},
	completion_tokens_per_rollout: { title: "Answer length", unit: "sampled tokens per rollout" },
	entropy: { title: "Entropy", unit: "nats per trained token" },
	loss: { title: "Loss", unit: "weighted mean per token, before the update", fit: true },
	kl: { title: "KL to the start model", unit: "nats per token", fit: true, empty: "The loss has no KL term (kl_coef is 0)." },
	grad_norm: { title: "Gradient norm", unit: "L2 norm before clipping" },
	logprob_diff: {
		title: "Mismatch",
		unit: "nats, trainer − sampler",
		log: true,
		keys: { mean: "logprob_diff_mean", largest: "logprob_diff_max" },
	},
	staleness: { title: "Staleness", unit: "policy versions", keys: { mean: "staleness_mean", largest: "staleness_max" } },
	zero_variance_groups: { title: "Groups without a signal", unit: "groups per step: all scores equal" },
	failed_rollouts: { title: "Failed rollouts", unit: "rollouts per step" },
	throughput: { title: "Throughput", unit: "sampled tokens per second of a step" },
	sync_stall_s: { title: "Sampling paused for a sync", unit: "seconds per step" },
	step_s: { title: "Time per step", unit: "seconds" },
};

const VALUES = {
	reward_mean: (row) => [row.reward_mean, row.reward_std],
	throughput: (row) => [row.completion_tokens / row.step_s],
};

export class Metrics {
	rows = [];
	evaluations = [];
	next = 0;
	generation = null;

	constructor(run) {
		this.run = run;
	}

	// Reads what is new; true if anything is.
	async read() {
		const state = () => [this.next, this.generation, this.evaluations.length].join();
		const before = state();
		for (let more = true; more; ) {
			const reply = await get([this.run, "metrics"], { after: this.next, generation: this.generation });
			if (reply.reset) this.rows = [];
			for (const values of reply.rows) this.rows.push(Object.fromEntries(reply.columns.map((name, i) => [name, values[i]])));
			({ next: this.next, generation: this.generation = null, more } = reply);
		}
		this.evaluations = (await get([this.run, "evaluations"])).rows;
		return state() !== before;
	}

	get last() {
		return this.rows.at(-1);
	}

	// Columns that hold numbers and have no chart of their own.
	others() {
		const names = this.rows.flatMap((row) => Object.keys(row).filter((name) => Number.isFinite(row[name])));
		return names.filter((name) => !Object.hasOwn(CHARTS, name));
	}

	// [step, value, standard deviation?]: what has a value
	points(key) {
		const value = own(VALUES, key, (row) => [row[key]]);
		const all = this.rows.map((row) => [row.step, ...value(row)]).filter((point) => Number.isFinite(point[1]));
		return key === "accuracy" && this.evaluations.length ? this.evaluated() : all;
	}

	// Several environments at one policy version: their mean, as in metrics.jsonl.
	evaluated() {
		const versions = Object.groupBy(this.evaluations.filter((row) => row.accuracy !== null), (row) => row.policy_version);
		const mean = (rows) => rows.reduce((sum, row) => sum + row.accuracy, 0) / rows.length;
		return Object.entries(versions).map(([version, rows]) => [Number(version), mean(rows)]);
	}
}
