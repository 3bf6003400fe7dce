// A patch of an image, and what every head looks at from there.
async function unpack(id, of, windows) {
  const host = document.getElementById(id), text = host.textContent;
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const nq = of.prefix + of.kept[0] * of.kept[1], split = of.heads * nq * 2;
  const nk = windows ? windows[0].length : of.prefix + of.keys[0] * of.keys[1];
  const numbers = new DataView(buffer), ranges = new Float32Array(split);
  for (let i = 0; i < split; i++) ranges[i] = numbers.getFloat32(4 * i, true);
  return {ranges, levels: new Uint8Array(buffer, 4 * split), nq, nk};
}
// One row of a map: attention of a query to the prefix tokens and to every place (none outside its window).
function attention(of, maps, windows, head, {index, place}) {
  const at = head * maps.nq + index, low = maps.ranges[2 * at], high = maps.ranges[2 * at + 1];
  const row = new Float32Array(of.prefix + of.keys[0] * of.keys[1]), start = at * maps.nk;
  const number = windows && place[0] * of.queries[1] + place[1], window = windows && windows.find(w => w.includes(number));
  for (let k = 0; k < maps.nk; k++) {
    const key = window ? window[k] : k;
    if (key >= 0) row[key] = low + maps.levels[start + k] * (high - low) / 255;
  }
  return {row, of, places: row.subarray(of.prefix), signed: of.signed};
}
function minus(a, b) {
  if (!a || !b || a.row.length !== b.row.length || a.of.keys[0] !== b.of.keys[0]) return null;
  const row = a.row.map((v, k) => v - b.row[k]);
  return {row, of: a.of, places: row.subarray(a.of.prefix), signed: true};
}
// Two digits, always: 0.10, not 0.1.
const twoDigits = value => value && Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(2);
const peak = rows => Math.max(1e-12, ...rows.filter(Boolean).map(r => r.places.reduce((m, v) => Math.max(m, Math.abs(v)), 0)));

