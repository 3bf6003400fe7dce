// Copying and saving: charts and attention maps as SVG and PNG, numbers as CSV and JSON.

const SAVED_STYLE = "text { font: 11px sans-serif; fill: #444 } .axis { stroke: #ddd }";
const PNG_SCALE = 3;

/** Return the numbers of a plane as rows with a head: its points by name, or those of its lines. */
function planeRows({x, y, series, each}) {
  const rows = (part, row) => series.flatMap(s => s[part].flatMap((item, i) => row(s, item, i)));
  const points = row => rows("points", (s, point) => [row(s, point)]);
  if (x.names) {
    const number = ({points}, point) => points.filter(p => p[2] === point[2]).indexOf(point) + 1;
    const ofHead = (s, point) => [s.name, point[2], number(s, point), point[1]];
    return [["series", "layer", each, y.label], ...points(ofHead)];
  }
  if (!series.some(s => s.lines.length)) {
    const head = ["series", "name", x.label, y.label];
    return [head, ...points((s, [px, py, name]) => [s.name, name, px, py])];
  }
  const ofLine = (s, line, i) => line.map(point => [s.name, i + 1, ...point]);
  return [["series", "line", x.label, y.label, "low", "high"], ...rows("lines", ofLine)];
}

/** The numbers of a chart as rows with a head, by kind: a row for each value. */
const CHART_ROWS = {
  plane: planeRows,
  bars: ({axis, groups, series}) => [
    ["series", "group", axis.label],
    ...series.flatMap(s => groups.map((group, i) => [s.name, group, s.values[i]])),
  ],
  matrix: ({x, y, rows, columns, values}) => [
    [y || "row", x || "column", "value"],
    ...rows.flatMap((row, i) => columns.map((column, j) => [row, column, values[i][j]])),
  ],
};

/** Write rows as CSV. */
function csvText(rows) {
  const cell = value => {
    const text = value === null || value === undefined ? "" : String(value);
    const special = ['"', ",", "\n"].some(mark => text.includes(mark));
    return special ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map(row => `${row.map(cell).join(",")}\n`).join("");
}

/** Return a file name made of letters and digits. */
function fileName(title, kind) {
  const stem = `${document.title} ${title}`.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  return `${stem.replace(/^-|-$/g, "").slice(0, 100)}.${kind}`;
}

/** Let the browser save a blob as a file. */
function saveBlob(name, blob) {
  const url = URL.createObjectURL(blob);
  createElement("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Save text as a file. */
const saveText = (name, text, type) => saveBlob(name, new Blob([text], {type}));

/** Return buttons by kind of file; `savers` are functions that save. */
function saveButtons(title, savers) {
  const buttons = Object.entries(savers).map(([kind, save]) => {
    const label = {type: "button", "aria-label": `Save ${title} as ${kind}`};
    const button = createElement("button", label, kind);
    button.addEventListener("click", save);
    return button;
  });
  return createElement("div", {class: "save"}, "Save ", ...buttons);
}

/** Return a button that copies the text of an element, or selects it if copying is forbidden. */
function copyButton(source) {
  const button = createElement("button", {type: "button"}, "Copy the command");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Selected: press Ctrl+C or ⌘C";
    }
  });
  return createElement("div", {class: "save"}, button);
}

/** Return an SVG with a white ground for a file, and its content. */
function blankSvg(width, height) {
  const root = createSvg("svg", {xmlns: SVG_NAMESPACE, width, height});
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  createSvg("style", {}, root).textContent = SAVED_STYLE;
  createSvg("rect", {width, height, fill: "#fff"}, root);
  return root;
}

/** Write an SVG as text, with the colours of the light page, whichever is shown. */
function svgText(root) {
  const light = [...document.styleSheets[0].cssRules].find(rule => rule.selectorText === ":root");
  const text = new XMLSerializer().serializeToString(root);
  return text.replace(/var\((--\w+)\)/g, (_, name) => light.style.getPropertyValue(name).trim());
}

/** Draw an SVG text at three times its size, and save it as PNG. */
async function savePng(name, svg) {
  const image = createElement("img", {src: `data:image/svg+xml,${encodeURIComponent(svg)}`});
  await image.decode();
  const size = {width: image.width * PNG_SCALE, height: image.height * PNG_SCALE};
  const canvas = createElement("canvas", size);
  canvas.getContext("2d").drawImage(image, 0, 0, size.width, size.height);
  canvas.toBlob(blob => saveBlob(name, blob), "image/png");
}

