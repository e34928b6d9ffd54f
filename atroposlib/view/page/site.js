// Addresses of the page (#/run/NAME/groups?step=3), requests to the server, and the runs that it knows.

export const site = { runs: [], group: null }; // group: opened last
export const findRun = (name) => site.runs.find((run) => run.run === name);

export function here() {
	const [path, query] = location.hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
	return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), params: new URLSearchParams(query) };
}

// null and "" take a parameter away, a list gives it several values.
function changed(params, changes) {
	const next = new URLSearchParams(params);
	for (const [name, value] of Object.entries(changes)) {
		next.delete(name);
		for (const one of [value].flat()) if (one || one === 0) next.append(name, one);
	}
	return next;
}

const path = (parts, query) => parts.map(encodeURIComponent).join("/") + (query.size ? `?${query}` : "");
export const address = (parts, changes = {}, params = "") => `#/${path(parts, changed(params, changes))}`;
export const toGroups = (run, changes) => address(["run", run, "groups"], changes);
export const hereWith = (changes) => address(here().parts, changes, here().params);
export const param = (name) => here().params.get(name);

export function turn(changes) {
	history.replaceState(null, "", hereWith(changes));
	dispatchEvent(new Event("hashchange"));
}

// A group's address holds that of its list, and what is shown of the group.
export const listParams = () => changed(here().params, { at: null, rollout: null, show: null, colour: null });

// Of the range of steps shown: button, key, and by which share its first and last step move.
export const MOVES = [
	["Earlier", "ArrowLeft", -0.5, -0.5],
	["Later", "ArrowRight", 0.5, 0.5],
	["Zoom in", "+", 0.25, -0.25],
	["Zoom out", "-", -0.5, 0.5],
	["All", "Home", -Infinity, Infinity],
];

export function moveRange([from, to], [least, most], [, , ...shares]) {
	let [a, b] = shares.map((share) => Math.sign(share) * Math.round(Math.abs(share) * (to - from + 1)));
	if (a === b) a = b = Math.max(least - from, Math.min(most - to, a)); // keeps its size at the ends
	const [first, last] = [Math.max(least, from + a), Math.min(most, to + b)];
	if (first <= last) turn({ from: first, to: last < most ? last : null });
}

export class Lost extends Error {}

export const get = (parts, params) => ask(["runs", ...parts], params);
export async function ask(parts, params = {}) {
	return answer(`/api/${path(parts, changed("", params))}`);
}

export const put = (parts, body) =>
	answer(`/api/${path(parts, "")}`, { method: "PUT", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

async function answer(url, how) {
	const reply = await fetch(url, how).catch(() => {
		throw new Lost();
	});
	if (reply.ok) return reply.json();
	const { detail } = await reply.json().catch(() => ({}));
	throw new Error(detail ?? `The server answered with status ${reply.status}.`);
}
