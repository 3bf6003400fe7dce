// Charts: series in a plane, bars, and matrices. Each function draws a chart at a given width and
// returns its stops, where the cursor rests: {x, y, text} and optionally box or band.

const LETTER_WIDTH = 6.6;

/** Draw lines, ranges and points of series on a pair of axes. */
function drawPlaneChart(root, spec, width) {
  const side = Math.min(width - 56, 340);
  const height = spec.square ? side + 56 : 250;
  root.setAttribute("height", height);
  const [left, right, top, bottom] = [46, spec.square ? 46 + side : width - 12, 22, height - 34];
  const x = linearScale(spec.x.range, left, right, Math.max(2, (right - left) / 90));
  const y = spec.square
    ? linearScale(spec.y.range, top, bottom, 4)
    : axisScale(spec.y.range, 4, bottom - 4, top + 4);
  const area = {left, right, top, bottom};
  drawYAxis(root, spec, area, y);
  drawXAxis(root, spec, area, x);
  spec.series.forEach((_, i) => drawSeries(root, spec, i, x, y));
  if (spec.square) {
    const cross = `M${x(0) - 5} ${y(0)}h10M${x(0)} ${y(0) - 5}v10`;
    createSvg("path", {d: cross, stroke: "var(--ink)", "stroke-width": 1.5}, root);
  }
  if (spec.labelled) drawPointNames(root, spec, area, x, y);
  return spec.stops ? tableStops(spec, x, y) : lineStops(spec, x);
}

/** Draw horizontal grid lines with their values, and the label of the y axis. */
function drawYAxis(root, spec, {left, right}, y) {
  const format = tickFormat(y.ticks);
  for (const tick of y.ticks) {
    createSvg("line", {class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick)}, root);
    drawText(root, format(tick), left - 7, y(tick) + 4, "end");
  }
  drawText(root, spec.y.label, 0, 11);
}

/** Draw the names or values of the x axis and its label, with vertical grid lines for points. */
function drawXAxis(root, spec, {right, top, bottom}, x) {
  const {names, pattern} = shortenNames(spec.x.names || []);
  const stride = labelStride(names, x(1) - x(0), 6);
  names.forEach((name, i) => {
    if (i % stride === 0) drawText(root, name, x(i), bottom + 16, "middle");
  });
  const ticks = spec.x.names ? [] : x.ticks.filter(t => !spec.x.whole || Number.isInteger(t));
  const format = tickFormat(ticks);
  for (const tick of ticks) {
    const line = {class: "axis", x1: x(tick), x2: x(tick), y1: top, y2: bottom};
    if (spec.stops) createSvg("line", line, root);
    drawText(root, format(tick), x(tick), bottom + 16, "middle");
  }
  drawText(root, patternLabel(spec.x.label, pattern), right, bottom + 31, "end");
}

/** Return how many names apart labels must be so that they do not overlap. */
function labelStride(names, spacing, padding) {
  return Math.max(1, Math.ceil((longestName(names) * 6.5 + padding) / spacing));
}

/** Return the label of an axis of names, with what the names have in common. */
const patternLabel = (label, pattern) => pattern ? `${label} (${pattern})` : label;

/** Draw the lines of a series with their ranges, and its points: those of short lines too. */
function drawSeries(root, spec, index, x, y) {
  const {lines, points} = spec.series[index];
  const colour = seriesColour(spec, index);
  const marker = spec.ordered ? 0 : seriesIndex(spec, index);
  for (const line of lines.filter(line => line.length)) {
    if (line[0].length > 2) drawRange(root, line, colour, x, y);
    const path = line.map(([px, py]) => [x(px), py === null ? null : y(py)]);
    drawPolyline(root, path, colour, 1.8, seriesDash(spec, index));
    const ring = {cx: path[0][0], cy: path[0][1], r: 3.4, fill: "none", stroke: colour};
    if (spec.square) createSvg("circle", ring, root);
  }
  const own = points.length ? points : lines.flat().length < 30 ? lines.flat() : [];
  const fill = {fill: colour, opacity: spec.x.names ? .62 : 1};
  for (const [px, py] of own) {
    if (py !== null) drawMarker(root, x(px), y(py), spec.labelled ? 4.5 : 2.9, marker, fill);
  }
}

