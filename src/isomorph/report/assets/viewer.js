// The attention viewer: a patch of an image, and what every head attends to from there.
const ONE_LAYER_TILE = 168, ALL_LAYERS_TILE = 72;
const MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};

/** The cell that a share of the image's height or width falls into. */
const cellAt = (share, size) => clamp(Math.floor(share * size), 0, size - 1);

class AttentionViewer {
  constructor(host, number, data) {
    Object.assign(this, {host, number, ...data, tiles: [], queued: false, built: "", grey: new Map()});
    this.two = this.models.length === 2;
    this.DIFFERENCE = this.models.length;
    this.prefix = Math.max(...this.layers.flatMap(l => l.of.map(o => o ? o.prefix : 0)));
    this.pictures = this.images.map(image => el("img", {src: image.uri, alt: image.name}));
    this.state = {
      image: 0, layer: Math.floor(this.layers.length / 2), y: .5, x: .5, token: -1,
      all: false, shared: false, over: true, pinned: false, head: null,
    };
    this.store = new MapStore(number, data, () => this.later());
    this.buildBench();
    this.buildControls();
    this.listen();
    this.update();
  }

  // What is looked at: positions are shares of height and width, so that they mean the same on every grid.

  get firstLayer() {
    return this.layers[this.state.layer].of.find(Boolean);
  }

  base(model) {
    return model === this.DIFFERENCE ? 1 : model;
  }

  title(model) {
    return model === this.DIFFERENCE ? `${this.models[1]} minus ${this.models[0]}` : this.models[model];
  }

  /** The query on one layer's grid: its index among the stored rows, and its row and column. */
  query(of) {
    const {token, y, x} = this.state;
    if (token >= 0 && token < of.prefix) return {index: token};
    const at = [cellAt(y, of.queries[0]), cellAt(x, of.queries[1])];
    const kept = at.map((v, i) => clamp(Math.floor(v / this.step[i]), 0, of.kept[i] - 1));
    const place = kept.map((v, i) => of.first[i] + v * this.step[i]);
    return {index: of.prefix + kept[0] * of.kept[1] + kept[1], place};
  }

  row(layer, model, head) {
    if (model === this.DIFFERENCE) return rowDifference(this.row(layer, 1, head), this.row(layer, 0, head));
    const of = this.layers[layer].of[model];
    return of ? this.store.row(layer, model, head, this.state.image, this.query(of)) : null;
  }

  // The parts of the viewer: image, controls, heads.

  buildBench() {
    const picker = {tabindex: "0", role: "application", "aria-roledescription": "patch picker", class: "pick"};
    this.canvas = el("canvas", picker);
    this.readout = el("p", {class: "readout", "aria-live": "polite"});
    this.strength = el("canvas", {width: 256, height: 1, "aria-hidden": "true"});
    this.ends = [el("span"), el("span")];
    this.controls = el("div", {class: "controls"});
    this.panel = el("div", {class: "heads"});
    const scale = el("div", {class: "scale"}, this.ends[0], this.strength, this.ends[1]);
    const picture = el("div", {class: "picture"}, this.canvas, this.readout, scale, this.keyHints());
    this.host.append(el("div", {class: "bench"}, picture, this.controls, this.panel));
  }

  keyHints() {
    const key = name => el("kbd", {}, name), keys = el("p", {class: "keys"});
    keys.append(key("Click"), " holds the patch. ", key("←↑→↓"), " move it, ");
    keys.append(key("["), " ", key("]"), " change the layer, ", key("Esc"), " lets go.");
    return keys;
  }

  choices(name, list, choose, extra = "") {
    const box = el("div", {class: `choices ${extra}`});
    list.forEach((content, i) => {
      const input = el("input", {type: "radio", name: `${name}-${this.number}`, checked: i === 0});
      if (typeof content !== "string") input.setAttribute("aria-label", content.alt);
      input.addEventListener("change", () => { choose(i); this.update(); });
      box.append(el("label", {}, input, content));
    });
    this.controls.append(el("fieldset", {class: "control"}, el("legend", {class: "name"}, name), box));
  }

