"use strict";
// Draws what the page's data says; with a server behind it, asks now and then whether there is more.
(() => {
  const root = document.documentElement;
  const colours = ["#3b76c2", "#d9822b", "#2f9e6e", "#b5483f", "#8467c1", "#8c6d4f", "#c45fa0", "#6f7783", "#a3a02c", "#2ba3b5"];
  let data = JSON.parse(document.getElementById("data").textContent);

  // Names come from files: the library would read tags in them.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const ink = () => getComputedStyle(root).getPropertyValue("--ink").trim();
  const line = () => getComputedStyle(root).getPropertyValue("--line").trim();

  // Bars lie, so that what they are called can be read.
  const bars = (chart) => (chart.bars ? chart.series.length * Math.max(...chart.series.map((series) => series.x.length)) : 0);

  function layout(chart) {
    const axis = (title, log) => ({ title: { text: plain(title), font: { size: 11 } }, gridcolor: line(), zerolinecolor: line(), automargin: true, tickformat: ".4~g", ...(log ? { type: "log" } : {}) });
    const many = (chart.series || []).filter((series) => !series.faint).length > 8; // beside the chart, where they can be scrolled
    return {
      title: { text: plain(chart.title), font: { size: 13 } }, margin: { l: 50, r: 10, t: 36, b: 40 },
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: ink(), size: 11 },
      xaxis: chart.bars ? axis(chart.y, chart.log_y) : axis(chart.x, chart.log_x),
      yaxis: chart.bars ? { ...axis(chart.x, false), autorange: "reversed" } : axis(chart.y, chart.log_y),
      hovermode: "closest", autosize: true, legend: many ? { x: 1.02, y: 1, font: { size: 10 } } : { orientation: "h", y: -0.25 }, uirevision: "kept",
    };
  }

  function placed(chart, series) {
    const at = series.x.map((value) => (typeof value === "string" ? plain(value) : value));
    return chart.bars ? { type: "bar", orientation: "h", x: series.y, y: at } : { type: "scatter", x: at, y: series.y };
  }

  function traces(chart) {
    const names = [...new Set(chart.series.map((series) => series.name))];
    return chart.series.map((series) => ({
      ...placed(chart, series), name: plain(series.name), legendgroup: plain(series.name), showlegend: !series.faint && !(chart.bars && names.length === 1),
      [chart.bars ? "error_x" : "error_y"]: { type: "data", array: series.half || [], visible: Boolean(series.half), thickness: 1, width: 2 },
      mode: series.half ? "lines+markers" : series.x.length > 1 ? "lines" : "markers", opacity: series.faint ? 0.25 : 1,
      hoverinfo: series.faint ? "skip" : undefined,
      line: { color: colours[names.indexOf(series.name) % colours.length], width: series.faint ? 1 : 2 },
      marker: { color: colours[names.indexOf(series.name) % colours.length] },
    }));
  }

  const turned = (table) => table[0].map((_, column) => table.map((row) => row[column]));
  function surfaceTraces(frame) {
    const marks = Object.entries(frame.marked).map(([name, [x, y]], number) => ({
      x: [x], y: [y], name: plain(name), mode: "markers", marker: { size: 12, symbol: ["diamond", "star"][number % 2], color: ["#b5483f", "#ffffff"][number % 2], line: { width: 1, color: "#000" } },
    }));
    return [{ type: "contour", x: frame.axis, y: frame.axis, z: turned(frame.heights), colorscale: "Viridis", showlegend: false, contours: { showlabels: true } }, ...marks];
  }

  const config = { responsive: true, displayModeBar: false };
  function box(parent, place, kind) {
    if (parent.children[place]) return parent.children[place];
    const made = document.createElement("div");
    made.className = "chart" + kind;
    const plot = document.createElement("div");
    plot.className = "plot";
    made.append(plot);
    parent.append(made);
    return made;
  }

  function draw() {
    document.querySelectorAll(".drawn").forEach((parent) => {
      const part = data.parts[parent.dataset.part];
      if (!part) return;
      part.surfaces.forEach((surface, place) => {
        const made = box(parent, place, " square");
        let slider = made.querySelector("input");
        if (!slider) {
          const label = document.createElement("label");
          slider = document.createElement("input");
          Object.assign(slider, { type: "range", min: 0, max: surface.frames.length - 1, value: Math.floor(surface.frames.length / 2) });
          label.append(document.createElement("span"), slider);
          made.append(label);
          slider.addEventListener("input", () => show());
        }
        const show = () => {
          const frame = surface.frames[slider.value];
          made.querySelector("span").textContent = surface.slider + " = " + frame.label;
          Plotly.react(made.querySelector(".plot"), surfaceTraces(frame), layout(surface), config);
        };
        show();
      });
      part.charts.forEach((chart, place) => {
        const made = box(parent, part.surfaces.length + place, "");
        if (bars(chart)) made.querySelector(".plot").style.height = `${Math.max(280, 110 + 16 * bars(chart))}px`;
        Plotly.react(made.querySelector(".plot"), traces(chart), layout(chart), config);
      });
    });
  }

  document.getElementById("colours").addEventListener("click", () => {
    const dark = root.dataset.colours ? root.dataset.colours === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.colours = dark ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  // Once everything is there the page may have become narrower, by a scroll bar.
  requestAnimationFrame(() => document.querySelectorAll(".plot").forEach((plot) => Plotly.Plots.resize(plot)));

  // On paper: light, everything open, charts as wide as a page.
  const PAPER = 640;
  let screen = null;
  addEventListener("beforeprint", () => {
    screen = { colours: root.dataset.colours, closed: [...document.querySelectorAll("details:not([open])")] };
    root.dataset.colours = "light";
    screen.closed.forEach((part) => { part.open = true; });
    draw();
    document.querySelectorAll(".plot").forEach((plot) => Plotly.relayout(plot, { width: PAPER }));
  });
  addEventListener("afterprint", () => {
    if (screen.colours) root.dataset.colours = screen.colours; else delete root.dataset.colours;
    screen.closed.forEach((part) => { part.open = false; });
    document.querySelectorAll(".plot").forEach((plot) => Plotly.relayout(plot, { width: undefined, autosize: true }));
    draw();
  });

  // What a reader has opened or closed stays so.
  function replaced(place, words) {
    const called = (part) => part.querySelector("summary").textContent;
    const open = new Map([...place.querySelectorAll("details")].map((part) => [called(part), part.open]));
    place.innerHTML = words;
    place.querySelectorAll("details").forEach((part) => { if (open.has(called(part))) part.open = open.get(called(part)); });
  }

  async function more() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (answer.ok) {
        const found = await answer.json();
        if (found.version !== data.version) {
          data = found;
          // Words are escaped where they are made; scripts in them would not be allowed to run either.
          document.querySelectorAll(".words").forEach((place) => { const words = data.words[place.dataset.part]; if (words !== undefined) replaced(place, words); });
          draw();
        }
      }
    } catch { /* the server is gone: the page stays as it is */ }
    setTimeout(more, 3000);
  }
  if (data.live) setTimeout(more, 3000);
})();
