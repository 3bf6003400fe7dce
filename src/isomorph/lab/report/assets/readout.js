// The texts under the viewer's image: the query and the value under the pointer; the predictions.

/** Return the position of the query on a layer's grid, or its token, in words. */
function queryText(viewer, geometry) {
  const {position} = viewer.query(geometry);
  if (position) {
    const [row, column] = position;
    return `row ${row + 1}, column ${column + 1} of ${geometry.queries.join(" × ")}`;
  }
  const name = viewer.tokenName(viewer.state.token);
  return name[0].toLowerCase() + name.slice(1);
}

/** Return a line for each model that predicts classes of the image: its name, and the classes. */
function predictionLines({models, images, state}) {
  const {predictions} = images[state.image];
  const line = (model, i) => predictions[i] &&
    createElement("p", {}, createElement("b", {}, model), ` predicts ${predictions[i]}`);
  return models.map(line).filter(Boolean);
}

/** Return the attention of a head to one key, in every model that has it. */
function valuesText(viewer, layer, head, key) {
  const values = viewer.models.map((name, model) => {
    const row = viewer.row(layer, model, head);
    if (!row || key >= row.onGrid.length) return "";
    return `${formatNumber(row.onGrid[key])}${viewer.models.length > 1 ? ` (${name})` : ""}`;
  });
  return values.filter(Boolean).join(", ");
}

/** Return the attention that goes to no position of the grid: to prefix tokens and padding. */
function offGridText(viewer, tile) {
  const row = tile.isDifference ? null : tile.row();
  if (!row) return "";
  const sum = values => values.reduce((a, b) => a + b, 0);
  const {prefix, padded} = row.geometry;
  const tokens = +sum(row.values.slice(0, prefix)).toPrecision(3);
  const padding = +Math.max(0, 1 - sum(row.values)).toPrecision(2);
  return (prefix ? `; ${formatNumber(tokens)} goes to class and register tokens` : "") +
    (padded ? `; ${formatNumber(padding)} goes to the padding` : "");
}

/** Return the parts of the text for a tile (or null) and the key under the pointer (or null). */
function readoutParts(viewer, geometry, tile, key) {
  const query = createElement("b", {}, `From ${queryText(viewer, geometry)}`);
  const parts = [query, viewer.state.pinned ? " (pinned). " : ". "];
  if (!tile) return parts;
  const {layer, head} = tile;
  if (key === null) {
    parts.push(`Head ${head + 1} of ${viewer.layers[layer].name}`);
  } else {
    const columns = tile.geometry.keys[1];
    const position = `row ${Math.floor(key / columns) + 1}, column ${key % columns + 1}`;
    const values = valuesText(viewer, layer, head, key);
    parts.push(`Head ${head + 1} attends to ${position} with ${values}`);
  }
  return [...parts, `${offGridText(viewer, tile)}.`];
}
