// Drawing on canvases: the image in grey, a row of a map, the frame of the query, the colour bar.

const EQUAL_COLOUR = [140, 140, 140];
// Maps have 255 levels, so that smaller shares of the largest value are not known.
const LOG_RANGE = 255;

/** Return the image dimmed and without colour, so that attention stands out on it. */
function greyImage(image, [height, width]) {
  const canvas = createElement("canvas", {width, height});
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, width, height);
  const {data} = pixels;
  for (let i = 0; i < data.length; i += 4) {
    const brightness = data[i] * .3 + data[i + 1] * .59 + data[i + 2] * .11;
    data.fill(18 + .5 * brightness, i, i + 3);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Return a value between -1 and 1, where 1 is `largest`; if logarithmic, 0 is largest / 255. */
function scaleShare(value, largest, logarithmic) {
  const share = clamp(value / largest, -1, 1);
  if (!logarithmic) return share;
  const size = 1 + Math.log(Math.abs(share)) / Math.log(LOG_RANGE);
  return Math.sign(share) * Math.max(size, 0);
}

/** Draw a row of a map, coloured up to `largest`; as an overlay, weak values are transparent. */
function paintRow(context, row, largest, width, height, {overlay, logarithmic}) {
  const [rows, columns] = row.geometry.keys;
  const small = createElement("canvas", {width: columns, height: rows});
  const smallContext = small.getContext("2d");
  const pixels = smallContext.createImageData(columns, rows);
  const colours = COLOURS[row.signed ? "diverging" : "sequential"];
  for (let key = 0; key < rows * columns; key++) {
    const value = row.onGrid[key];
    if (Math.abs(value) <= row.floor) {
      pixels.data.set([...EQUAL_COLOUR, overlay ? 0 : 255], 4 * key);
      continue;
    }
    const share = scaleShare(value, largest, logarithmic);
    const onScale = row.signed ? (share + 1) / 2 : Math.max(share, 0);
    const opacity = overlay ? 255 * .92 * Math.sqrt(Math.abs(share)) : 255;
    pixels.data.set([...colours[Math.round(255 * onScale)], opacity], 4 * key);
  }
  smallContext.putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, height);
}

/** Frame one patch of a grid, white on black. */
function framePatch(context, [row, column], [rows, columns], width, height, lineWidth) {
  const [patchWidth, patchHeight] = [width / columns, height / rows];
  const left = column * patchWidth + lineWidth / 2;
  const top = row * patchHeight + lineWidth / 2;
  const size = [patchWidth, patchHeight].map(side => Math.max(side - lineWidth, lineWidth));
  for (const [colour, strokeWidth] of [["#000c", lineWidth * 2], ["#fff", lineWidth]]) {
    Object.assign(context, {strokeStyle: colour, lineWidth: strokeWidth});
    context.strokeRect(left, top, ...size);
  }
}

/** Draw the colours from the lowest to the highest on a canvas of 256 x 1. */
function paintColourBar(canvas, signed) {
  const context = canvas.getContext("2d");
  COLOURS[signed ? "diverging" : "sequential"].forEach((rgb, i) => {
    context.fillStyle = cssColour(rgb);
    context.fillRect(i, 0, 1, 1);
  });
}
