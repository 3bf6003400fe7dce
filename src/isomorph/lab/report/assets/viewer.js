// The attention viewer: a query on an image, and what every head attends to from there.

const ARROW_MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};

class AttentionViewer {
  /** Build the viewer of a page's data inside an element. */
  constructor(host, number, data) {
    Object.assign(this, {host, number, ...data, tiles: [], shownLayers: "", greyImages: new Map()});
    this.redrawPending = false;
    const prefixOf = geometry => geometry ? geometry.prefix : 0;
    this.prefix = Math.max(...this.layers.flatMap(layer => layer.byModel.map(prefixOf)));
    this.photos = this.images.map(i => createElement("img", {src: i.uri, alt: i.name}));
    this.state = {
      // The query: a token, or for -1 a point as shares of height and width, equal on all grids.
      token: -1, y: .5, x: .5, pinned: false,
      image: 0, layer: Math.floor(this.layers.length / 2), tile: null,
      allLayers: false, sharedScale: false, logarithmic: false, overlay: true,
    };
    this.store = new MapStore(number, data, () => this.requestRedraw());
    this.buildLayout();
    this.buildControls();
    this.addListeners();
    this.update();
  }

  // Models are numbered; one more number stands for the difference of two models.

  /** True if a number stands for the difference of two models. */
  isDifference(model) {
    return model === this.models.length;
  }

  /** Return the name of a model, or of the difference. */
  modelName(model) {
    if (this.isDifference(model)) return `${this.models[1]} minus ${this.models[0]}`;
    return this.models[model];
  }

  /** Return the geometry of a layer in a model; that of the second model for the difference. */
  geometry(layer, model) {
    return this.layers[layer].byModel[this.isDifference(model) ? 1 : model];
  }

  /** Return the geometry of the current layer in the first model that has it. */
  get currentGeometry() {
    return this.layers[this.state.layer].byModel.find(Boolean);
  }

  /** Return the query on a layer's grid: its index among the stored rows, and its position. */
  query({prefix, queries, stored, first}) {
    const {token, y, x} = this.state;
    if (token >= 0 && token < prefix) return {index: token};
    const cell = [cellAt(y, queries[0]), cellAt(x, queries[1])];
    const block = cell.map((v, i) => clamp(Math.floor(v / this.step[i]), 0, stored[i] - 1));
    const position = block.map((v, i) => first[i] + v * this.step[i]);
    return {index: prefix + block[0] * stored[1] + block[1], position};
  }

  /** Return what a head attends to from the query, null while its map is not unpacked. */
  row(layer, model, head) {
    if (this.isDifference(model)) {
      const row = subtractRows(this.row(layer, 1, head), this.row(layer, 0, head));
      const exact = exactDifference(this.layers[layer], this.state.image, head);
      if (row && exact !== null && equalBound([exact], this.equalBounds)) row.floor = Infinity;
      return row;
    }
    const geometry = this.geometry(layer, model);
    if (!geometry) return null;
    return this.store.row(layer, model, head, this.state.image, this.query(geometry));
  }

  // Building the elements

  /** Build the image with its readout and colour bar, and the boxes of controls and heads. */
  buildLayout() {
    const picker = {class: "pick", tabindex: "0", role: "application"};
    this.canvas = createElement("canvas", {...picker, "aria-roledescription": "patch picker"});
    this.readout = createElement("p", {class: "readout", "aria-live": "polite"});
    this.colourBar = createElement("canvas", {width: 256, height: 1, "aria-hidden": "true"});
    this.scaleEnds = [createElement("span"), createElement("span")];
    this.controls = createElement("div", {class: "controls"});
    this.heads = createElement("div", {class: "heads"});
    const [lowEnd, highEnd] = this.scaleEnds;
    const scale = createElement("div", {class: "scale"}, lowEnd, this.colourBar, highEnd);
    this.predictions = createElement("div", {class: "predictions"});
    const saving = saveButtons("the attention maps", viewerSavers(this));
    const parts = [this.canvas, this.readout, this.predictions, scale, this.keyHints(), saving];
    const image = createElement("div", {class: "image"}, ...parts);
    this.host.append(createElement("div", {class: "layout"}, image, this.controls, this.heads));
  }

