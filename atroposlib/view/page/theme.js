// Loaded before the first paint: a chosen theme does not flash.
const chosen = localStorage.atropos;
if (chosen) document.documentElement.dataset.theme = chosen;