/** Return a chart with its title and legend as SVG text. */
function chartSvg({spec, root, width}) {
  const names = spec.series ? spec.series.map(series => series.name) : [];
  const top = 28 + 16 * names.length;
  const copy = blankSvg(width + 20, top + +root.getAttribute("height") + 12);
  drawText(copy, spec.title, 10, 20, "start", {style: "font: bold 13px sans-serif; fill: #000"});
  names.forEach((name, i) => {
    drawSwatch(copy, spec, i, 10, 34 + 16 * i);
    drawText(copy, name, 38, 38 + 16 * i);
  });
  const drawing = createSvg("g", {transform: `translate(10 ${top})`}, copy);
  drawing.append(...[...root.cloneNode(true).childNodes].filter(node => !node.matches(".cursor")));
  return svgText(copy);
}

/** Return functions that save a drawing and its numbers, by kind of file. */
function saversOf(title, svg, rows) {
  const name = kind => fileName(title, kind);
  return {
    SVG: () => saveText(name("svg"), svg(), "image/svg+xml"),
    PNG: () => savePng(name("png"), svg()),
    CSV: () => saveText(name("csv"), csvText(rows()), "text/csv"),
  };
}

/** Return what saves a chart, by kind of file. */
function chartSavers(view) {
  const {title, kind} = view.spec;
  return saversOf(title, () => chartSvg(view), () => CHART_ROWS[kind](view.spec));
}

/** Return the image and the maps as they are laid out on the page, as SVG text. */
function viewerSvg({canvas, heads}) {
  const frame = heads.getBoundingClientRect();
  const photo = canvas.getBoundingClientRect();
  const wide = frame.left > photo.right;
  const [left, top] = wide ? [photo.width + 24, 10] : [10, photo.height + 26];
  const height = wide ? Math.max(photo.height, frame.height) : top + frame.height;
  const copy = blankSvg(left + frame.width + 10, height + 20);
  const addImage = (source, x, y, {width, height}) =>
    createSvg("image", {href: source.toDataURL(), x, y, width, height}, copy);
  addImage(canvas, 10, 10, photo);
  for (const node of heads.querySelectorAll("h3, b, .tile i, .quiet, .tile canvas")) {
    const box = node.getBoundingClientRect();
    const [x, y] = [left + box.left - frame.left, top + box.top - frame.top];
    if (node.tagName === "CANVAS") addImage(node, x, y, box);
    else if (box.width) drawText(copy, node.textContent, x, y + box.height - 4);
  }
  return svgText(copy);
}

/** Return the attention of every map that is shown, from the current query, as rows with a head. */
function viewerRows(viewer) {
  const rows = [["model", "layer", "head", "query", "row", "column", "attention"]];
  for (const tile of viewer.tiles) {
    const row = tile.row();
    if (!row) continue;
    const [, columns] = row.geometry.keys;
    const names = [viewer.modelName(tile.model), viewer.layers[tile.layer].name, tile.head + 1];
    const query = queryText(viewer, tile.geometry);
    row.onGrid.forEach((value, key) => {
      const position = [Math.floor(key / columns) + 1, key % columns + 1];
      rows.push([...names, query, ...position, +value.toPrecision(6)]);
    });
  }
  return rows;
}

/** Return what saves the maps of a viewer, by kind of file. */
function viewerSavers(viewer) {
  return saversOf("attention", () => viewerSvg(viewer), () => viewerRows(viewer));
}

/** Return the texts and the table of a section. */
function sectionNumbers(section) {
  const texts = selector => [...section.querySelectorAll(selector)].map(node => node.textContent);
  const table = section.querySelector(".stack table");
  const cells = row => [...row.cells].map(cell => cell.textContent);
  return {
    title: texts("h2")[0],
    finding: texts(".finding")[0] || "",
    constants: texts(".constant"),
    table: table ? [...table.rows].map(cells) : [],
  };
}

/** Save the findings, tables and charts' numbers of the whole page as JSON. */
function savePageNumbers() {
  const lead = document.querySelector(".lead");
  const finding = lead ? lead.textContent : "";
  const sections = [...document.querySelectorAll("main section")].map(sectionNumbers);
  const numbers = {title: document.title, finding, sections, charts: page.charts};
  saveText(fileName("numbers", "json"), JSON.stringify(numbers, null, 1), "application/json");
}