function viewer(host, number, data) {
  const {models, layers, images} = data, two = models.length === 2;
  const DIFFERENCE = models.length, base = model => model === DIFFERENCE ? 1 : model;
  const state = {image: 0, layer: Math.floor(layers.length / 2), y: .5, x: .5, token: -1, all: false, shared: false, over: true, pinned: false, head: null};
  const store = new Map(), grey = new Map(), pictures = images.map(image => el("img", {src: image.uri, alt: image.name}));
  let tiles = [], queued = false;

  // Geometry: a place as shares of height and width, so that it means the same on every grid.
  const grid = () => (layers[state.layer].of.find(Boolean) || {queries: [1, 1]}).queries;
  const cell = (share, size) => clamp(Math.floor(share * size), 0, size - 1);
  function query(of) {
    if (state.token >= 0 && state.token < of.prefix) return {index: state.token};
    const at = [cell(state.y, of.queries[0]), cell(state.x, of.queries[1])];
    const kept = at.map((v, i) => clamp(Math.floor(v / data.step[i]), 0, of.kept[i] - 1));
    return {index: of.prefix + kept[0] * of.kept[1] + kept[1], place: kept.map((v, i) => of.first[i] + v * data.step[i])};
  }
  const cut = of => of.windows === null ? null : data.windows[of.windows];
  function maps(layer, model) {
    const of = layers[layer].of[model];
    if (!of) return null;
    const id = `maps-${number}-${of.maps}-${state.image}`;
    if (!store.has(id)) {
      store.set(id, null);
      unpack(id, of, cut(of)).then(found => { store.set(id, found); later(); });
    }
    return store.get(id);
  }
  function row(layer, model, head) {
    if (model === DIFFERENCE) return minus(row(layer, 1, head), row(layer, 0, head));
    const of = layers[layer].of[model], found = maps(layer, model);
    return of && found && head < of.heads ? attention(of, found, cut(of), head, query(of)) : null;
  }

  // Controls
  const controls = el("div", {class: "controls"}), bench = el("div", {class: "bench"});
  function choices(name, list, at, choose, extra = "") {
    const box = el("div", {class: `choices ${extra}`});
    list.forEach((content, i) => {
      const input = el("input", {type: "radio", name: `${name}-${number}`, checked: i === at});
      if (typeof content !== "string") input.setAttribute("aria-label", content.alt);
      input.addEventListener("change", () => { choose(i); update(); });
      box.append(el("label", {}, input, content));
    });
    const group = el("fieldset", {class: "control"}, el("legend", {class: "name"}, name), box);
    controls.append(group);
    return group;
  }
  const slider = el("input", {type: "range", min: "0", max: String(layers.length - 1), value: String(state.layer), "aria-label": "Layer"});
  const layerName = el("output", {});
  controls.append(el("label", {class: "control layer"}, el("span", {class: "name"}, "Layer"), layerName, slider));
  slider.addEventListener("input", () => { state.layer = +slider.value; state.head = null; update(); });
  if (images.length > 1) choices("Image", images.map(i => el("img", {src: i.uri, alt: i.name})), 0, i => { state.image = i; }, "pictures");
  choices("Show", ["One layer", "All layers"], 0, i => { state.all = i === 1; });
  choices("Colours", ["Each map", "One scale"], 0, i => { state.shared = i === 1; });
  choices("Draw", ["Over image", "Map alone"], 0, i => { state.over = i === 0; });
  const prefix = Math.max(...layers.flatMap(l => l.of.map(o => o ? o.prefix : 0)));
  if (prefix) choices("Look from", ["A patch", ...Array.from({length: prefix}, (_, i) => prefix === 1 ? "Class token" : `Token ${i + 1}`)], 0, i => { state.token = i - 1; });

  // The picture
  const canvas = el("canvas", {tabindex: "0", role: "application", "aria-roledescription": "patch picker", class: "pick"});
  const readout = el("p", {class: "readout", "aria-live": "polite"});
  const keys = el("p", {class: "keys"});
  for (const part of ["Click", " holds the patch. ", "←↑→↓", " move it, ", "[", " ", "]", " change the layer, ", "Esc", " lets go."])
    keys.append("Click ←↑→↓ [ ] Esc".split(" ").includes(part) ? el("kbd", {}, part) : part);
  const strength = el("canvas", {width: 256, height: 1, "aria-hidden": "true"}), ends = [el("span"), el("span")];
  const scale = el("div", {class: "scale"}, ends[0], strength, ends[1]);
  bench.append(el("div", {class: "picture"}, canvas, readout, scale, keys), controls, el("div", {class: "heads"}));
  host.append(bench);
  const panel = bench.lastChild;

  function greyed() {
    if (grey.has(state.image)) return grey.get(state.image);
    const picture = pictures[state.image], [h, w] = images[state.image].size;
    if (!picture.complete || !picture.naturalWidth) { picture.onload = later; return null; }
    const c = el("canvas", {width: w, height: h}), g = c.getContext("2d");
    g.drawImage(picture, 0, 0);
    const pixels = g.getImageData(0, 0, w, h), p = pixels.data;
    for (let i = 0; i < p.length; i += 4) p[i] = p[i + 1] = p[i + 2] = 18 + .5 * (p[i] * .3 + p[i + 1] * .59 + p[i + 2] * .11);
    g.putImageData(pixels, 0, 0);
    grey.set(state.image, c);
    return c;
  }
  function paint(g, found, top, width, height) {
    const [h, w] = found.of.keys, small = el("canvas", {width: w, height: h}), pen = small.getContext("2d"), pixels = pen.createImageData(w, h);
    const table = page.colours[found.signed ? "split" : "heat"];
    for (let k = 0; k < h * w; k++) {
      const t = clamp(found.places[k] / top, -1, 1), rgb = table[Math.round(255 * (found.signed ? (t + 1) / 2 : Math.max(t, 0)))];
      pixels.data.set([...rgb, state.over ? 255 * .92 * Math.sqrt(Math.abs(t)) : 255], 4 * k);
    }
    pen.putImageData(pixels, 0, 0);
    g.imageSmoothingEnabled = false;
    g.drawImage(small, 0, 0, width, height);
  }
  function box(g, of, width, height, line) {
    const at = query(of).place;
    if (!at) return;
    const ch = height / of.queries[0], cw = width / of.queries[1], inset = line / 2;
    for (const [colour, size] of [["#000c", line * 2], ["#fff", line]]) {
      g.strokeStyle = colour; g.lineWidth = size;
      g.strokeRect(at[1] * cw + inset, at[0] * ch + inset, Math.max(cw - line, line), Math.max(ch - line, line));
    }
  }
  function drawTile(tile, top) {
    const found = row(tile.layer, tile.model, tile.head), of = layers[tile.layer].of[base(tile.model)];
    const [h, w] = of.keys, [ih, iw] = images[state.image].size, wide = state.all ? 72 : 168;
    const width = w * Math.max(1, Math.round(wide / w)), height = Math.round(width * ih / iw);
    if (tile.canvas.width !== width || tile.canvas.height !== height) { tile.canvas.width = width; tile.canvas.height = height; }
    const g = tile.canvas.getContext("2d"), under = greyed();
    g.clearRect(0, 0, width, height);
    if (state.over && under) { g.imageSmoothingEnabled = true; g.drawImage(under, 0, 0, width, height); }
    if (!found) return;
    const own = top || peak([found]);
    paint(g, found, own, width, height);
    box(g, of, width, height, state.all ? 1.5 : 2);
    tile.peak.textContent = tile.model === DIFFERENCE ? `± ${twoDigits(own)}` : `max ${twoDigits(peak([found]))}`;
  }
  function drawPicture() {
    const [h, w] = images[state.image].size, times = Math.max(1, Math.round(640 / Math.max(h, w))), g = canvas.getContext("2d");
    canvas.width = w * times; canvas.height = h * times;
    const chosen = state.head && row(state.layer, state.head.model, state.head.head), under = chosen && greyed();
    g.imageSmoothingEnabled = false;
    if (pictures[state.image].complete) g.drawImage(under || pictures[state.image], 0, 0, canvas.width, canvas.height);
    else pictures[state.image].onload = later;
    if (chosen) paint(g, chosen, peak([chosen]), canvas.width, canvas.height);
    const of = layers[state.layer].of.find(Boolean);
    if (of) box(g, of, canvas.width, canvas.height, 4);
    const table = page.colours[chosen && chosen.signed ? "split" : "heat"], pen = strength.getContext("2d");
    table.forEach((rgb, i) => { pen.fillStyle = css(rgb); pen.fillRect(i, 0, 1, 1); });
    ends[0].textContent = chosen && chosen.signed ? "negative" : "0";
    ends[1].textContent = state.shared ? "strongest shown" : "strongest of the map";
  }
  function title(model) { return model === DIFFERENCE ? `${models[1]} minus ${models[0]}` : models[model]; }
  function place(of) {
    const at = query(of).place;
    return at ? `row ${at[0] + 1}, column ${at[1] + 1} of ${of.queries.join(" × ")}` : prefix === 1 ? "the class token" : `token ${state.token + 1}`;
  }
  function tell(tile = state.head, key = null) {
    const of = layers[state.layer].of.find(Boolean);
    if (!of) return;
    const lines = [el("b", {}, `From ${place(of)}`), state.pinned ? " (held). " : ". "];
    const layer = tile ? tile.layer : state.layer, own = tile && layers[layer].of[base(tile.model)];
    if (tile && key === null) lines.push(`Head ${tile.head + 1} of ${layers[layer].name}`);
    if (tile && key !== null) {
      lines.push(`Head ${tile.head + 1} looks at row ${Math.floor(key / own.keys[1]) + 1}, column ${key % own.keys[1] + 1} with `);
      lines.push(models.map((name, m) => { const r = row(layer, m, tile.head); return r && key < r.places.length ? `${say(r.places[key])}${models.length > 1 ? ` (${name})` : ""}` : null; }).filter(Boolean).join(", "));
    }
    const rest = tile && tile.model !== DIFFERENCE && row(layer, tile.model, tile.head);
    if (rest && of.prefix) lines.push(`; ${say(+rest.row.slice(0, rest.of.prefix).reduce((a, b) => a + b, 0).toPrecision(3))} goes to class and register tokens`);
    if (rest && rest.of.padded) lines.push(`; ${say(+Math.max(0, 1 - rest.row.reduce((a, b) => a + b, 0)).toPrecision(2))} goes to the padding`);
    const said = images[state.image].said;
    if (!tile && said.some(Boolean)) lines.push(models.map((m, i) => said[i] ? `${m} says ${said[i]}` : "").filter(Boolean).join("; ") + ".");
    else if (tile) lines.push(".");
    readout.replaceChildren(...lines);
  }
  function makeTile(layer, model, head, gates) {
    const peakText = el("i", {style: "font-style: normal"}), picture = el("canvas"), label = `head ${head + 1}, ${layers[layer].name}, ${title(model)}`;
    const name = gates && gates[head] !== null && model !== DIFFERENCE ? `${head + 1} · gate ${gates[head].toFixed(2)}` : `head ${head + 1}`;
    const node = el("button", {class: "tile", type: "button", "aria-pressed": "false", "aria-label": label}, picture, el("span", {}, el("b", {}, name), peakText));
    const tile = {layer, model, head, node, canvas: picture, peak: peakText};
    node.dataset.tile = `${layer}-${model}-${head}`;
    node.addEventListener("click", () => {
      const same = state.head && state.head.layer === layer && state.head.model === model && state.head.head === head;
      state.head = same ? null : tile; state.layer = layer; slider.value = layer;
      update();
    });
    node.addEventListener("pointermove", event => {
      const of = layers[layer].of[base(model)], b = picture.getBoundingClientRect();
      const r = cell((event.clientY - b.top) / b.height, of.keys[0]), c = cell((event.clientX - b.left) / b.width, of.keys[1]);
      tell(tile, r * of.keys[1] + c);
    });
    node.addEventListener("pointerleave", () => tell());
    return tile;
  }
  function build() {
    panel.replaceChildren(); tiles = [];
    panel.classList.toggle("all", state.all);
    const alike = layer => two && layers[layer].of.every(Boolean) && String(layers[layer].of[0].keys) === String(layers[layer].of[1].keys) && layers[layer].of[0].prefix === layers[layer].of[1].prefix;
    const shown = state.all ? layers.map((_, i) => i) : [state.layer], names = short(layers.map(l => l.name)).names;
    const without = [];
    for (const model of two && shown.some(alike) ? [0, 1, DIFFERENCE] : models.map((_, i) => i)) {
      const section = el("div", {class: "row"}), with_ = shown.filter(l => model === DIFFERENCE ? alike(l) : layers[l].of[model]);
      if (state.all && !with_.length) { without.push(title(model)); continue; }
      section.append(el("h3", {}, el("i", {class: "dot", style: `background: ${model === DIFFERENCE ? "var(--quiet)" : hue(model)}`}), title(model)));
      if (!with_.length) section.append(el("p", {class: "quiet"}, `${title(model)} has no attention here that can be drawn.`));
      for (const layer of with_) {
        const of = layers[layer].of[base(model)], box_ = el("div", {class: "tiles"});
        if (state.all) { box_.append(el("b", {}, names[layer])); section.style.setProperty("--heads", Math.max(...with_.map(l => layers[l].of[base(model)].heads))); }
        for (let head = 0; head < of.heads; head++) {
          if (model === DIFFERENCE && head >= layers[layer].of[0].heads) break;
          const tile = makeTile(layer, model, head, of.gates);
          tiles.push(tile); box_.append(tile.node);
        }
        section.append(box_);
      }
      section.style.setProperty("--tile", with_.length && layers[with_[0]].of[base(model)].heads <= 6 ? "8.6rem" : "6.2rem");
      panel.append(section);
    }
    if (without.length) panel.lastChild.append(el("p", {class: "quiet"}, `${without.join(" and ")} has no attention that can be drawn.`));
  }
  let built = "";
  function update() {
    layerName.textContent = `${layers[state.layer].name} (${state.layer + 1} of ${layers.length})`;
    slider.setAttribute("aria-valuetext", layers[state.layer].name);
    const wanted = state.all ? "all" : `layer ${state.layer}`;
    if (wanted !== built) { built = wanted; build(); }
    later(); tell();
  }
  function redraw() {
    queued = false;
    const rowOf = t => row(t.layer, t.model, t.head);
    const top = state.shared ? [false, true].map(kind => peak(tiles.filter(t => (t.model === DIFFERENCE) === kind).map(rowOf))) : [0, 0];
    for (const tile of tiles) {
      drawTile(tile, top[tile.model === DIFFERENCE ? 1 : 0]);
      tile.node.setAttribute("aria-pressed", String(Boolean(state.head) && state.head.layer === tile.layer && state.head.model === tile.model && state.head.head === tile.head));
    }
    drawPicture();
    canvas.setAttribute("aria-label", `${images[state.image].name}. The arrow keys move the patch that attention is looked at from.`);
    host.dataset.ready = [...store.values()].every(Boolean) ? "yes" : "no";
  }
  function later() { if (!queued) { queued = true; host.dataset.ready = "no"; requestAnimationFrame(redraw); } }
  function go(y, x) { state.y = clamp(y, 0, .9999); state.x = clamp(x, 0, .9999); if (state.token >= 0) { state.token = -1; controls.querySelector(`[name="Look from-${number}"]`).checked = true; } later(); tell(); }
  const from = event => { const b = canvas.getBoundingClientRect(); go((event.clientY - b.top) / b.height, (event.clientX - b.left) / b.width); };
  canvas.addEventListener("pointermove", event => { if (!state.pinned || event.buttons || event.pointerType === "touch") from(event); });
  canvas.addEventListener("click", event => { state.pinned = !state.pinned || event.pointerType === "touch"; from(event); });
  canvas.addEventListener("keydown", event => {
    const [rows, columns] = grid(), move = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (move) {
      const at = [cell(state.y, rows) + move[0] * data.step[0], cell(state.x, columns) + move[1] * data.step[1]];
      state.pinned = true;
      go((clamp(at[0], 0, rows - 1) + .5) / rows, (clamp(at[1], 0, columns - 1) + .5) / columns);
    } else if (event.key === "[" || event.key === "]") {
      state.layer = clamp(state.layer + (event.key === "]" ? 1 : -1), 0, layers.length - 1);
      slider.value = state.layer; state.head = null; update();
    } else if (event.key === "Escape") { state.pinned = false; state.head = null; later(); tell(); } else return;
    event.preventDefault();
  });
  update();
}
