"use strict";
// How numbers are written in a page.
var thinwire = globalThis.thinwire ?? {};
(() => {
  const page = thinwire;
  page.three = (value) => Number(value.toPrecision(3)).toLocaleString("en");
  page.prefixed = (value, unit) => {
    const size = [1e12, 1e9, 1e6, 1e3].find((each) => Math.abs(value) >= each) ?? 1;
    const prefix = { 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k" }[size] ?? "";
    return `${page.three(value / size)} ${prefix}${unit}`.trim();
  };
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
  page.duration = (seconds) => {
    if (seconds < 1e-9) return "0 s";
    const [unit, size] = units.find(([, each]) => seconds >= each) ?? units.at(-1);
    return `${page.three(seconds / size)} ${unit}`;
  };
})();
