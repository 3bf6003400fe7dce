"use strict";
// Creating HTML and SVG elements, writing numbers, colours. Text is set as text, never as markup.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

/** Create an HTML element with properties or attributes, and children. */
function createElement(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key in node && key !== "list" && typeof value !== "string") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Create an SVG element with attributes, and append it to its parent. */
function createSvg(tag, attributes, parent = null) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.append(node);
  return node;
}

/** Append text to an SVG; `anchor` is start, middle or end. */
function drawText(parent, text, x, y, anchor = "start", attributes = {}) {
  createSvg("text", {x, y, "text-anchor": anchor, ...attributes}, parent).textContent = text;
}

/** Limit a number to a range. */
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** Write a number with four digits, a dash for null. */
function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

/** Write a number with two digits, including trailing zeros: 0.10, not 0.1. */
function formatTwoDigits(value) {
  return value && Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(2);
}

/** Return 256 colours, [red, green, blue], between some at equal steps, "rrggbb" each. */
function colourRamp(stops) {
  const colours = stops.split(" ").map(hex => hex.match(/../g).map(byte => parseInt(byte, 16)));
  return Array.from({length: 256}, (_, i) => {
    const at = i / 255 * (colours.length - 1);
    const below = Math.min(Math.floor(at), colours.length - 2);
    const mix = (from, channel) => from + (colours[below + 1][channel] - from) * (at - below);
    return colours[below].map((from, channel) => Math.round(mix(from, channel)));
  });
}

/** The colour maps magma (attention), RdBu (values around 0) and viridis (shares, depth). */
const COLOURS = {
  sequential: colourRamp(
    "000004 0b0924 20114b 3b0f70 57157e 721f81 8c2981 a8327d " +
    "c43c75 de4968 f1605d fa7f5e fe9f6d febf84 fddea0 fcfdbf",
  ),
  diverging: colourRamp(
    "053061 2065ab 4393c3 90c4dd d1e5f0 f7f6f6 fddbc7 f3a481 d6604d b1182b 67001f",
  ),
  depth: colourRamp(
    "440154 481a6c 472f7d 414487 39568c 31688e 2a788e 23888e " +
    "1f988b 22a884 35b779 54c568 7ad151 a5db36 d2e21b fde725",
  ),
};

/** Write [red, green, blue] as a CSS colour. */
const cssColour = rgb => `rgb(${rgb.join(" ")})`;

/** Return the CSS colour of a model or series by its index. */
const paletteColour = index => `var(--s${index % 6})`;

/** Return the index of a chart's series; a model has the same one in all charts of the page. */
function seriesIndex(spec, index) {
  const models = page.viewers.length ? page.viewers[0].models : [];
  const allModels = spec.series.every(series => models.includes(series.name));
  return allModels ? models.indexOf(spec.series[index].name) : index;
}

/** Return the colour of a chart's series. */
function seriesColour(spec, index) {
  if (!spec.ordered) return paletteColour(seriesIndex(spec, index));
  const share = index / Math.max(1, spec.series.length - 1);
  return cssColour(COLOURS.depth[Math.round(225 - 150 * share)]);
}

const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2"];

/** Return the dash pattern of a series by its index; after six colours the patterns begin later. */
const paletteDash = index => DASHES[(index + Math.floor(index / 6)) % 6];

/** Return the dash pattern of a series, which tells it apart where its colour does not. */
const seriesDash = (spec, index) => spec.ordered ? "" : paletteDash(seriesIndex(spec, index));
