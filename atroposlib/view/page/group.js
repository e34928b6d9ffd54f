// One group: its prompt once, its answers side by side, best first, as text or as tokens.

import { badge, button, control, count, dots, empty, fill, h, link, num, own, score, seconds, textOf, when } from "./dom.js";
import { TABS, source, strip } from "./groups.js";
import { address, get, here, hereWith, listParams, param, site, turn } from "./site.js";
import { COLOURS, exactness, heat, legend, tokensOf, untell } from "./tokens.js";

const ENDS = { length: "cut off", abort: "aborted", tool_calls: "called a tool" };
const ROLES = { user: "User", assistant: "Model", system: "System", tool: "Tool result" };

const call = (name, body) => h("div.aside.tool", h("b", `Tool call${name ? `: ${name}` : ""}`), h("pre", textOf(body)));

function thought(text, open) {
	const words = count(text.split(/\s+/).filter(Boolean).length, "word");
	return h("details.aside", { open }, h("summary", `Thought, ${words}`), h("p.text", text.trim()));
}

const part = (open) => ({ text, thought: words, call: made }) =>
	text ? h("p.text", text) : made ? call(made.name, made.arguments) : thought(words, open);

const pictures = (urls) => (urls ?? []).map((src, i) => h("img", { src, alt: `Image ${i + 1}` }));

function message({ role, content, parts, images, reasoning_content, tool_calls }, open) {
	const text = textOf(content).trim();
	const calls = [tool_calls ?? []].flat().map((made) => made?.function ?? made ?? {});
	return h(
		"div.message",
		{ class: own(ROLES, role) ? role : "other" },
		h("small.role.muted", own(ROLES, role, textOf(role))),
		reasoning_content && thought(textOf(reasoning_content), open),
		parts ? parts.map(part(open)) : h("p.text", text),
		pictures(images),
		calls.map((made) => call(made.name, made.arguments)),
	);
}

const said = ({ messages, images, error }, from, open) => [
	pictures(images),
	error && h("p.text.bad", error),
	messages ? messages.slice(from).map((one) => message(one, open)) : empty("No messages were recorded."),
];

// How many messages all answers begin with.
function shared(rollouts) {
	const lists = rollouts.map((one) => one.messages).filter((list) => list?.length);
	const equal = (i) => new Set(lists.map((list) => (i < list.length - 1 ? JSON.stringify(list[i]) : null))).size === 1;
	let n = 0;
	while (lists[0]?.[n + 1] && lists[0][n].role !== "assistant" && equal(n)) n++;
	return n;
}

function marks({ score: value, rewards, advantage, failed, finish_reason: end, alike }) {
	return [
		score(value),
		alike > 1 && badge("", `× ${num(alike)}`),
		h("small.muted", rewards),
		advantage != null && h("span.advantage", h("span.muted", "advantage "), (advantage > 0 ? "+" : "") + num(advantage)),
		failed && badge("bad", `failed: ${failed}`),
		end && end !== "stop" && badge("warn", own(ENDS, end, end)),
	];
}

function sequences(one, colour, beside) {
	return (one.sequences ?? []).map((sequence, i, all) => {
		const tokens = tokensOf(sequence);
		const from = beside && colour !== "mask" ? Math.max(0, tokens.findIndex((t) => t.trained)) : 0;
		const facts = dots(
			all.length > 1 && `sequence ${i + 1}`,
			`${count(tokens.length, "token")}, ${num(tokens.filter((t) => t.trained).length)} trained on`,
			from > 0 && "without the prompt",
			!sequence.pieces && "ids: the model's tokenizer is not on this machine",
		);
		return [h("small.muted", facts), heat(tokens, colour, from)];
	});
}

// The first of answers with equal texts and scores stands for all, whose number is `alike`.
function folded(order) {
	const kinds = Object.values(Object.groupBy(order, (one) => JSON.stringify([one.score, one.messages, one.failed, one.error, one.images])));
	return kinds.map(([first, ...others]) => ({ ...first, alike: 1 + others.length }));
}

