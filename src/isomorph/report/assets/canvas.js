// Drawing on canvases: an image in grey, an attention row over it, the frame of the query patch, the colour bar.

/** The image dimmed and without colour, so that attention stands out on it. */
function greyImage(picture, [height, width]) {
  const canvas = el("canvas", {width, height}), pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0);
  const pixels = pen.getImageData(0, 0, width, height), p = pixels.data;
  for (let i = 0; i < p.length; i += 4)
    p[i] = p[i + 1] = p[i + 2] = 18 + .5 * (p[i] * .3 + p[i + 1] * .59 + p[i + 2] * .11);
  pen.putImageData(pixels, 0, 0);
  return canvas;
}

/** One row of a map as colours, `top` the value of the strongest; `over`: weak values let the image through. */
function paintRow(pen, found, top, width, height, over) {
  const [h, w] = found.of.keys, small = el("canvas", {width: w, height: h}), dot = small.getContext("2d");
  const pixels = dot.createImageData(w, h), table = page.colours[found.signed ? "split" : "heat"];
  for (let k = 0; k < h * w; k++) {
    const t = clamp(found.places[k] / top, -1, 1);
    const rgb = table[Math.round(255 * (found.signed ? (t + 1) / 2 : Math.max(t, 0)))];
    pixels.data.set([...rgb, over ? 255 * .92 * Math.sqrt(Math.abs(t)) : 255], 4 * k);
  }
  dot.putImageData(pixels, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, width, height);
}

/** A frame around one patch of a grid, white on black. */
function framePatch(pen, [row, column], [rows, columns], width, height, line) {
  const ch = height / rows, cw = width / columns, inset = line / 2;
  for (const [colour, size] of [["#000c", line * 2], ["#fff", line]]) {
    pen.strokeStyle = colour; pen.lineWidth = size;
    const box = [Math.max(cw - line, line), Math.max(ch - line, line)];
    pen.strokeRect(column * cw + inset, row * ch + inset, ...box);
  }
}

/** The colours from weakest to strongest, on a canvas of 256 x 1. */
function paintColourBar(canvas, signed) {
  const pen = canvas.getContext("2d");
  page.colours[signed ? "split" : "heat"].forEach((rgb, i) => { pen.fillStyle = css(rgb); pen.fillRect(i, 0, 1, 1); });
}
