// A chart as a file: what is drawn as a picture, what was measured as a table.

import { h } from "./dom.js";

function save(blob, name) {
	const href = URL.createObjectURL(blob);
	h("a", { href, download: name.replace(/[^\w.-]+/g, "-") }).click();
	setTimeout(() => URL.revokeObjectURL(href), 10000);
}

function draw(ctx, path) {
	const { stroke, fill, opacity, strokeWidth, strokeDasharray, strokeLinecap } = getComputedStyle(path);
	Object.assign(ctx, { strokeStyle: stroke, fillStyle: fill, globalAlpha: opacity, lineWidth: parseFloat(strokeWidth), lineCap: strokeLinecap });
	ctx.setLineDash(strokeDasharray === "none" ? [] : strokeDasharray.match(/[\d.]+/g).map(Number));
	const line = new Path2D();
	line.addPath(new Path2D(path.getAttribute("d")), path.getScreenCTM());
	if (fill !== "none") ctx.fill(line);
	else ctx.stroke(line);
}

export function picture(figure, name) {
	const { left, top, width, height } = figure.getBoundingClientRect();
	const canvas = h("canvas", { width: 2 * width, height: 2 * height });
	const ctx = canvas.getContext("2d");
	ctx.scale(2, 2);
	ctx.fillStyle = getComputedStyle(figure).backgroundColor;
	ctx.fillRect(0, 0, width, height);
	ctx.translate(-left, -top);
	for (const path of figure.querySelectorAll("path")) draw(ctx, path);
	const texts = document.createTreeWalker(figure, NodeFilter.SHOW_TEXT);
	Object.assign(ctx, { globalAlpha: 1, textBaseline: "middle" });
	while (texts.nextNode()) {
		const range = new Range();
		range.selectNodeContents(texts.currentNode);
		const box = range.getBoundingClientRect();
		const { font, color } = getComputedStyle(texts.currentNode.parentNode);
		Object.assign(ctx, { font, fillStyle: color });
		ctx.fillText(texts.currentNode.data, box.left, box.top + box.height / 2);
	}
	canvas.toBlob((blob) => save(blob, `${name}.png`));
}

// A spreadsheet takes a cell that begins so for a formula.
const cell = (text) => `"${String(text).replace(/^[=+\-@]/, "'$&").replaceAll('"', '""')}"`;

export function csv(lines, name) {
	const steps = [...new Set(lines.flatMap(({ points }) => points.map(([step]) => step)))].sort((a, b) => a - b);
	const tables = lines.map(({ points }) => new Map(points.map(([step, value]) => [step, value])));
	const rows = steps.map((step) => [step, ...tables.map((table) => table.get(step) ?? "")].join());
	const head = ["step", ...lines.map(({ name }) => cell(name))].join();
	save(new Blob([[head, ...rows, ""].join("\r\n")], { type: "text/csv" }), `${name}.csv`);
}