  buildControls() {
    const {state, layers, images, prefix} = this, last = String(layers.length - 1);
    this.slider = el("input", {type: "range", min: "0", max: last, value: String(state.layer), "aria-label": "Layer"});
    this.layerName = el("output", {});
    const name = el("span", {class: "name"}, "Layer");
    this.controls.append(el("label", {class: "control layer"}, name, this.layerName, this.slider));
    const thumbs = images.map(i => el("img", {src: i.uri, alt: i.name}));
    if (images.length > 1) this.choices("Image", thumbs, i => { state.image = i; }, "pictures");
    this.choices("Show", ["One layer", "All layers"], i => { state.all = i === 1; });
    this.choices("Colours", ["Each map", "One scale"], i => { state.shared = i === 1; });
    this.choices("Draw", ["Over image", "Map alone"], i => { state.over = i === 0; });
    const tokens = Array.from({length: prefix}, (_, i) => prefix === 1 ? "Class token" : `Token ${i + 1}`);
    if (prefix) this.choices("Look from", ["A patch", ...tokens], i => { state.token = i - 1; });
  }

  // Drawing

  greyed() {
    const {image} = this.state, picture = this.pictures[image];
    if (this.grey.has(image)) return this.grey.get(image);
    if (!picture.complete || !picture.naturalWidth) { picture.onload = () => this.later(); return null; }
    this.grey.set(image, greyImage(picture, this.images[image].size));
    return this.grey.get(image);
  }

  frame(pen, of, width, height, line) {
    const {place} = this.query(of);
    if (place) framePatch(pen, place, of.queries, width, height, line);
  }

  drawTile(tile, top) {
    const {state} = this, found = this.row(tile.layer, tile.model, tile.head);
    const of = this.layers[tile.layer].of[this.base(tile.model)], [, w] = of.keys;
    const [ih, iw] = this.images[state.image].size;
    const wide = state.all ? ALL_LAYERS_TILE : ONE_LAYER_TILE, {canvas} = tile;
    const width = w * Math.max(1, Math.round(wide / w)), height = Math.round(width * ih / iw);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
    const pen = canvas.getContext("2d"), under = this.greyed();
    pen.clearRect(0, 0, width, height);
    if (state.over && under) { pen.imageSmoothingEnabled = true; pen.drawImage(under, 0, 0, width, height); }
    if (!found) return;
    const own = top || peakOf([found]);
    paintRow(pen, found, own, width, height, state.over);
    this.frame(pen, of, width, height, state.all ? 1.5 : 2);
    const difference = tile.model === this.DIFFERENCE;
    tile.peak.textContent = difference ? `± ${twoDigits(own)}` : `max ${twoDigits(peakOf([found]))}`;
  }

  drawPicture() {
    const {state, canvas} = this, [h, w] = this.images[state.image].size, picture = this.pictures[state.image];
    const times = Math.max(1, Math.round(640 / Math.max(h, w))), pen = canvas.getContext("2d");
    Object.assign(canvas, {width: w * times, height: h * times});
    const chosen = state.head && this.row(state.layer, state.head.model, state.head.head);
    const under = chosen && this.greyed(), size = [canvas.width, canvas.height];
    const signed = Boolean(chosen && chosen.signed);
    pen.imageSmoothingEnabled = false;
    if (picture.complete) pen.drawImage(under || picture, 0, 0, ...size);
    else picture.onload = () => this.later();
    if (chosen) paintRow(pen, chosen, peakOf([chosen]), ...size, state.over);
    if (this.firstLayer) this.frame(pen, this.firstLayer, ...size, 4);
    paintColourBar(this.strength, signed);
    this.ends[0].textContent = signed ? "negative" : "0";
    this.ends[1].textContent = state.shared ? "strongest shown" : "strongest of the map";
  }

  redraw() {
    this.queued = false;
    const {tiles, state, DIFFERENCE} = this, chosen = state.head;
    const rowOf = tile => this.row(tile.layer, tile.model, tile.head);
    const rows = kind => tiles.filter(t => (t.model === DIFFERENCE) === kind).map(rowOf);
    const top = state.shared ? [false, true].map(kind => peakOf(rows(kind))) : [0, 0];
    for (const tile of tiles) {
      this.drawTile(tile, top[tile.model === DIFFERENCE ? 1 : 0]);
      tile.node.setAttribute("aria-pressed", String(Boolean(chosen) && this.same(chosen, tile)));
    }
    this.drawPicture();
    const hint = "The arrow keys move the patch that attention is looked at from.";
    this.canvas.setAttribute("aria-label", `${this.images[state.image].name}. ${hint}`);
    this.host.dataset.ready = this.store.complete ? "yes" : "no";
  }

  /** Redraw in the next frame, once. */
  later() {
    if (this.queued) return;
    this.queued = true;
    this.host.dataset.ready = "no";
    requestAnimationFrame(() => this.redraw());
  }

