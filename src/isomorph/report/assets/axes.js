// Axes and curves of charts.

const MARGINS = {left: 46, right: 10, top: 22, bottom: 34};
const LETTER_WIDTH = 6.6;

/** Set the height of a chart; return the coordinates of the area inside its margins. */
function plotArea(root, width, height, margins = MARGINS) {
  root.setAttribute("height", height);
  const {left, right, top, bottom} = margins;
  return {left, right: width - right, top, bottom: height - bottom, width, height};
}

/** Draw horizontal grid lines with their values, and the label of the y axis. */
function drawYAxis(root, area, y, label) {
  const format = tickFormat(y.ticks);
  for (const tick of y.ticks) {
    const at = {x1: area.left, x2: area.right, y1: y(tick), y2: y(tick)};
    createSvg("line", {class: "axis", ...at}, root);
    drawText(root, format(tick), area.left - 7, y(tick) + 4, "end");
  }
  drawText(root, label, 0, 11);
}

/** Draw the values of the x axis and its label, with vertical grid lines if asked for. */
function drawXAxis(root, area, x, ticks, label, lines = false) {
  const format = tickFormat(ticks);
  for (const tick of ticks) {
    const at = {x1: x(tick), x2: x(tick), y1: area.top, y2: area.bottom};
    if (lines) createSvg("line", {class: "axis", ...at}, root);
    drawText(root, format(tick), x(tick), area.bottom + 16, "middle");
  }
  drawText(root, label, area.right, area.height - 3, "end");
}

/** Return how many names apart labels must be so that they do not overlap. */
function labelStride(names, spacing, padding) {
  return Math.max(1, Math.ceil((longestName(names) * 6.5 + padding) / spacing));
}

/** Draw a line through points [x, y], interrupted where y is null; `dash` is a pattern or "". */
function drawPolyline(root, points, colour, width = 2, dash = "") {
  let path = "";
  let command = "M";
  for (const [x, y] of points) {
    if (y !== null) path += `${command}${x.toFixed(1)} ${y.toFixed(1)}`;
    command = y === null ? "M" : "L";
  }
  const stroke = {stroke: colour, "stroke-width": width, "stroke-linejoin": "round"};
  if (dash) stroke["stroke-dasharray"] = dash;
  createSvg("path", {d: path, fill: "none", ...stroke}, root);
}

/** Draw a circle; other attributes (fill, stroke, opacity) are given. */
function drawCircle(root, x, y, radius, attributes) {
  createSvg("circle", {cx: x, cy: y, r: radius, ...attributes}, root);
}

/** Draw the marker of a series by its index: a circle, square, diamond or triangle. */
function drawMarker(root, x, y, r, index, attributes) {
  const shapes = [
    `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
    `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}Z`,
    `M0 ${-1.4 * r}L${1.4 * r} 0L0 ${1.4 * r}L${-1.4 * r} 0Z`,
    `M0 ${-1.3 * r}L${1.3 * r} ${r}H${-1.3 * r}Z`,
  ];
  const transform = `translate(${x} ${y})`;
  createSvg("path", {d: shapes[index % shapes.length], transform, ...attributes}, root);
}

/** Return the swatch of a series: its colour, with the dash and marker of its line or points. */
function seriesSwatch(spec, index) {
  const swatch = createSvg("svg", {class: "swatch", width: 22, height: 12, "aria-hidden": "true"});
  drawSwatch(swatch, spec, index, 0, 6);
  return swatch;
}

/** Draw the swatch of a series into an SVG, 22 wide around a middle line. */
function drawSwatch(root, spec, index, left, middle) {
  const colour = seriesColour(spec, index);
  if (spec.kind === "bars") {
    createSvg("rect", {x: left, y: middle - 5, width: 16, height: 10, rx: 2, fill: colour}, root);
    return;
  }
  if (spec.kind !== "scatter") {
    drawPolyline(root, [[left, middle], [left + 22, middle]], colour, 2, seriesDash(spec, index));
  }
  const marker = spec.ordered ? 0 : seriesIndex(spec, index);
  drawMarker(root, left + 11, middle, 3.4, marker, {fill: colour});
}

/** Write the values of several series at one position: "a 0.5 · b 0.7". */
function seriesText(series, valueText) {
  return series.map(one => `${one.name} ${valueText(one)}`).join(" · ");
}
