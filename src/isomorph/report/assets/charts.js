"use strict";
// Small charts as SVG, drawn for the width there is. Text comes in as text only, never as markup.
const NS = "http://www.w3.org/2000/svg";
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key in node && key !== "list" && typeof value !== "string") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function svg(tag, props = {}, parent = null, text = null) {
  const node = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
function say(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(+value.toPrecision(4));
}
const biggest = values => Math.max(0, ...values.filter(Number.isFinite).map(Math.abs));
// Writes all numbers of a chart with the same decimals: three digits of the largest (100 with one decimal: 100.0 %).
function sameDecimals(values) {
  const top = biggest(values);
  if (top && (top < 1e-4 || top >= 1e6)) return v => v.toExponential(2);
  return v => v.toFixed(top > 100 ? 0 : top ? clamp(2 - Math.floor(Math.log10(top)), 1, 6) : 1);
}
// The same for the ticks of an axis: as many decimals as their step has.
function ruled(found) {
  const top = biggest(found), power = value => Math.floor(Math.log10(value) + 1e-9);
  const step = found.length > 1 ? power(found[1] - found[0]) : power(top || 1) - 1;
  if (top && (top < 1e-4 || top >= 1e6)) return v => v ? v.toExponential(Math.max(0, power(top) - step)) : "0";
  return v => v.toFixed(clamp(-step, 0, 12));
}
function colours(hex) {
  return Array.from({length: 256}, (_, i) => [0, 2, 4].map(k => parseInt(hex.substr(6 * i + k, 2), 16)));
}
const css = rgb => `rgb(${rgb.join(" ")})`;
const hue = i => `var(--s${i % 6})`;
// A model has one colour on the whole page.
function tint(series, i) {
  const models = page.viewers.length ? page.viewers[0].models : [];
  return hue(series.every(s => models.includes(s.name)) ? models.indexOf(series[i].name) : i);
}

function extent(values, floor = null) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && v !== undefined) { low = Math.min(low, v); high = Math.max(high, v); }
  if (!isFinite(low)) return [0, 1];
  if (floor !== null) low = Math.min(low, floor);
  if (low === high) { low -= .5; high += .5; }
  return [low, high];
}
function tickStep(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
}
function ticks(low, high, count) {
  const step = tickStep(low, high, count), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
// Ends of an axis that hold all values and lie on its ticks.
function ends(low, high, count) {
  const step = tickStep(low, high, count);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step].map(v => +v.toPrecision(12));
}
// Names without what all of them share at both ends: blocks.0.attn, blocks.1.attn -> 0, 1.
function short(names) {
  if (names.length < 2) return {names, around: ""};
  const parts = names.map(n => n.split("."));
  let a = 0, b = 0;
  const least = Math.min(...parts.map(p => p.length));
  while (a < least - 1 && parts.every(p => p[a] === parts[0][a])) a++;
  while (b < least - 1 - a && parts.every(p => p.at(-1 - b) === parts[0].at(-1 - b))) b++;
  const around = a || b ? [...parts[0].slice(0, a), "*", ...(b ? parts[0].slice(-b) : [])].join(".") : "";
  return {names: parts.map(p => p.slice(a, p.length - b).join(".")), around};
}
function axes(root, width, height, margin, y, label) {
  const found = ticks(y.low, y.high, 4), write = ruled(found);
  for (const tick of found) {
    svg("line", {class: "axis", x1: margin.left, x2: width - margin.right, y1: y(tick), y2: y(tick)}, root);
    svg("text", {x: margin.left - 7, y: y(tick) + 4, "text-anchor": "end"}, root, write(tick));
  }
  svg("text", {x: margin.left - 7, y: 11, "text-anchor": "start", dx: 7 - margin.left}, root, label);
}
function linear(low, high, from, to) {
  const scale = v => from + (v - low) / (high - low) * (to - from);
  scale.low = low; scale.high = high;
  return scale;
}
function stroke(points, colour, root, width = 2) {
  let path = "", pen = "M";
  for (const [x, y] of points) { if (y === null) pen = "M"; else { path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`; pen = "L"; } }
  svg("path", {d: path, fill: "none", stroke: colour, "stroke-width": width, "stroke-linejoin": "round"}, root);
}

// Each painter draws and returns stops: {x, y?, text}, the places where the cursor rests.
const painters = {
  lines(root, spec, width) {
    const height = 250, margin = {left: 46, right: 10, top: 22, bottom: 34};
    root.setAttribute("height", height);
    const [x0, x1] = extent(spec.series.flatMap(s => s.x));
    const [y0, y1] = extent(spec.series.flatMap(s => [...s.y, ...(s.low || []), ...(s.high || [])]));
    const x = linear(x0, x1, margin.left, width - margin.right);
    const y = linear(...ends(y0, y1, 4), height - margin.bottom - 5, margin.top + 3);
    axes(root, width, height, margin, y, spec.y);
    const whole = spec.series.every(s => s.x.every(Number.isInteger));
    const found = ticks(x0, x1, Math.max(2, width / 90)).filter(t => !whole || Number.isInteger(t)), write = ruled(found);
    for (const tick of found)
      svg("text", {x: x(tick), y: height - margin.bottom + 16, "text-anchor": "middle"}, root, write(tick));
    svg("text", {x: width - margin.right, y: height - 3, "text-anchor": "end"}, root, spec.x);
    spec.series.forEach((s, i) => {
      const colour = lineColour(spec, i);
      if (s.low && s.high) {
        const up = s.x.map((v, k) => `${x(v)} ${y(s.high[k])}`), down = s.x.map((v, k) => `${x(v)} ${y(s.low[k])}`);
        svg("path", {d: `M${[...up, ...down.reverse()].join("L")}Z`, fill: colour, opacity: .18}, root);
      }
      stroke(s.x.map((v, k) => [x(v), s.y[k] === null ? null : y(s.y[k])]), colour, root);
      if (s.x.length < 30) s.x.forEach((v, k) => s.y[k] !== null && svg("circle", {cx: x(v), cy: y(s.y[k]), r: 2.6, fill: colour}, root));
    });
    const places = [...new Set(spec.series.flatMap(s => s.x))].sort((a, b) => a - b);
    return places.map(place => ({x: x(place), text: `${spec.x} ${say(place)}: ` + spec.series.map(s => {
      let k = 0;
      s.x.forEach((v, j) => { if (Math.abs(v - place) < Math.abs(s.x[k] - place)) k = j; });
      const inside = place >= s.x[0] && place <= s.x.at(-1);
      return `${s.name} ${inside ? say(s.y[k]) : "–"}`;
    }).join(" · ")}));
  },
  dots(root, spec, width) {
    const height = 250, margin = {left: 46, right: 10, top: 22, bottom: 34};
    root.setAttribute("height", height);
    const all = spec.series.flatMap(s => s.values.flatMap(v => v || []));
    const [low, top] = extent(all, 0);
    const y = linear(...ends(low, spec.limit ?? top, 4), height - margin.bottom, margin.top);
    const place = i => margin.left + (i + .5) * (width - margin.left - margin.right) / spec.layers.length;
    const gap = (width - margin.left - margin.right) / spec.layers.length, {names, around} = short(spec.layers);
    axes(root, width, height, margin, y, spec.y);
    const longest = Math.max(...names.map(n => n.length)) * 6.5 + 6, every = Math.max(1, Math.ceil(longest / gap));
    names.forEach((name, i) => i % every || svg("text", {x: place(i), y: height - margin.bottom + 16, "text-anchor": "middle"}, root, name));
    svg("text", {x: width - margin.right, y: height - 3, "text-anchor": "end"}, root, around ? `layer (${around})` : "layer");
    spec.series.forEach((s, k) => {
      const shift = (k - (spec.series.length - 1) / 2) * Math.min(12, gap / 4);
      const mean = v => { const found = (v || []).filter(u => u !== null); return found.length ? found.reduce((a, b) => a + b) / found.length : null; };
      stroke(s.values.map((v, i) => [place(i) + shift, mean(v) === null ? null : y(mean(v))]), tint(spec.series, k), root, 1.6);
      s.values.forEach((v, i) => (v || []).forEach(u => u !== null && svg("circle", {cx: place(i) + shift, cy: y(u), r: 3, fill: tint(spec.series, k), opacity: .62}, root)));
    });
    return spec.layers.map((name, i) => ({x: place(i), text: `${name}: ` + spec.series.map(s => `${s.name} ${(s.values[i] || []).map(say).join(", ") || "–"}`).join(" · ")}));
  },
  bars(root, spec, width) {
    const thick = spec.series.length > 3 ? 6 : 9, row = spec.series.length * (thick + 2) + 9, top = 20;
    const widest = Math.min(width * .42, Math.max(...spec.groups.map(g => g.length)) * 6.6 + 12);
    const height = top + row * spec.groups.length + 4, [low, high] = extent(spec.series.flatMap(s => s.values), 0);
    const x = linear(...ends(low, Math.max(high, 0), Math.max(2, (width - widest) / 90)), widest, width - 46);
    root.setAttribute("height", height);
    const found = ticks(x.low, x.high, Math.max(2, (width - widest) / 90)), write = ruled(found);
    const figure = sameDecimals(spec.series.flatMap(s => s.values));
    for (const tick of found) {
      svg("line", {class: "axis", x1: x(tick), x2: x(tick), y1: top - 4, y2: height}, root);
      svg("text", {x: x(tick), y: 11, "text-anchor": "middle"}, root, write(tick));
    }
    return spec.groups.map((group, i) => {
      const y = top + i * row;
      svg("text", {x: widest - 8, y: y + row / 2, "text-anchor": "end"}, root, group.length * 6.6 > widest ? group.slice(0, widest / 6.6 - 2) + "…" : group);
      spec.series.forEach((s, k) => {
        const v = s.values[i];
        if (v === null) return;
        const at = y + 2 + k * (thick + 2);
        svg("rect", {x: Math.min(x(0), x(v)), y: at, width: Math.max(1, Math.abs(x(v) - x(0))), height: thick, rx: 2, fill: tint(spec.series, k)}, root);
        svg("text", {x: Math.max(x(v), x(0)) + 5, y: at + thick - .5, style: "font-size: 9.5px"}, root, figure(v));
      });
      return {x: null, y: y + (row - 5) / 2, band: row - 1, text: `${group}: ` + spec.series.map(s => `${s.name} ${say(s.values[i])}`).join(" · ") + (spec.y ? ` (${spec.y})` : "")};
    });
  },
  matrix(root, spec, width) {
    const rows = short(spec.rows), columns = short(spec.columns);
    const left = Math.min(width * .35, Math.max(...rows.names.map(n => n.length)) * 6.6 + 14), top = 22, bottom = 38;
    const cell = clamp((width - left - 4) / columns.names.length, 5, 52), tall = Math.min(cell, rows.names.length > 12 ? 22 : 40), height = top + bottom + tall * rows.names.length;
    root.setAttribute("height", height);
    const write = sameDecimals(spec.values.flat()), longest = Math.max(...spec.values.flat().map(v => v === null ? 0 : write(v).length));
    const table = page.colours[spec.low < 0 ? "split" : "depth"], stops = [];
    svg("text", {x: 0, y: 11}, root, rows.around ? `${spec.y} (${rows.around})` : spec.y);
    const every = Math.max(1, Math.ceil((Math.max(...columns.names.map(n => n.length)) * 6.5 + 5) / cell));
    columns.names.forEach((name, j) => j % every || svg("text", {x: left + (j + .5) * cell, y: top + tall * rows.names.length + 14, "text-anchor": "middle"}, root, name));
    svg("text", {x: left + cell * columns.names.length, y: height - 5, "text-anchor": "end"}, root, columns.around ? `${spec.x} (${columns.around})` : spec.x);
    spec.values.forEach((values, i) => {
      if (i % Math.max(1, Math.ceil(13 / tall)) === 0)
        svg("text", {x: left - 6, y: top + (i + .5) * tall + 4, "text-anchor": "end"}, root, rows.names[i]);
      values.forEach((v, j) => {
        const rgb = v === null ? [128, 128, 128] : table[Math.round(clamp((v - spec.low) / (spec.high - spec.low), 0, 1) * 255)];
        svg("rect", {x: left + j * cell, y: top + i * tall, width: cell - 1, height: tall - 1, rx: 2, fill: css(rgb)}, root);
        const dark = rgb[0] * .3 + rgb[1] * .59 + rgb[2] * .11 < 140;
        if (cell >= Math.max(24, longest * 5.8)) svg("text", {x: left + (j + .5) * cell - .5, y: top + (i + .5) * tall + 3, "text-anchor": "middle", style: `font-size: 10px; fill: ${dark ? "#fff" : "#111"}`}, root, v === null ? "" : write(v));
        stops.push({x: left + (j + .5) * cell, y: top + (i + .5) * tall, box: [cell, tall], text: `${spec.rows[i]} × ${spec.columns[j]}: ${say(v)}`});
      });
    });
    stops.across = columns.names.length;
    return stops;
  },
  paths(root, spec, width) {
    const side = Math.min(width - 56, 340), margin = {left: 46, right: width - 46 - side, top: 22, bottom: 34}, height = margin.top + side + margin.bottom;
    root.setAttribute("height", height);
    const [low, high] = ends(-spec.reach, spec.reach, 4);
    const x = linear(low, high, margin.left, margin.left + side), y = linear(low, high, margin.top, margin.top + side), stops = [];
    axes(root, width, height, margin, y, "row");
    const found = ticks(low, high, 4), write = ruled(found);
    for (const tick of found) {
      svg("line", {class: "axis", x1: x(tick), x2: x(tick), y1: margin.top, y2: margin.top + side}, root);
      svg("text", {x: x(tick), y: height - margin.bottom + 16, "text-anchor": "middle"}, root, write(tick));
    }
    svg("text", {x: margin.left + side, y: height - 3, "text-anchor": "end"}, root, "column, steps of the grid");
    svg("path", {d: `M${x(0) - 5} ${y(0)}h10M${x(0)} ${y(0) - 5}v10`, stroke: "var(--ink)", "stroke-width": 1.5}, root);
    spec.series.forEach((s, i) => s.paths.forEach((path, head) => {
      if (!path.length) return;
      const colour = lineColour(spec, i), at = path.map(([r, c]) => [x(c), y(r)]), [first, last] = [at[0], at.at(-1)];
      stroke(at, colour, root, 1.4);
      svg("circle", {cx: first[0], cy: first[1], r: 3.2, fill: "none", stroke: colour}, root);
      svg("circle", {cx: last[0], cy: last[1], r: 3.2, fill: colour}, root);
      stops.push({x: last[0], y: last[1], box: [11, 11], text: `${s.name}, head ${head + 1}: from ${path[0].map(say).join(", ")} to ${path.at(-1).map(say).join(", ")}`});
    }));
    return stops;
  },
  scatter(root, spec, width) {
    const height = 300, margin = {left: 46, right: 16, top: 24, bottom: 36};
    root.setAttribute("height", height);
    const points = spec.series.flatMap((s, i) => s.points.map(p => ({...p, series: s.name, colour: tint(spec.series, i)})));
    const count = Math.max(2, width / 110), [x0, x1] = extent(points.map(p => p.x), 0), [y0, y1] = extent(points.map(p => p.y));
    const x = linear(...ends(x0, x1, count), margin.left, width - margin.right);
    const y = linear(...ends(y0, y1, 4), height - margin.bottom - 6, margin.top + 6);
    axes(root, width, height, margin, y, spec.y);
    const found = ticks(x.low, x.high, count), write = ruled(found);
    for (const tick of found) {
      svg("line", {class: "axis", x1: x(tick), x2: x(tick), y1: margin.top, y2: height - margin.bottom}, root);
      svg("text", {x: x(tick), y: height - margin.bottom + 16, "text-anchor": "middle"}, root, write(tick));
    }
    svg("text", {x: width - margin.right, y: height - 3, "text-anchor": "end"}, root, spec.x);
    for (const p of points) svg("circle", {cx: x(p.x), cy: y(p.y), r: 4.5, fill: p.colour}, root);
    // A name goes right of its point, left where it would leave the chart, and above or below where others are.
    const taken = points.map(p => [x(p.x) - 5, y(p.y) - 5, x(p.x) + 5, y(p.y) + 5]);
    for (const p of points) {
      const wide = p.name.length * 6.4, at = [x(p.x), y(p.y)], right = [at[0] + 8, at[1] + 4], left = [at[0] - 8 - wide, at[1] + 4];
      const places = [right, left, ...[-11, 19, -24, 32].flatMap(dy => [[right[0] - 4, at[1] + dy], [left[0] + 4, at[1] + dy]])];
      const boxes = places.map(([a, b]) => [a, b - 9, a + wide, b + 2]).filter(b => b[0] > margin.left - 4 && b[2] < width && b[1] > 12 && b[3] < height - margin.bottom);
      const free = boxes.find(b => taken.every(t => b[2] < t[0] || b[0] > t[2] || b[3] < t[1] || b[1] > t[3]));
      if (!free) continue; // the reading and the table name it
      taken.push(free);
      svg("text", {x: free[0], y: free[3] - 2}, root, p.name);
    }
    return points.map(p => ({x: x(p.x), y: y(p.y), box: [13, 13], text: `${p.name}: ${say(p.x)} ${spec.x}, ${say(p.y)} ${spec.y}` + (spec.series.length > 1 ? ` · ${p.series}` : "")}));
  },
};
function lineColour(spec, i) {
  if (!spec.ordered) return tint(spec.series, i);
  return css(page.colours.depth[Math.round(230 - 200 * i / Math.max(1, spec.series.length - 1))]);
}

function chart(host, spec) {
  const legend = el("div", {class: "legend"});
  if (spec.series && (spec.series.length > 1 || (page.viewers.length && page.viewers[0].models.length > 1)))
    spec.series.forEach((s, i) => legend.append(el("span", {}, el("i", {style: `background: ${lineColour(spec, i)}`}), s.name)));
  const hint = "Point at it or use the arrow keys to read values.", first = !document.querySelector(".reading");
  const root = svg("svg", {tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": `${spec.title}. ${hint}`});
  const reading = el("p", {class: "reading quiet", "aria-live": "polite"}, first ? hint : "");
  host.append(...(legend.children.length ? [legend] : []), root, reading);
  let stops = [], at = -1, cursor = null, drawn = 0;
  function rest(i) {
    if (!stops.length) return;
    at = clamp(i, 0, stops.length - 1);
    const stop = stops[at];
    reading.textContent = stop.text; reading.classList.remove("quiet");
    if (cursor) cursor.remove();
    if (stop.box) cursor = svg("rect", {x: stop.x - stop.box[0] / 2 - 1, y: stop.y - stop.box[1] / 2 - 1, width: stop.box[0] + 1, height: stop.box[1] + 1, fill: "none", stroke: "var(--ink)", "stroke-width": 2, rx: 3}, root);
    else if (stop.x === null || stop.x === undefined) cursor = svg("rect", {x: 0, y: stop.y - stop.band / 2, width: drawn, height: stop.band, rx: 4, fill: "var(--ink)", opacity: .08}, root);
    else cursor = svg("line", {class: "cursor", x1: stop.x, x2: stop.x, y1: 16, y2: root.getAttribute("height") - 30}, root);
  }
  function draw() {
    const width = Math.floor(host.clientWidth);
    if (!width || width === drawn) return;
    drawn = width; cursor = null;
    root.replaceChildren();
    root.setAttribute("width", width); root.style.width = `${width}px`;
    stops = painters[spec.kind](root, spec, width);
    if (at >= 0) rest(at);
  }
  root.addEventListener("pointermove", event => {
    const box = root.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = 0, least = Infinity;
    stops.forEach((stop, i) => {
      const distance = (stop.x == null ? 0 : Math.abs(stop.x - x)) + (stop.y == null ? 0 : Math.abs(stop.y - y));
      if (distance < least) { least = distance; best = i; }
    });
    rest(best);
  });
  root.addEventListener("pointerdown", event => root.dispatchEvent(new PointerEvent("pointermove", event)));
  root.addEventListener("keydown", event => {
    const across = stops.across || 1;
    const move = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -stops.length, End: stops.length}[event.key];
    if (move === undefined) return;
    event.preventDefault();
    rest(at < 0 ? 0 : at + move);
  });
  new ResizeObserver(draw).observe(host);
  draw();
}