  same(a, b) {
    return a.layer === b.layer && a.model === b.model && a.head === b.head;
  }

  // The heads

  makeTile(layer, model, head, gates) {
    const gated = gates && gates[head] !== null && model !== this.DIFFERENCE;
    const name = gated ? `${head + 1} · gate ${gates[head].toFixed(2)}` : `head ${head + 1}`;
    const peak = el("i", {style: "font-style: normal"}), canvas = el("canvas");
    const label = `head ${head + 1}, ${this.layers[layer].name}, ${this.title(model)}`;
    const about = {class: "tile", type: "button", "aria-pressed": "false", "aria-label": label};
    const node = el("button", about, canvas, el("span", {}, el("b", {}, name), peak));
    const tile = {layer, model, head, node, canvas, peak}, {state} = this;
    node.dataset.tile = `${layer}-${model}-${head}`;
    node.addEventListener("click", () => {
      state.head = state.head && this.same(state.head, tile) ? null : tile;
      state.layer = layer; this.slider.value = layer;
      this.update();
    });
    node.addEventListener("pointermove", event => {
      const of = this.layers[layer].of[this.base(model)], b = canvas.getBoundingClientRect();
      const r = cellAt((event.clientY - b.top) / b.height, of.keys[0]);
      this.tell(tile, r * of.keys[1] + cellAt((event.clientX - b.left) / b.width, of.keys[1]));
    });
    node.addEventListener("pointerleave", () => this.tell());
    return tile;
  }

  /** Whether both models have maps of one shape there, so that their difference can be drawn. */
  comparable(layer) {
    const [a, b] = this.layers[layer].of;
    return this.two && Boolean(a) && Boolean(b) && String(a.keys) === String(b.keys) && a.prefix === b.prefix;
  }

  tilesOf(layer, model) {
    const {of} = this.layers[layer], own = of[this.base(model)], difference = model === this.DIFFERENCE;
    const heads = difference ? Math.min(own.heads, of[0].heads) : own.heads;
    return Array.from({length: heads}, (_, head) => this.makeTile(layer, model, head, own.gates));
  }

  buildSection(model, shown, names) {
    const {state} = this, heads = l => this.layers[l].of[this.base(model)].heads;
    const colour = model === this.DIFFERENCE ? "var(--quiet)" : hue(model);
    const dot = el("i", {class: "dot", style: `background: ${colour}`});
    const section = el("div", {class: "row"}, el("h3", {}, dot, this.title(model)));
    const missing = `${this.title(model)} has no attention here that can be drawn.`;
    if (!shown.length) section.append(el("p", {class: "quiet"}, missing));
    if (state.all) section.style.setProperty("--heads", Math.max(...shown.map(heads)));
    for (const layer of shown) {
      const tiles = this.tilesOf(layer, model), box = el("div", {class: "tiles"});
      if (state.all) box.append(el("b", {}, names[layer]));
      box.append(...tiles.map(tile => tile.node));
      this.tiles.push(...tiles);
      section.append(box);
    }
    section.style.setProperty("--tile", shown.length && heads(shown[0]) <= 6 ? "8.6rem" : "6.2rem");
    return section;
  }

  buildHeads() {
    const {state, layers, DIFFERENCE} = this, without = [];
    const wanted = state.all ? layers.map((_, i) => i) : [state.layer], names = short(layers.map(l => l.name)).names;
    const both = this.two && wanted.some(l => this.comparable(l));
    this.tiles = [];
    this.panel.replaceChildren();
    this.panel.classList.toggle("all", state.all);
    for (const model of both ? [0, 1, DIFFERENCE] : this.models.map((_, i) => i)) {
      const shown = wanted.filter(l => model === DIFFERENCE ? this.comparable(l) : layers[l].of[model]);
      if (state.all && !shown.length) without.push(this.title(model));
      else this.panel.append(this.buildSection(model, shown, names));
    }
    const missing = `${without.join(" and ")} has no attention that can be drawn.`;
    if (without.length) this.panel.lastChild.append(el("p", {class: "quiet"}, missing));
  }

  // Words

  placeText(of) {
    const {place} = this.query(of);
    if (place) return `row ${place[0] + 1}, column ${place[1] + 1} of ${of.queries.join(" × ")}`;
    return this.prefix === 1 ? "the class token" : `token ${this.state.token + 1}`;
  }

