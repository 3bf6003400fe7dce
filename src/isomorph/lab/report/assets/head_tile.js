// The tile of one head: a button with the head's map, its name and its largest value.

const TILE_WIDTH = 168;
const SMALL_TILE_WIDTH = 72;

/** Return the cell into which a share of the image's height or width falls. */
const cellAt = (share, cells) => clamp(Math.floor(share * cells), 0, cells - 1);

/** Return where the pointer is on an element, as shares of its height and width. */
function pointerShare(event, node) {
  const box = node.getBoundingClientRect();
  return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
}

class HeadTile {
  /** Build the tile of a head, or of the difference of two models in that head. */
  constructor(viewer, layer, model, head) {
    Object.assign(this, {viewer, layer, model, head, id: `${layer}-${model}-${head}`});
    this.isDifference = viewer.isDifference(model);
    this.geometry = viewer.geometry(layer, model);
    this.canvas = createElement("canvas");
    this.largest = createElement("i");
    const caption = createElement("span", {}, createElement("b", {}, this.name), this.largest);
    const shownIn = `${viewer.layers[layer].name}, ${viewer.modelName(model)}`;
    const label = {"aria-pressed": "false", "aria-label": `head ${head + 1}, ${shownIn}`};
    const button = {class: "tile", type: "button", ...label};
    this.node = createElement("button", button, this.canvas, caption);
    this.node.dataset.tile = this.id;
    this.addListeners();
  }

  /** The head's number, with its gate if it has one. */
  get name() {
    const {gates} = this.geometry;
    const gated = gates && gates[this.head] !== null && !this.isDifference;
    if (gated) return `${this.head + 1} · gate ${gates[this.head].toFixed(2)}`;
    return `head ${this.head + 1}`;
  }

  /** Return what the head attends to from the query, null while its map is not unpacked. */
  row() {
    return this.viewer.row(this.layer, this.model, this.head);
  }

  /** Return the largest difference of the two models in this head, null where it is not known. */
  exactDifference() {
    const {layers, state} = this.viewer;
    return exactDifference(layers[this.layer], state.image, this.head);
  }

  /** Draw the map; `sharedLargest` is the top of a shared colour scale, 0 for the tile's own. */
  draw(sharedLargest) {
    const {viewer, canvas, geometry} = this;
    const {state} = viewer;
    this.node.setAttribute("aria-pressed", String(viewer.isSelected(this)));
    const [imageHeight, imageWidth] = viewer.images[state.image].size;
    const columns = geometry.keys[1];
    const zoom = (state.allLayers ? SMALL_TILE_WIDTH : TILE_WIDTH) / columns;
    const width = columns * Math.max(1, Math.round(zoom));
    const height = Math.round(width * imageHeight / imageWidth);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
    const context = canvas.getContext("2d");
    const grey = viewer.greyImage();
    context.clearRect(0, 0, width, height);
    if (state.overlay && grey) {
      context.imageSmoothingEnabled = true;
      context.drawImage(grey, 0, 0, width, height);
    }
    const row = this.row();
    if (!row) return;
    const own = largestValue([row]);
    const largest = sharedLargest || own;
    paintRow(context, row, largest, width, height, state);
    viewer.frameQuery(context, geometry, width, height, state.allLayers ? 1.5 : 2);
    this.largest.textContent = this.isDifference
      ? differenceText(row, this.exactDifference())
      : `max ${formatTwoDigits(own)}`;
  }

  /** Select the tile on click, and read the value under the pointer. */
  addListeners() {
    const {viewer, node, canvas} = this;
    node.addEventListener("click", () => viewer.selectTile(this));
    node.addEventListener("pointermove", event => {
      const [rows, columns] = this.geometry.keys;
      const [y, x] = pointerShare(event, canvas);
      viewer.updateReadout(this, cellAt(y, rows) * columns + cellAt(x, columns));
    });
    node.addEventListener("pointerleave", () => viewer.updateReadout());
  }
}
