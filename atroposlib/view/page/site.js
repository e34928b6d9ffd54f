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

export class Lost extends Error {}

export async function get(parts, params = {}) {
	const reply = await fetch(`/api/runs${path(["", ...parts], changed("", params))}`).catch(() => {
		throw new Lost();
	});
	if (reply.ok) return reply.json();
	const { detail } = await reply.json().catch(() => ({}));
	throw new Error(detail ?? `The server answered with status ${reply.status}.`);
}