  /** Return the list of keys. */
  keyHints() {
    const key = name => createElement("kbd", {}, name);
    const hints = createElement("p", {class: "keys"});
    hints.append(key("Click"), " pins the patch. ", key("←↑→↓"), " move it, ");
    hints.append(key("["), " ", key("]"), " change the layer, ", key("Esc"), " unpins.");
    return hints;
  }

  /** Return the name of a token before the patches: registers are the last ones. */
  tokenName(i) {
    const others = this.prefix - this.registers;
    if (i >= others) return `Register ${i - others + 1}`;
    return others === 1 ? "Class token" : `Token ${i + 1}`;
  }

  /** Build the controls above the heads. */
  buildControls() {
    const {state, layers, images, prefix} = this;
    const range = {min: "0", max: String(layers.length - 1), value: String(state.layer)};
    this.slider = createElement("input", {type: "range", ...range, "aria-label": "Layer"});
    this.layerName = createElement("output");
    const name = createElement("span", {class: "name"}, "Layer");
    const slider = [name, this.layerName, this.slider];
    this.controls.append(createElement("label", {class: "control layer"}, ...slider));
    const thumbnails = images.map(i => createElement("img", {src: i.uri, alt: i.name}));
    if (images.length > 1) {
      this.addChoices("Image", thumbnails, i => { state.image = i; }, "thumbnails");
    }
    this.addChoices("Show", ["One layer", "All layers"], i => { state.allLayers = i === 1; });
    this.addChoices("Colour scale", ["Per map", "Shared"], i => { state.sharedScale = i === 1; });
    this.addChoices("Colours", ["Linear", "Logarithmic"], i => { state.logarithmic = i === 1; });
    this.addChoices("Draw", ["Over image", "Map only"], i => { state.overlay = i === 0; });
    const tokens = Array.from({length: prefix}, (_, i) => this.tokenName(i));
    if (prefix) this.addChoices("Query", ["Patch", ...tokens], i => { state.token = i - 1; });
  }

  /** Add a group of radio buttons with texts or images; `choose` is called with an index. */
  addChoices(name, contents, choose, extraClass = "") {
    const choices = createElement("div", {class: `choices ${extraClass}`});
    contents.forEach((content, i) => {
      const radio = {type: "radio", name: `${name}-${this.number}`, checked: i === 0};
      const input = createElement("input", radio);
      if (typeof content !== "string") input.setAttribute("aria-label", content.alt);
      input.addEventListener("change", () => {
        choose(i);
        this.update();
      });
      choices.append(createElement("label", {}, input, content));
    });
    const legend = createElement("legend", {class: "name"}, name);
    this.controls.append(createElement("fieldset", {class: "control"}, legend, choices));
  }

  /** Build the heading and the tiles of one model for some layers. */
  buildModelHeads(model, layers, names) {
    const colour = this.isDifference(model) ? "var(--quiet)" : paletteColour(model);
    const dot = createElement("i", {class: "dot", style: `background: ${colour}`});
    const name = this.modelName(model);
    const section = createElement("div", {class: "row"}, createElement("h3", {}, dot, name));
    const body = createElement("div", {class: "body"});
    section.append(body);
    const headCount = layer => this.geometry(layer, model).heads;
    const {allLayers} = this.state;
    if (!layers.length) body.append(this.note(`${name} has no attention map in this layer.`));
    if (this.isDifference(model)) {
      const equal = equalSentence(layers.map(layer => this.layers[layer]), this.equalBounds);
      body.append(equal ? this.note(equal) : differenceKey());
      if (equal) return section;
    }
    if (allLayers) section.style.setProperty("--heads", Math.max(...layers.map(headCount)));
    for (const layer of layers) {
      const both = this.layers[layer].byModel.map(geometry => geometry && geometry.heads);
      const count = this.isDifference(model) ? Math.min(...both) : headCount(layer);
      const heads = Array.from({length: count}, (_, head) => head);
      const tiles = heads.map(head => new HeadTile(this, layer, model, head));
      const box = createElement("div", {class: "tiles"});
      if (allLayers) box.append(createElement("b", {}, names[layer]));
      box.append(...tiles.map(tile => tile.node));
      this.tiles.push(...tiles);
      body.append(box);
    }
    const wide = layers.length && headCount(layers[0]) <= 6;
    section.style.setProperty("--tile", wide ? "8.6rem" : "6.2rem");
    return section;
  }