/** Draw the range around a line of points [x, y, low, high]. */
function drawRange(root, line, colour, x, y) {
  const upper = line.map(([px, , , high]) => `${x(px)} ${y(high)}`);
  const lower = line.map(([px, , low]) => `${x(px)} ${y(low)}`).reverse();
  createSvg("path", {d: `M${[...upper, ...lower].join("L")}Z`, fill: colour, opacity: .18}, root);
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

/** Draw the swatch of a series into an SVG, 22 wide around a middle line. */
function drawSwatch(root, spec, index, left, middle) {
  const colour = seriesColour(spec, index);
  if (spec.kind === "bars") {
    createSvg("rect", {x: left, y: middle - 5, width: 16, height: 10, rx: 2, fill: colour}, root);
    return;
  }
  if (spec.series[index].lines.length) {
    drawPolyline(root, [[left, middle], [left + 22, middle]], colour, 2, seriesDash(spec, index));
  }
  const marker = spec.ordered ? 0 : seriesIndex(spec, index);
  drawMarker(root, left + 11, middle, 3.4, marker, {fill: colour});
}

/** Draw each point's name where it covers nothing, if there is such a position near the point. */
function drawPointNames(root, spec, area, x, y) {
  const points = spec.series.flatMap(s => s.points.map(([px, py, name]) => [x(px), y(py), name]));
  const taken = points.map(([px, py]) => [px - 5, py - 5, px + 5, py + 5]);
  const isFree = box => box[0] > area.left - 4 && box[2] < area.right + 12 && box[1] > 12 &&
    box[3] < area.bottom && !taken.some(other => overlap(box, other));
  for (const [px, py, name] of points) {
    const free = nameBoxes(px, py, name.length * 6.4).find(isFree);
    if (!free) continue; // the name is in the reading and in the table
    taken.push(free);
    drawText(root, name, free[0], free[3] - 2);
  }
}

/** True if two boxes [left, top, right, bottom] overlap. */
function overlap(a, b) {
  return b[2] >= a[0] && b[0] <= a[2] && b[3] >= a[1] && b[1] <= a[3];
}

/** Return boxes for a name next to a point, the best first: right, left, then above and below. */
function nameBoxes(x, y, width) {
  const [right, left] = [x + 8, x - 8 - width];
  const offsets = [-11, 19, -24, 32].flatMap(dy => [[right - 4, y + dy], [left + 4, y + dy]]);
  const starts = [[right, y + 4], [left, y + 4], ...offsets];
  return starts.map(([start, base]) => [start, base - 9, start + width, base + 2]);
}

/** Write a row of a chart's table: its name, then the numbers with the names of their columns. */
function rowText({table: [heads, ...rows]}, index) {
  const [name, ...cells] = rows[index];
  return `${name}: ${cells.map((cell, i) => `${heads[i + 1]} ${cell}`).join(" · ")}`;
}

/** Return a stop for each row of the table that has a position. */
function tableStops(spec, x, y) {
  const stops = spec.stops.map((stop, i) => stop && {
    ...(stop[1] === null ? {x: x(stop[0])} : {x: x(stop[0]), y: y(stop[1]), box: [13, 13]}),
    text: rowText(spec, i),
  });
  return stops.filter(Boolean);
}

/** Return a stop for each x of the lines, with the value of every line there. */
function lineStops(spec, x) {
  const positions = new Set(spec.series.flatMap(s => s.lines[0].map(point => point[0])));
  return [...positions].sort((a, b) => a - b).map(position => {
    const value = series => formatNumber(valueNear(series.lines[0], position));
    const values = spec.series.map(series => `${series.name} ${value(series)}`).join(" · ");
    return {x: x(position), text: `${spec.x.label} ${formatNumber(position)}: ${values}`};
  });
}

/** Return a line's value at the nearest x, null outside of the line. */
function valueNear(line, position) {
  if (!line.length || position < line[0][0] || position > line.at(-1)[0]) return null;
  const distance = point => Math.abs(point[0] - position);
  return line.reduce((best, point) => distance(point) < distance(best) ? point : best)[1];
}

/** Draw groups of horizontal bars, a bar for each series, with their values. */
function drawBarChart(root, spec, width) {
  const {groups, series} = spec;
  const thickness = series.length > 3 ? 6 : 9;
  const rowHeight = series.length * (thickness + 2) + 9;
  const left = Math.min(width * .42, longestName(groups) * LETTER_WIDTH + 12);
  const [top, height] = [20, 24 + rowHeight * groups.length];
  root.setAttribute("height", height);
  const x = axisScale(spec.axis.range, Math.max(2, (width - left) / 90), left, width - 46);
  const formatTick = tickFormat(x.ticks);
  for (const tick of x.ticks) {
    createSvg("line", {class: "axis", x1: x(tick), x2: x(tick), y1: top - 4, y2: height}, root);
    drawText(root, formatTick(tick), x(tick), 11, "middle");
  }
  const format = sameDecimals(series.flatMap(s => s.values));
  const unit = spec.axis.label ? ` (${spec.axis.label})` : "";
  return groups.map((group, i) => {
    const y = top + i * rowHeight;
    const lines = wrapName(group, Math.floor((left - 8) / LETTER_WIDTH));
    const first = y + rowHeight / 2 - 5.5 * (lines.length - 1);
    lines.forEach((line, k) => drawText(root, line, left - 8, first + 11 * k, "end"));
    series.forEach((one, k) => {
      const bar = {x, top: y + 2 + k * (thickness + 2), thickness, fill: seriesColour(spec, k)};
      drawBar(root, one.values[i], bar, format);
    });
    const stop = {x: null, y: y + (rowHeight - 5) / 2, band: rowHeight - 1};
    return {...stop, text: rowText(spec, i) + unit};
  });
}

/** Draw a bar with its value; nothing for null. */
function drawBar(root, value, {x, top, thickness, fill}, format) {
  if (value === null) return;
  const [from, to] = [Math.min(x(0), x(value)), Math.max(x(0), x(value))];
  const size = {width: Math.max(1, to - from), height: thickness};
  createSvg("rect", {x: from, y: top, ...size, rx: 2, fill}, root);
  drawText(root, format(value), to + 5, top + thickness - .5, "start", {style: "font-size: 9.5px"});
}

/** Draw a matrix of numbers by colour, with the numbers where they fit. */
function drawMatrixChart(root, spec, width) {
  const rows = shortenNames(spec.rows);
  const columns = shortenNames(spec.columns);
  const left = Math.min(width * .35, longestName(rows.names) * LETTER_WIDTH + 14);
  const top = 22;
  const cellWidth = clamp((width - left - 4) / columns.names.length, 5, 52);
  const cellHeight = Math.min(cellWidth, rows.names.length > 12 ? 22 : 40);
  const bottom = top + cellHeight * rows.names.length;
  root.setAttribute("height", bottom + 38);
  drawMatrixLabels(root, spec, rows, columns, {left, top, bottom, cellWidth, cellHeight});
  const format = sameDecimals(spec.values.flat());
  const texts = spec.values.map(row => row.map(value => value === null ? "" : format(value)));
  const digits = Math.max(...texts.flat().map(text => text.length));
  const numbered = cellWidth >= Math.max(24, digits * 5.8);
  const stops = spec.values.flatMap((values, i) => values.map((value, j) => {
    const [x, y, box] = [left + j * cellWidth, top + i * cellHeight, [cellWidth, cellHeight]];
    drawCell(root, x, y, box, valueColour(spec, value), numbered ? texts[i][j] : null);
    const text = `${spec.rows[i]} × ${spec.columns[j]}: ${formatNumber(value)}`;
    return {x: x + cellWidth / 2, y: y + cellHeight / 2, box, text};
  }));
  return Object.assign(stops, {across: columns.names.length});
}

/** Draw the names of rows and columns, as many as fit, and the labels of both axes. */
function drawMatrixLabels(root, spec, rows, columns, {left, top, bottom, cellWidth, cellHeight}) {
  drawText(root, patternLabel(spec.y, rows.pattern), 0, 11);
  const columnStride = labelStride(columns.names, cellWidth, 5);
  columns.names.forEach((name, j) => {
    const middle = left + (j + .5) * cellWidth;
    if (j % columnStride === 0) drawText(root, name, middle, bottom + 14, "middle");
  });
  const right = left + cellWidth * columns.names.length;
  drawText(root, patternLabel(spec.x, columns.pattern), right, bottom + 33, "end");
  const rowStride = Math.max(1, Math.ceil(13 / cellHeight));
  rows.names.forEach((name, i) => {
    if (i % rowStride === 0) drawText(root, name, left - 6, top + (i + .5) * cellHeight + 4, "end");
  });
}

/** Return the colour of a matrix value: diverging for a negative lower end, grey for null. */
function valueColour(spec, value) {
  if (value === null) return [128, 128, 128];
  const share = clamp((value - spec.low) / (spec.high - spec.low), 0, 1);
  return COLOURS[spec.low < 0 ? "diverging" : "depth"][Math.round(share * 255)];
}

/** Draw one cell of a matrix; `text` may be null. */
function drawCell(root, x, y, [width, height], colour, text) {
  const size = {width: width - 1, height: height - 1};
  createSvg("rect", {x, y, ...size, rx: 2, fill: cssColour(colour)}, root);
  if (text === null) return;
  const brightness = colour[0] * .3 + colour[1] * .59 + colour[2] * .11;
  const style = `font-size: 10px; fill: ${brightness < 140 ? "#fff" : "#111"}`;
  drawText(root, text, x + width / 2 - .5, y + height / 2 + 3, "middle", {style});
}
