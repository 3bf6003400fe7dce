// Charts in the plane: matrices, paths around a query, scatter plots; each returns its stops.

const NO_VALUE_COLOUR = [128, 128, 128];

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
  const format = sameDecimals(spec.values.flat());
  const text = value => value === null ? "" : format(value);
  const digits = Math.max(...spec.values.flat().map(value => text(value).length));
  const numbered = cellWidth >= Math.max(24, digits * 5.8);
  const cells = {left, top, bottom, cellWidth, cellHeight};
  drawMatrixLabels(root, spec, rows, columns, cells);
  const stops = [];
  spec.values.forEach((values, i) => values.forEach((value, j) => {
    const x = left + j * cellWidth;
    const y = top + i * cellHeight;
    drawCell(root, x, y, cells, valueColour(spec, value), numbered ? text(value) : null);
    stops.push({
      x: x + cellWidth / 2, y: y + cellHeight / 2, box: [cellWidth, cellHeight],
      text: `${spec.rows[i]} × ${spec.columns[j]}: ${formatNumber(value)}`,
    });
  }));
  return Object.assign(stops, {across: columns.names.length});
}

/** Draw the names of rows and columns, as many as fit, and the labels of both axes. */
function drawMatrixLabels(root, spec, rows, columns, {left, top, bottom, cellWidth, cellHeight}) {
  const axisLabel = (label, pattern) => pattern ? `${label} (${pattern})` : label;
  drawText(root, axisLabel(spec.y, rows.pattern), 0, 11);
  const columnStride = labelStride(columns.names, cellWidth, 5);
  columns.names.forEach((name, j) => {
    const middle = left + (j + .5) * cellWidth;
    if (j % columnStride === 0) drawText(root, name, middle, bottom + 14, "middle");
  });
  const right = left + cellWidth * columns.names.length;
  drawText(root, axisLabel(spec.x, columns.pattern), right, bottom + 33, "end");
  const rowStride = Math.max(1, Math.ceil(13 / cellHeight));
  rows.names.forEach((name, i) => {
    if (i % rowStride === 0) drawText(root, name, left - 6, top + (i + .5) * cellHeight + 4, "end");
  });
}

/** Return the colour of a matrix value: diverging for a negative lower end, else sequential. */
function valueColour(spec, value) {
  if (value === null) return NO_VALUE_COLOUR;
  const share = clamp((value - spec.low) / (spec.high - spec.low), 0, 1);
  return page.colours[spec.low < 0 ? "diverging" : "depth"][Math.round(share * 255)];
}

/** Draw one cell of a matrix; `text` may be null. */
function drawCell(root, x, y, {cellWidth, cellHeight}, colour, text) {
  const size = {width: cellWidth - 1, height: cellHeight - 1};
  createSvg("rect", {x, y, ...size, rx: 2, fill: cssColour(colour)}, root);
  if (text === null) return;
  const brightness = colour[0] * .3 + colour[1] * .59 + colour[2] * .11;
  const style = `font-size: 10px; fill: ${brightness < 140 ? "#fff" : "#111"}`;
  drawText(root, text, x + cellWidth / 2 - .5, y + cellHeight / 2 + 3, "middle", {style});
}

/** Draw the path of each head around a query at the origin, in grid steps. */
function drawPathChart(root, spec, width) {
  const side = Math.min(width - 56, 340);
  const margins = {left: 46, right: width - 46 - side, top: 22, bottom: 34};
  const area = plotArea(root, width, margins.top + side + margins.bottom, margins);
  const range = [-spec.reach, spec.reach];
  const x = axisScale(range, 4, area.left, area.right);
  const y = axisScale(range, 4, area.top, area.bottom);
  drawYAxis(root, area, y, "row");
  drawXAxis(root, area, x, x.ticks, "column, grid steps", true);
  const cross = `M${x(0) - 5} ${y(0)}h10M${x(0)} ${y(0) - 5}v10`;
  createSvg("path", {d: cross, stroke: "var(--ink)", "stroke-width": 1.5}, root);
  const stops = [];
  spec.series.forEach((series, i) => series.paths.forEach((path, head) => {
    if (!path.length) return;
    const points = path.map(([row, column]) => [x(column), y(row)]);
    const [first, last] = [points[0], points.at(-1)];
    const colour = seriesColour(spec, i);
    drawPolyline(root, points, colour, 1.4);
    drawCircle(root, ...first, 3.2, {fill: "none", stroke: colour});
    drawCircle(root, ...last, 3.2, {fill: colour});
    const [from, to] = [path[0], path.at(-1)].map(ends => ends.map(formatNumber).join(", "));
    const text = `${series.name}, head ${head + 1}: from ${from} to ${to}`;
    stops.push({x: last[0], y: last[1], box: [11, 11], text});
  }));
  return stops;
}

/** Draw named points. */
function drawScatterChart(root, spec, width) {
  const area = plotArea(root, width, 300, {left: 46, right: 16, top: 24, bottom: 36});
  const all = spec.series.flatMap(s => s.points);
  const count = Math.max(2, width / 110);
  const x = axisScale(extent(all.map(p => p.x), 0), count, area.left, area.right);
  const y = axisScale(extent(all.map(p => p.y)), 4, area.bottom - 6, area.top + 6);
  drawYAxis(root, area, y, spec.y);
  drawXAxis(root, area, x, x.ticks, spec.x, true);
  const points = spec.series.flatMap((series, i) => series.points.map(p => ({
    x: x(p.x), y: y(p.y), name: p.name, box: [13, 13], colour: seriesColour(spec, i), series: i,
    text: `${p.name}: ${formatNumber(p.x)} ${spec.x}, ${formatNumber(p.y)} ${spec.y}` +
      (spec.series.length > 1 ? ` · ${series.name}` : ""),
  })));
  for (const p of points) drawMarker(root, p.x, p.y, 4.5, p.series, {fill: p.colour});
  drawPointNames(root, points, area);
  return points;
}

/** Draw each point's name where it covers nothing, if there is such a position near the point. */
function drawPointNames(root, points, area) {
  const taken = points.map(p => [p.x - 5, p.y - 5, p.x + 5, p.y + 5]);
  const inside = box => box[0] > area.left - 4 && box[2] < area.width &&
    box[1] > 12 && box[3] < area.bottom;
  const apart = (a, b) => b[2] < a[0] || b[0] > a[2] || b[3] < a[1] || b[1] > a[3];
  for (const point of points) {
    const boxes = nameBoxes(point).filter(inside);
    const free = boxes.find(box => taken.every(other => apart(other, box)));
    if (!free) continue; // the name is in the reading and in the table
    taken.push(free);
    drawText(root, point.name, free[0], free[3] - 2);
  }
}

/** Return boxes for a point's name, the best first: right, left, then above and below. */
function nameBoxes({x, y, name}) {
  const nameWidth = name.length * 6.4;
  const [right, left] = [x + 8, x - 8 - nameWidth];
  const offsets = [-11, 19, -24, 32].flatMap(dy => [[right - 4, y + dy], [left + 4, y + dy]]);
  const starts = [[right, y + 4], [left, y + 4], ...offsets];
  return starts.map(([start, base]) => [start, base - 9, start + nameWidth, base + 2]);
}