  /** Return a paragraph in a quiet colour. */
  note(text) {
    return createElement("p", {class: "quiet"}, text);
  }

  /** Build the tiles of the shown layers for all models and, if there are two, their difference. */
  buildHeads() {
    const {state, layers, models} = this;
    const names = shortenNames(layers.map(layer => layer.name)).names;
    const shown = state.allLayers ? layers.map((_, i) => i) : [state.layer];
    const numbers = models.map((_, i) => i);
    if (shown.some(layer => this.comparable(layer))) numbers.push(models.length);
    const hasMaps = (layer, model) =>
      this.isDifference(model) ? this.comparable(layer) : Boolean(layers[layer].byModel[model]);
    const withoutMaps = [];
    this.tiles = [];
    this.heads.replaceChildren();
    this.heads.classList.toggle("all", state.allLayers);
    for (const model of numbers) {
      const own = shown.filter(layer => hasMaps(layer, model));
      if (state.allLayers && !own.length) withoutMaps.push(this.modelName(model));
      else this.heads.append(this.buildModelHeads(model, own, names));
    }
    if (!withoutMaps.length) return;
    const text = `${withoutMaps.join(" and ")} has no attention maps to draw.`;
    this.heads.lastChild.lastChild.append(this.note(text));
  }

  /** True if two models have maps of the same shape in a layer, so that they can be subtracted. */
  comparable(layer) {
    const [a, b] = this.layers[layer].byModel;
    if (this.models.length !== 2 || !a || !b) return false;
    return String(a.keys) === String(b.keys) && a.prefix === b.prefix;
  }

  // Drawing

  /** Return the current image in grey, null until the browser has decoded it. */
  greyImage() {
    const {image} = this.state;
    const photo = this.photos[image];
    if (!photo.complete || !photo.naturalWidth) {
      photo.onload = () => this.requestRedraw();
      return null;
    }
    if (!this.greyImages.has(image)) {
      this.greyImages.set(image, greyImage(photo, this.images[image].size));
    }
    return this.greyImages.get(image);
  }

  /** Frame the query's patch; a token has none. */
  frameQuery(context, geometry, width, height, lineWidth) {
    const {position} = this.query(geometry);
    if (position) framePatch(context, position, geometry.queries, width, height, lineWidth);
  }

  /** Draw the image, with the map of the selected tile on the scale of its tile, and the bar. */
  drawImage(sharedLargest) {
    const {state, canvas} = this;
    const [height, width] = this.images[state.image].size;
    const photo = this.photos[state.image];
    const zoom = Math.max(1, Math.round(640 / Math.max(height, width)));
    Object.assign(canvas, {width: width * zoom, height: height * zoom});
    const size = [canvas.width, canvas.height];
    const row = state.tile && this.row(state.layer, state.tile.model, state.tile.head);
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    if (photo.complete) context.drawImage((row && this.greyImage()) || photo, 0, 0, ...size);
    else photo.onload = () => this.requestRedraw();
    if (row) paintRow(context, row, sharedLargest || largestValue([row]), ...size, state);
    if (this.currentGeometry) this.frameQuery(context, this.currentGeometry, ...size, 4);
    const signed = Boolean(row && row.signed);
    paintColourBar(this.colourBar, signed);
    const lowest = state.logarithmic ? "up to largest / 255" : "0";
    this.scaleEnds[0].textContent = signed ? "negative" : lowest;
    this.scaleEnds[1].textContent = state.sharedScale ? "largest shown" : "largest in the map";
  }

