// Differences of two models' attention: what is equal, and what is below the page's rounding.

/** Return the difference of two rows on the same grid, else null. */
function subtractRows(a, b) {
  if (!a || !b || a.values.length !== b.values.length) return null;
  if (a.geometry.keys[0] !== b.geometry.keys[0]) return null;
  const values = a.values.map((value, key) => value - b.values[key]);
  const {geometry} = a;
  const rounding = a.rounding + b.rounding;
  const onGrid = values.subarray(geometry.prefix);
  return {values, geometry, onGrid, signed: true, rounding, floor: rounding};
}

/** Return the largest difference of two models in a head, null where the page does not know it. */
function exactDifference({differences}, image, head) {
  return differences && head < differences[image].length ? differences[image][head] : null;
}

/** Return the bound within which some differences are zero, undefined where they are larger. */
function equalBound(differences, bounds) {
  return bounds.find(bound => differences.every(value => value <= bound));
}

/** Return the differences of two models in some layers, on every image; null if any is unknown. */
function allDifferences(layers) {
  const known = layers.every(layer => layer.differences);
  return known ? layers.flatMap(layer => layer.differences.flat()) : null;
}

/** Say within which bound all heads of some layers are equal; null if they are not. */
function equalSentence(layers, bounds) {
  const differences = allDifferences(layers);
  const bound = differences && equalBound(differences, bounds);
  if (!bound) return null;
  const heads = layers.reduce((sum, layer) => sum + layer.differences[0].length, 0);
  return `Equal within ${bound.toExponential(0)} in all ${heads} heads.`;
}

/** Write the largest difference in a head: drawn, equal, or too small for the page's rounding. */
function differenceText(row, exact) {
  if (row.floor === Infinity) return "equal";
  const largest = largestValue([row]);
  if (largest > row.floor) return `± ${formatTwoDigits(largest)}`;
  return `≤ ${formatTwoDigits(exact ?? row.floor)}`;
}

/** Return the colour key of differences. */
function differenceKey() {
  const bar = createElement("canvas", {width: 256, height: 1, "aria-hidden": "true"});
  paintColourBar(bar, true);
  const grey = createElement("i", {class: "dot", style: `background: ${cssColour(EQUAL_COLOUR)}`});
  const parts = ["less", bar, "more", grey, "no visible difference"];
  return createElement("div", {class: "scale key"}, ...parts);
}