  /** The values of one key in all models. */
  valuesText(layer, head, key) {
    const value = (name, m) => {
      const found = this.row(layer, m, head);
      if (!found || key >= found.places.length) return null;
      return `${say(found.places[key])}${this.models.length > 1 ? ` (${name})` : ""}`;
    };
    return this.models.map(value).filter(Boolean).join(", ");
  }

  /** Where the rest of a row goes: to the prefix tokens, to the padding. */
  restText(tile, of) {
    const rest = tile.model !== this.DIFFERENCE && this.row(tile.layer, tile.model, tile.head);
    if (!rest) return "";
    const sum = values => values.reduce((a, b) => a + b, 0);
    const tokens = +sum(rest.row.slice(0, rest.of.prefix)).toPrecision(3);
    const padding = +Math.max(0, 1 - sum(rest.row)).toPrecision(2);
    return (of.prefix ? `; ${say(tokens)} goes to class and register tokens` : "") +
      (rest.of.padded ? `; ${say(padding)} goes to the padding` : "");
  }

  tell(tile = this.state.head, key = null) {
    const of = this.firstLayer;
    if (!of) return;
    const lines = [el("b", {}, `From ${this.placeText(of)}`), this.state.pinned ? " (held). " : ". "];
    const said = this.images[this.state.image].said;
    if (!tile && said.some(Boolean))
      lines.push(this.models.map((m, i) => said[i] ? `${m} says ${said[i]}` : "").filter(Boolean).join("; ") + ".");
    if (tile && key === null) lines.push(`Head ${tile.head + 1} of ${this.layers[tile.layer].name}`);
    if (tile && key !== null) {
      const columns = this.layers[tile.layer].of[this.base(tile.model)].keys[1];
      const at = `row ${Math.floor(key / columns) + 1}, column ${key % columns + 1}`;
      lines.push(`Head ${tile.head + 1} looks at ${at} with ${this.valuesText(tile.layer, tile.head, key)}`);
    }
    if (tile) lines.push(`${this.restText(tile, of)}.`);
    this.readout.replaceChildren(...lines);
  }

  // Events

  update() {
    const {state, layers} = this, wanted = state.all ? "all" : `layer ${state.layer}`;
    this.layerName.textContent = `${layers[state.layer].name} (${state.layer + 1} of ${layers.length})`;
    this.slider.setAttribute("aria-valuetext", layers[state.layer].name);
    if (wanted !== this.built) { this.built = wanted; this.buildHeads(); }
    this.later();
    this.tell();
  }

  /** Look from another position of the image. */
  go(y, x) {
    const {state} = this;
    Object.assign(state, {y: clamp(y, 0, .9999), x: clamp(x, 0, .9999)});
    if (state.token >= 0) {
      state.token = -1;
      this.controls.querySelector(`[name="Look from-${this.number}"]`).checked = true;
    }
    this.later();
    this.tell();
  }

  changeLayer(layer) {
    Object.assign(this.state, {layer: clamp(layer, 0, this.layers.length - 1), head: null});
    this.slider.value = this.state.layer;
    this.update();
  }

  movePatch([down, right]) {
    const {state, step} = this, [rows, columns] = (this.firstLayer || {queries: [1, 1]}).queries;
    const at = [cellAt(state.y, rows) + down * step[0], cellAt(state.x, columns) + right * step[1]];
    state.pinned = true;
    this.go((clamp(at[0], 0, rows - 1) + .5) / rows, (clamp(at[1], 0, columns - 1) + .5) / columns);
  }

  letGo() {
    Object.assign(this.state, {pinned: false, head: null});
    this.later();
    this.tell();
  }

  listen() {
    const {state, canvas} = this, touch = event => event.pointerType === "touch";
    const from = event => {
      const b = canvas.getBoundingClientRect();
      this.go((event.clientY - b.top) / b.height, (event.clientX - b.left) / b.width);
    };
    this.slider.addEventListener("input", () => this.changeLayer(+this.slider.value));
    canvas.addEventListener("pointermove", event => {
      if (!state.pinned || event.buttons || touch(event)) from(event);
    });
    canvas.addEventListener("click", event => { state.pinned = !state.pinned || touch(event); from(event); });
    canvas.addEventListener("keydown", event => {
      if (MOVES[event.key]) this.movePatch(MOVES[event.key]);
      else if (event.key === "[" || event.key === "]") this.changeLayer(state.layer + (event.key === "]" ? 1 : -1));
      else if (event.key === "Escape") this.letGo();
      else return;
      event.preventDefault();
    });
  }
}