// One of them: as both.
function answers(order, picked) {
	const colour = own(COLOURS, param("colour")) ? param("colour") : "diff";
	const tokens = picked || param("show") === "tokens";
	const all = picked ? [picked] : tokens ? order : folded(order);
	const from = picked ? 0 : shared(order);
	const names = Object.fromEntries(Object.entries(COLOURS).map(([id, { name }]) => [id, name]));
	const pick = (text, show) =>
		h("button", { id: text, "aria-pressed": String(tokens === Boolean(show)), onclick: () => turn({ show }) }, text);
	const answer = (one) => {
		const name = `answer ${one.rollout + 1}`;
		const text = h("section.conversation", said(one, from, picked));
		const parts = picked ? [text, h("section", sequences(one, colour))] : tokens ? sequences(one, colour, true) : text;
		const body = h(`div.${picked ? "two" : "said"}`, { tabindex: 0, role: "region", "aria-label": `Text of ${name}` }, parts);
		const other = picked ? link("All answers", hereWith({ rollout: null })) : link(`Open ${name}`, hereWith({ rollout: one.rollout }));
		return h("article.answer.card", h("div.row", marks(one)), body, other);
	};
	const every = all.flatMap((one) => (one.sequences ?? []).flatMap(tokensOf));
	return [
		from > 0 && h("section.card", order.find((one) => one.messages).messages.slice(0, from).map((one) => message(one))),
		h(
			"div.row",
			h("h2", picked ? `Answer ${picked.rollout + 1} of ${order.length}` : `${count(order.length, "answer")}, best first`),
			!picked && [pick("Text", null), pick("Tokens", "tokens"), strip(order.map((one) => one.score))],
			tokens && [control("Colour by", names, colour, (value) => turn({ colour: value }), { id: "colour" }), legend(colour, every)],
		),
		tokens && h("p.muted", exactness(every) ?? "No log-probabilities of the trainer."),
		h("div.answers", { class: picked && "one" }, all.map(answer)),
	];
}

export function groupView(name, n) {
	const body = h("div.group", empty("Loading …"));
	const of = source();
	let group = null;
	let around = {};
	site.group = n;

	// In the list that this group was opened from.
	async function neighbours() {
		const offset = Math.max(0, Number(param("at")) - 25);
		const { rows } = await get([name, "groups"], { ...Object.fromEntries(listParams()), offset, limit: 50 });
		const i = rows.findIndex((row) => row.n === n);
		const to = (k) => {
			const changes = { at: offset + k, rollout: null };
			return i >= 0 && rows[k] && address(["run", name, "group", rows[k].n], changes, here().params);
		};
		return { previous: to(i - 1), next: to(i + 1) };
	}

	function draw() {
		untell();
		const best = (one) => one.score ?? -Infinity;
		const order = group.rollouts.map((one, rollout) => ({ rollout, ...one })).sort((a, b) => best(b) - best(a));
		const picked = order.length === 1 ? order[0] : order.find((one) => String(one.rollout) === param("rollout"));
		const { step, policy_version: version, env, time, started, dropped, left_out } = group;
		const facts = dots(
			step != null && `step ${num(step)}`,
			version != null && `policy version ${num(version)}`,
			env,
			time && when(time),
			started && time && `sampled in ${seconds(time - started)}`,
			Object.entries(group.generation_params ?? {}).map(([key, value]) => `${key} ${textOf(value)}`),
		);
		const reasons = [group.error, dropped && `Dropped: ${dropped}`, left_out && `Left out of training: ${left_out}`];
		const { previous, next } = around;
		const list = button("List", address(["run", name, "groups"], { source: of }, listParams()), { id: "up" });
		const buttons = h("span.buttons", list, previous && button("Previous", previous), next && button("Next", next));
		const reference = group.reference ?? "this environment recorded none";
		fill(
			body,
			h("div.row", h("p.muted", facts), buttons),
			reasons.map((text) => text && h("p.reason", text)),
			of !== "dead_letters" && h("p.text.reference", h("b", "Reference answer: "), reference),
			answers(order, picked),
		);
	}

	// A very long group comes without some of its tokens: one answer has its own.
	async function refresh(polled) {
		if (polled) return; // nothing moves while a person reads
		const load = (more) => get([name, "groups", n], { source: of, ...more });
		const rollout = param("rollout");
		if (!group) [group, around] = await Promise.all([load(), param("at") ? neighbours() : {}]);
		if (group.shortened && rollout) group = { ...(await load({ rollout })), shortened: true };
		draw();
	}

	return { title: `${name}: group`, tab: TABS[of], nodes: [body], refresh, step: (by) => (by < 0 ? around.previous : around.next) };
}
