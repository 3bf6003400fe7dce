// Charts of series: lines, dots and bars. Each function draws a chart at a given width and returns
// its stops, the positions at which the cursor rests: {x, text} and optionally y, box or band.

/** Draw lines with their ranges. */
function drawLineChart(root, spec, width) {
  const area = plotArea(root, width, 250);
  const [firstX, lastX] = extent(spec.series.flatMap(s => s.x));
  const values = spec.series.flatMap(s => [...s.y, ...(s.low || []), ...(s.high || [])]);
  const x = linearScale(firstX, lastX, area.left, area.right);
  const y = axisScale(extent(values), 4, area.bottom - 5, area.top + 3);
  drawYAxis(root, area, y, spec.y);
  const integers = spec.series.every(s => s.x.every(Number.isInteger));
  const ticks = ticksBetween(firstX, lastX, Math.max(2, width / 90));
  drawXAxis(root, area, x, ticks.filter(t => !integers || Number.isInteger(t)), spec.x);
  spec.series.forEach((series, i) => drawSeriesLine(root, spec, i, x, y));
  const positions = [...new Set(spec.series.flatMap(s => s.x))].sort((a, b) => a - b);
  return positions.map(position => {
    const text = seriesText(spec.series, s => formatNumber(valueNear(s, position)));
    return {x: x(position), text: `${spec.x} ${formatNumber(position)}: ${text}`};
  });
}

/** Draw one line, its range, and its points where they are few. */
function drawSeriesLine(root, spec, index, x, y) {
  const series = spec.series[index];
  const colour = seriesColour(spec, index);
  if (series.low && series.high) {
    const upper = series.x.map((v, i) => `${x(v)} ${y(series.high[i])}`);
    const lower = series.x.map((v, i) => `${x(v)} ${y(series.low[i])}`);
    const outline = `M${[...upper, ...lower.reverse()].join("L")}Z`;
    createSvg("path", {d: outline, fill: colour, opacity: .18}, root);
  }
  const points = series.x.map((v, i) => [x(v), series.y[i] === null ? null : y(series.y[i])]);
  drawPolyline(root, points, colour, 2, seriesDash(spec, index));
  if (points.length >= 30) return;
  const marker = spec.ordered ? 0 : seriesIndex(spec, index);
  for (const [px, py] of points) {
    if (py !== null) drawMarker(root, px, py, 2.6, marker, {fill: colour});
  }
}

/** Return a line's value at the nearest x, null outside of the line. */
function valueNear(series, position) {
  if (position < series.x[0] || position > series.x.at(-1)) return null;
  const distance = i => Math.abs(series.x[i] - position);
  let nearest = 0;
  for (let i = 1; i < series.x.length; i++) if (distance(i) < distance(nearest)) nearest = i;
  return series.y[nearest];
}

/** Draw a dot for each head by layer, and a line through the means of the layers. */
function drawDotChart(root, spec, width) {
  const area = plotArea(root, width, 250);
  const [low, high] = extent(spec.series.flatMap(s => s.values.flatMap(heads => heads || [])), 0);
  const y = axisScale([low, spec.limit ?? high], 4, area.bottom, area.top);
  const spacing = (area.right - area.left) / spec.layers.length;
  const x = i => area.left + (i + .5) * spacing;
  drawYAxis(root, area, y, spec.y);
  const {names, pattern} = shortenNames(spec.layers);
  const stride = labelStride(names, spacing, 6);
  names.forEach((name, i) => {
    if (i % stride === 0) drawText(root, name, x(i), area.bottom + 16, "middle");
  });
  drawText(root, pattern ? `layer (${pattern})` : "layer", area.right, area.height - 3, "end");
  spec.series.forEach((_, k) => {
    const shift = (k - (spec.series.length - 1) / 2) * Math.min(12, spacing / 4);
    drawHeads(root, spec, k, i => x(i) + shift, y);
  });
  const headsText = heads => (heads || []).map(formatNumber).join(", ") || "–";
  return spec.layers.map((name, i) => {
    const text = seriesText(spec.series, s => headsText(s.values[i]));
    return {x: x(i), text: `${name}: ${text}`};
  });
}

/** Draw the heads of one series and the line through their means. */
function drawHeads(root, spec, index, x, y) {
  const series = spec.series[index];
  const colour = seriesColour(spec, index);
  const known = series.values.map(heads => (heads || []).filter(value => value !== null));
  const mean = heads => heads.reduce((a, b) => a + b) / heads.length;
  const points = known.map((heads, i) => [x(i), heads.length ? y(mean(heads)) : null]);
  drawPolyline(root, points, colour, 1.6, seriesDash(spec, index));
  known.forEach((heads, i) => {
    const faint = {fill: colour, opacity: .62};
    for (const value of heads) drawMarker(root, x(i), y(value), 3, seriesIndex(spec, index), faint);
  });
}

/** Draw groups of horizontal bars, a bar for each series, with their values. */
function drawBarChart(root, spec, width) {
  const values = spec.series.flatMap(s => s.values);
  const thickness = spec.series.length > 3 ? 6 : 9;
  const rowHeight = spec.series.length * (thickness + 2) + 9;
  const left = Math.min(width * .42, longestName(spec.groups) * LETTER_WIDTH + 12);
  const top = 20;
  const height = top + rowHeight * spec.groups.length + 4;
  root.setAttribute("height", height);
  const [low, high] = extent(values, 0);
  const count = Math.max(2, (width - left) / 90);
  const x = axisScale([low, Math.max(high, 0)], count, left, width - 46);
  const format = tickFormat(x.ticks);
  for (const tick of x.ticks) {
    const at = {x1: x(tick), x2: x(tick), y1: top - 4, y2: height};
    createSvg("line", {class: "axis", ...at}, root);
    drawText(root, format(tick), x(tick), 11, "middle");
  }
  const bars = {x, left, thickness, rowHeight, format: sameDecimals(values)};
  return spec.groups.map((group, i) => {
    const y = top + i * rowHeight;
    drawBarGroup(root, spec, i, y, bars);
    const text = seriesText(spec.series, s => formatNumber(s.values[i]));
    const unit = spec.y ? ` (${spec.y})` : "";
    const middle = y + (rowHeight - 5) / 2;
    return {x: null, y: middle, band: rowHeight - 1, text: `${group}: ${text}${unit}`};
  });
}

/** Draw the name and the bars of one group, from the vertical position y. */
function drawBarGroup(root, spec, index, y, {x, left, thickness, rowHeight, format}) {
  const group = spec.groups[index];
  const lines = wrapName(group, Math.floor((left - 8) / LETTER_WIDTH));
  const first = y + rowHeight / 2 - 5.5 * (lines.length - 1);
  lines.forEach((line, i) => drawText(root, line, left - 8, first + 11 * i, "end"));
  spec.series.forEach((series, k) => {
    const value = series.values[index];
    if (value === null) return;
    const barTop = y + 2 + k * (thickness + 2);
    const [from, to] = [Math.min(x(0), x(value)), Math.max(x(0), x(value))];
    const size = {width: Math.max(1, to - from), height: thickness};
    const fill = seriesColour(spec, k);
    createSvg("rect", {x: from, y: barTop, ...size, rx: 2, fill}, root);
    const small = {style: "font-size: 9.5px"};
    drawText(root, format(value), to + 5, barTop + thickness - .5, "start", small);
  });
}
