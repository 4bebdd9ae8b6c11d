"use strict";
(() => {
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const symbols = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x"];
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // What a page's own script makes of a figure before it is drawn.
  const page = globalThis.thinwire ?? {};
  const adapt = page.adapt ?? ((figure) => figure);

  const trace = (data) => {
    const { series, dash = series, band } = data.meta;
    const shade = series === undefined ? colour("muted") : colour(`series-${series % 8}`);
    if (band) return { ...data, fill: "toself", fillcolor: `${shade}30`, line: { width: 0 } };
    const symbol = symbols[(dash ?? 0) % 7];
    const line = { color: shade, dash: dashes[(dash ?? 1) % 6], width: 2.5, ...data.line };
    return { ...data, line, marker: { color: shade, symbol, size: 7, ...data.marker } };
  };

  const axis = (given) => ({
    ...given,
    gridcolor: colour("line"),
    linecolor: colour("line"),
    showspikes: false,
    zeroline: false,
    automargin: true,
  });

  const layout = (given) => ({
    ...given,
    xaxis: axis(given.xaxis),
    yaxis: axis(given.yaxis),
    shapes: (given.shapes ?? []).map((shape) => ({
      ...shape,
      line: { color: colour("muted"), width: 1.5, dash: "dash" },
    })),
    annotations: (given.annotations ?? []).map((note) => ({ ...note, bgcolor: colour("page") })),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("text") },
    hoverlabel: {
      bgcolor: colour("page"),
      bordercolor: colour("line"),
      font: { color: colour("text") },
      namelength: -1,
    },
    margin: { l: 8, r: 8, t: 24, b: 8 },
  });

  const draw = (section) => {
    const figure = adapt(JSON.parse(section.querySelector("script").textContent));
    Plotly.react(section.querySelector(".plot"), figure.data.map(trace), layout(figure.layout), {
      displaylogo: false,
      displayModeBar: false,
    });
  };

  // Also when only its column changes: a scroll bar that appears narrows the page, not the window.
  const resized = new ResizeObserver((plots) =>
    plots.forEach((plot) => Plotly.Plots.resize(plot.target)),
  );

  const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
  page.redraw = drawAll;
  drawAll();
  document.querySelectorAll(".plot").forEach((plot) => resized.observe(plot));
  scheme.addEventListener("change", drawAll);
})();
