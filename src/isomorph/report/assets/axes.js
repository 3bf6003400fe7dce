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
  const ticks = ticksBetween(y.low, y.high, 4);
  const format = tickFormat(ticks);
  for (const tick of ticks) {
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
  const longest = Math.max(...names.map(name => name.length));
  return Math.max(1, Math.ceil((longest * 6.5 + padding) / spacing));
}

/** Draw a line through points [x, y], interrupted where y is null. */
function drawPolyline(root, points, colour, width = 2) {
  let path = "";
  let command = "M";
  for (const [x, y] of points) {
    if (y !== null) path += `${command}${x.toFixed(1)} ${y.toFixed(1)}`;
    command = y === null ? "M" : "L";
  }
  const stroke = {stroke: colour, "stroke-width": width, "stroke-linejoin": "round"};
  createSvg("path", {d: path, fill: "none", ...stroke}, root);
}

/** Draw a circle; other attributes (fill, stroke, opacity) are given. */
function drawCircle(root, x, y, radius, attributes) {
  createSvg("circle", {cx: x, cy: y, r: radius, ...attributes}, root);
}

/** Write the values of several series at one position: "a 0.5 · b 0.7". */
function seriesText(series, valueText) {
  return series.map(one => `${one.name} ${valueText(one)}`).join(" · ");
}