  /** Draw everything. */
  redraw() {
    this.redrawPending = false;
    const {tiles, state} = this;
    const rowsOf = difference => tiles
      .filter(tile => tile.isDifference === difference)
      .map(tile => tile.row());
    const shared = difference => state.sharedScale ? largestValue(rowsOf(difference)) : 0;
    const [largest, largestDifference] = [shared(false), shared(true)];
    const topOf = tile => tile.isDifference ? largestDifference : largest;
    for (const tile of tiles) tile.draw(topOf(tile));
    this.drawImage(state.tile && topOf(state.tile));
    const hint = "The arrow keys move the query patch.";
    this.canvas.setAttribute("aria-label", `${this.images[state.image].name}. ${hint}`);
    this.host.dataset.ready = this.store.complete ? "yes" : "no";
  }

  /** Draw everything in the next frame, once. */
  requestRedraw() {
    if (this.redrawPending) return;
    this.redrawPending = true;
    this.host.dataset.ready = "no";
    requestAnimationFrame(() => this.redraw());
  }

  /** Write the text under the image, for a tile and the key under the pointer. */
  updateReadout(tile = this.state.tile, key = null) {
    const geometry = this.currentGeometry;
    if (geometry) this.readout.replaceChildren(...readoutParts(this, geometry, tile, key));
  }

  // Changing the state

  /** Show the current state; the tiles are rebuilt if other layers are shown. */
  update() {
    const {state, layers} = this;
    const shownLayers = state.allLayers ? "all" : `layer ${state.layer}`;
    const {name} = layers[state.layer];
    this.predictions.replaceChildren(...predictionLines(this));
    this.layerName.textContent = `${name} (${state.layer + 1} of ${layers.length})`;
    this.slider.setAttribute("aria-valuetext", name);
    if (shownLayers !== this.shownLayers) {
      this.shownLayers = shownLayers;
      this.buildHeads();
    }
    this.requestRedraw();
    this.updateReadout();
  }

  /** True if a tile is the selected one. */
  isSelected(tile) {
    const selected = this.state.tile;
    return Boolean(selected) && selected.id === tile.id;
  }

  /** Lay a tile's map over the image, or remove it. */
  selectTile(tile) {
    this.state.tile = this.isSelected(tile) ? null : tile;
    this.state.layer = this.slider.value = tile.layer;
    this.update();
  }

  /** Change the layer by its index. */
  changeLayer(layer) {
    Object.assign(this.state, {layer: clamp(layer, 0, this.layers.length - 1), tile: null});
    this.slider.value = this.state.layer;
    this.update();
  }

  /** Move the query to a point of the image. */
  moveQuery(y, x) {
    const {state} = this;
    Object.assign(state, {y, x});
    if (state.token >= 0) {
      state.token = -1;
      this.controls.querySelector(`[name="Query-${this.number}"]`).checked = true;
    }
    this.requestRedraw();
    this.updateReadout();
  }

  /** Move the query by patches, and pin it. */
  stepQuery([down, right]) {
    const {state, step} = this;
    const [rows, columns] = this.currentGeometry ? this.currentGeometry.queries : [1, 1];
    const row = cellAt(state.y, rows) + down * step[0];
    const column = cellAt(state.x, columns) + right * step[1];
    state.pinned = true;
    this.moveQuery((row + .5) / rows, (column + .5) / columns);
  }

  /** Unpin the query and deselect the tile. */
  release() {
    Object.assign(this.state, {pinned: false, tile: null});
    this.requestRedraw();
    this.updateReadout();
  }

  // Events

  /** React to pointer and keys. */
  addListeners() {
    const {state, canvas} = this;
    this.slider.addEventListener("input", () => this.changeLayer(+this.slider.value));
    canvas.addEventListener("pointermove", event => {
      if (state.pinned && !event.buttons) return;
      this.moveQuery(...pointerShare(event, canvas));
    });
    canvas.addEventListener("click", event => {
      state.pinned = !state.pinned || event.pointerType === "touch";
      this.moveQuery(...pointerShare(event, canvas));
    });
    canvas.addEventListener("keydown", event => {
      const layerMove = {"[": -1, "]": 1}[event.key];
      if (ARROW_MOVES[event.key]) this.stepQuery(ARROW_MOVES[event.key]);
      else if (layerMove) this.changeLayer(state.layer + layerMove);
      else if (event.key === "Escape") this.release();
      else return;
      event.preventDefault();
    });
  }
}
