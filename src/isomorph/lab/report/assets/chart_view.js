// A chart on the page: legend, drawing, and the values under the pointer or the cursor.

const CHART_DRAWERS = {plane: drawPlaneChart, bars: drawBarChart, matrix: drawMatrixChart};
const CHART_HINT = "Point at the chart or use the arrow keys to read values.";

class ChartView {
  /** Build a chart inside an element of the page, and draw it again when its width changes. */
  constructor(host, spec) {
    Object.assign(this, {host, spec, stops: [], current: -1, cursor: null, width: 0});
    const firstOfPage = !document.querySelector(".reading");
    const label = {"aria-roledescription": "chart", "aria-label": `${spec.title}. ${CHART_HINT}`};
    this.root = createSvg("svg", {tabindex: 0, role: "application", ...label});
    const reading = {class: "reading quiet", "aria-live": "polite"};
    this.reading = createElement("p", reading, firstOfPage ? CHART_HINT : "");
    const saving = saveButtons(spec.title, chartSavers(this));
    host.append(...this.legend(), this.root, this.reading, saving);
    this.addListeners();
    new ResizeObserver(() => this.draw()).observe(host);
    this.draw();
  }

  /** Return the names and colours of the series; nothing where they need no telling apart. */
  legend() {
    const {series} = this.spec;
    const twoModels = page.viewers.length && page.viewers[0].models.length > 1;
    if (!series || !series.length || (series.length < 2 && !twoModels)) return [];
    const entries = series.map((one, i) => {
      const swatch = createSvg("svg", {width: 22, height: 12, "aria-hidden": "true"});
      drawSwatch(swatch, this.spec, i, 0, 6);
      return createElement("span", {}, swatch, one.name);
    });
    return [createElement("div", {class: "legend"}, ...entries)];
  }

  /** Draw the chart for the width of its element, unless it has that width already. */
  draw() {
    const width = Math.floor(this.host.clientWidth);
    if (!width || width === this.width) return;
    Object.assign(this, {width, cursor: null});
    this.root.replaceChildren();
    this.root.setAttribute("width", width);
    this.root.style.width = `${width}px`;
    this.stops = CHART_DRAWERS[this.spec.kind](this.root, this.spec, width);
    if (this.current >= 0) this.moveTo(this.current);
  }

  /** Move the cursor to a stop and write its values. */
  moveTo(index) {
    if (!this.stops.length) return;
    this.current = clamp(index, 0, this.stops.length - 1);
    const stop = this.stops[this.current];
    this.reading.textContent = stop.text;
    this.reading.classList.remove("quiet");
    if (this.cursor) this.cursor.remove();
    this.cursor = this.drawCursor(stop);
  }

  /** Draw the cursor: a frame around a box, a band along a row, or a vertical line. */
  drawCursor({x, y, box, band}) {
    if (box) {
      const corner = {x: x - box[0] / 2 - 1, y: y - box[1] / 2 - 1};
      const size = {width: box[0] + 1, height: box[1] + 1};
      const stroke = {fill: "none", stroke: "var(--ink)", "stroke-width": 2, rx: 3};
      return createSvg("rect", {class: "cursor box", ...corner, ...size, ...stroke}, this.root);
    }
    if (band) {
      const size = {width: this.width, height: band};
      const fill = {rx: 4, fill: "var(--ink)", opacity: .08};
      const start = {class: "cursor box", x: 0, y: y - band / 2};
      return createSvg("rect", {...start, ...size, ...fill}, this.root);
    }
    const bottom = this.root.getAttribute("height") - 30;
    return createSvg("line", {class: "cursor", x1: x, x2: x, y1: 16, y2: bottom}, this.root);
  }

  /** Return the index of the stop nearest to the pointer. */
  nearestStop(event) {
    const box = this.root.getBoundingClientRect();
    const pointer = [event.clientX - box.left, event.clientY - box.top];
    const along = (value, other) => value == null ? 0 : Math.abs(value - other);
    const distances = this.stops.map(({x, y}) => along(x, pointer[0]) + along(y, pointer[1]));
    return distances.indexOf(Math.min(...distances));
  }

  /** React to pointer and keys. */
  addListeners() {
    const readPointer = event => this.moveTo(this.nearestStop(event));
    this.root.addEventListener("pointermove", readPointer);
    this.root.addEventListener("pointerdown", readPointer);
    this.root.addEventListener("keydown", event => {
      const row = this.stops.across || 1;
      const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row};
      Object.assign(moves, {Home: -this.stops.length, End: this.stops.length});
      const move = moves[event.key];
      if (move === undefined) return;
      event.preventDefault();
      this.moveTo(this.current < 0 ? 0 : this.current + move);
    });
  }
}
