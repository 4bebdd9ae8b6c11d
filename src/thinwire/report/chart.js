"use strict";
// Draws the figures of a page with uPlot. `Chart` of blocks.py says what a figure is.
var thinwire = globalThis.thinwire ?? {};
(() => {
  const page = thinwire;
  const DASHES = [[], [9, 6], [2.5, 5], [9, 4, 2.5, 4], [14, 6], [14, 4, 2.5, 4]];
  const HEIGHT = 420;
  const fontOf = (px) => `${px}px system-ui, sans-serif`;

  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
  const three = (value) => Number(value.toPrecision(3)).toLocaleString("en");
  const scaled = (value, sizes, by = Math.abs(value)) => {
    const [size, name] = sizes.find(([each]) => by >= each) ?? sizes.at(-1);
    return `${three(value / size)} ${name}`;
  };
  page.percent = (share) => `${three(100 * share)} %`;
  page.duration = (seconds, by) => (seconds < 1e-9 ? "0 s" : scaled(seconds, UNITS, by));
  const plain = (value) => Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  const si = (value) => scaled(value, PREFIXES).trim();
  const formats = { bytes: (value) => `${scaled(value, PREFIXES)}B`, percent: page.percent, duration: page.duration, si };
  const said = (value, { format }, by) => (formats[format] ?? plain)(value, by);

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const colour = ({ series }) => css(series === undefined ? "--muted" : `--series-${series % 8}`);
  const dashOf = ({ mode, line, meta }) => line?.dash ?? DASHES[mode.includes("lines") ? (meta.dash ?? 0) % 6 : 0];
  // Seconds, minutes, hours and days have round numbers of their own.
  const times = (units, numbers) => units.flatMap((unit) => numbers.map((number) => number * unit));
  const MOMENTS = [...times([1e-5, 1e-4, 1e-3, 0.01, 0.1], [1, 2, 5]), ...times([1, 60, 3600], [1, 2, 5, 10, 20, 30]), ...times([86400], [2, 5, 10, 20, 50, 100])];
  const within = (ticks) => (u, _, low, high) => {
    const found = ticks.filter((tick) => tick >= low && tick <= high);
    return found.filter((_, i) => i % Math.ceil((found.length * 90) / u.width) === 0);
  };
  const axisOf = (scale, axis) => {
    const ticks = axis.tickvals ?? (axis.format === "duration" && axis.type === "log" ? MOMENTS : null);
    const text = (tick, incr) => (axis.tickvals ? axis.ticktext[ticks.indexOf(tick)] : said(tick, axis, ticks ? tick : incr));
    return {
      ...(ticks && { splits: within(ticks), filter: (u, splits) => splits }),
      ...(axis.format === "duration" && { incrs: MOMENTS }),
      scale,
      label: axis.title?.text ?? "",
      stroke: css("--text"), font: fontOf(12), labelFont: fontOf(12),
      space: scale === "x" ? 72 : 40,
      size: scale === "x" ? 36 : (u, texts) => 16 + 7 * Math.max(3, ...(texts ?? []).map((each) => `${each ?? ""}`.length)),
      grid: { stroke: css("--line"), width: 1 },
      ticks: { show: false },
      values: (u, splits, _, __, incr) => splits.map((tick) => (tick === null ? null : text(tick, incr))),
    };
  };

  // Pads what is drawn, its errors included; a range that a reader chose stays as it is.
  const scaleOf = (axis, traces, isX) => ({
    time: false,
    distr: axis.type === "log" ? 3 : 1,
    range: (u, low, high) => {
      if (low === null) return [1, 10];
      if (axis.tickvals) return [low / 1.15, high * 1.15];
      const power = 10 ** Math.floor(Math.log10(low / 1.1));
      if (axis.type === "log") return [Math.floor(low / 1.1 / power) * power, high * 1.2];
      const isWhole = low === u.data[0][0] && high === u.data[0].at(-1);
      if (isX) return isWhole ? [0, high * 1.02 || 1] : [low, high];
      const error = Math.max(0, ...traces.flatMap((trace) => trace.error ?? []));
      return uPlot.rangeNum(low - error, high + error, 0.1, true);
    },
  });

  const valueOf = (axis) => (u, value) => (typeof value === "number" ? said(value, axis) : "");
  const seriesOf = (trace, yaxis) => {
    const hasLine = trace.mode.includes("lines");
    const path = trace.line?.shape === "hv" ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
    const name = Object.assign(document.createElement("button"), { type: "button", textContent: trace.name, ariaPressed: "true" });
    return {
      label: name,
      stroke: colour(trace.meta),
      width: hasLine ? trace.line?.width ?? 2 : 0,
      dash: dashOf(trace),
      spanGaps: true,
      paths: hasLine ? path : () => null,
      points: { show: trace.mode.includes("markers"), size: hasLine ? 6 : 10, fill: colour(trace.meta), dash: [] },
      value: valueOf(yaxis),
    };
  };
  const drawErrors = (u, { x, y, error, mode, bars, meta }) => {
    const edge = (sign) => x.map((each, i) => [u.valToPos(each, "x", true), u.valToPos(y[i] + sign * error[i], "y", true)]);
    const [up, down, box] = [edge(1), edge(-1), new Path2D()];
    box.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.save();
    u.ctx.clip(box);
    u.ctx.beginPath();
    u.ctx.strokeStyle = u.ctx.fillStyle = colour(meta);
    if (mode.includes("lines") && !bars) {
      [...up, ...down.reverse()].forEach((point) => u.ctx.lineTo(...point));
      u.ctx.globalAlpha = 0.2;
      u.ctx.fill();
    } else {
      up.forEach((point, i) => (u.ctx.moveTo(...point), u.ctx.lineTo(...down[i])));
      u.ctx.lineWidth = 1.5 * devicePixelRatio;
      u.ctx.stroke();
    }
    u.ctx.restore();
  };
  // Where a name would cover another one there is the legend.
  const drawNames = (u, named) => {
    const [line, taken] = [16 * devicePixelRatio, []];
    Object.assign(u.ctx, { font: fontOf(12 * devicePixelRatio), fillStyle: css("--text"), textAlign: "left", textBaseline: "middle" });
    named.forEach(({ x, y, name }) => {
      const [px, py] = [u.valToPos(x[0], "x", true), u.valToPos(y[0], "y", true) - line * 0.7];
      const width = u.ctx.measureText(name).width;
      const left = Math.min(px, u.bbox.left + u.bbox.width - width);
      if (taken.some(([a, b, end]) => left < end && left + width > a && Math.abs(py - b) < line)) return;
      taken.push([left, py, left + width]);
      u.ctx.fillText(name, left, py);
    });
  };

  const draw = (section) => {
    const plot = section.querySelector(".plot");
    const figure = page.figure?.(section) ?? JSON.parse(section.querySelector("script").textContent);
    const { xaxis = {}, yaxis = {} } = figure.layout;
    const traces = figure.data.filter(({ x }) => x.length);
    const shown = (u) => traces.filter((_, i) => u.series[i + 1].show);
    plot.uplot?.destroy();
    plot.data = traces;
    plot.classList.toggle("empty", !traces.length);
    const options = {
      width: plot.clientWidth,
      height: HEIGHT,
      padding: [12, 34, 0, 0],
      axes: [axisOf("x", xaxis), axisOf("y", yaxis)],
      scales: { x: scaleOf(xaxis, traces, true), y: scaleOf(yaxis, traces, false) },
      series: [{ label: xaxis.title?.text, value: valueOf(xaxis) }, ...traces.map((trace) => seriesOf(trace, yaxis))],
      cursor: { drag: { x: true, y: true, uni: 30, dist: 5 }, hover: { skip: [null, undefined], prox: 40 }, focus: { prox: 24 } },
      focus: { alpha: 0.3 },
      legend: { markers: { dash: (u, i) => (dashOf(traces[i - 1]).length ? "dashed" : "solid") } },
      hooks: {
        drawAxes: [(u) => shown(u).filter(({ error }) => error).forEach((trace) => drawErrors(u, trace))],
        draw: [(u) => u.width > 600 && drawNames(u, shown(u).filter(({ mode }) => mode.includes("text")))],
        setSeries: [(u, i, { show }) => i && show !== undefined && (u.series[i].label.ariaPressed = String(show))],
      },
    };
    plot.uplot = new uPlot(options, traces.length ? uPlot.join(traces.map(({ x, y }) => [x, y])) : [[]], plot);
  };
  page.redraw = () => document.querySelectorAll(".chart").forEach(draw);
  addEventListener("DOMContentLoaded", page.redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", page.redraw);

  document.querySelectorAll(".plot").forEach((plot) => {
    plot.addEventListener("keydown", (event) => {
      const [u, step] = [plot.uplot, { ArrowLeft: -1, ArrowRight: 1 }[event.key]];
      if (!step || event.target !== plot) return;
      const index = Math.max(0, Math.min(u.data[0].length - 1, (u.cursor.idx ?? -1) + step));
      u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: u.rect.height / 2 });
      event.preventDefault();
    });
    const resize = () => plot.uplot && plot.uplot.width !== plot.clientWidth && plot.uplot.setSize({ width: plot.clientWidth, height: HEIGHT });
    new ResizeObserver(resize).observe(plot);
  });
})();
