// Attention maps as stored in the page, and single rows of them: what one query attends to.

/** Decompress one model's maps of one layer and image: 256 levels a row, between the row's own ends. */
async function unpackMaps(id, of, windows) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const nq = of.prefix + of.kept[0] * of.kept[1], split = of.heads * nq * 2;
  const nk = windows ? windows[0].length : of.prefix + of.keys[0] * of.keys[1];
  const numbers = new DataView(buffer), ranges = new Float32Array(split);
  for (let i = 0; i < split; i++) ranges[i] = numbers.getFloat32(4 * i, true);
  return {ranges, levels: new Uint8Array(buffer, 4 * split), nq, nk};
}

/** One row of a map: attention of a query to the prefix tokens and to every grid position (0 outside its window). */
function attentionRow(of, maps, windows, head, {index, place}) {
  const at = head * maps.nq + index, low = maps.ranges[2 * at], high = maps.ranges[2 * at + 1];
  const row = new Float32Array(of.prefix + of.keys[0] * of.keys[1]), start = at * maps.nk;
  const number = windows && place[0] * of.queries[1] + place[1];
  const window = windows && windows.find(w => w.includes(number));
  for (let k = 0; k < maps.nk; k++) {
    const key = window ? window[k] : k;
    if (key >= 0) row[key] = low + maps.levels[start + k] * (high - low) / 255;
  }
  return {row, of, places: row.subarray(of.prefix), signed: of.signed};
}

/** The difference of two rows on the same grid, or null. */
function rowDifference(a, b) {
  if (!a || !b || a.row.length !== b.row.length || a.of.keys[0] !== b.of.keys[0]) return null;
  const row = a.row.map((v, k) => v - b.row[k]);
  return {row, of: a.of, places: row.subarray(a.of.prefix), signed: true};
}

/** Two digits, always: 0.10, not 0.1. */
const twoDigits = value => value && Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(2);

/** The largest absolute value of several rows. */
function peakOf(rows) {
  const peaks = rows.filter(Boolean).map(r => r.places.reduce((m, v) => Math.max(m, Math.abs(v)), 0));
  return Math.max(1e-12, ...peaks);
}

/** Maps of one viewer by layer, model and image, unpacked when first asked for; `ready` is called when one arrives. */
class MapStore {
  constructor(number, data, ready) {
    Object.assign(this, {number, data, ready, found: new Map()});
  }

  windows(of) {
    return of.windows === null ? null : this.data.windows[of.windows];
  }

  get(layer, model, image) {
    const of = this.data.layers[layer].of[model];
    if (!of) return null;
    const id = `maps-${this.number}-${of.maps}-${image}`;
    if (!this.found.has(id)) {
      this.found.set(id, null);
      unpackMaps(id, of, this.windows(of)).then(maps => { this.found.set(id, maps); this.ready(); });
    }
    return this.found.get(id);
  }

  row(layer, model, head, image, query) {
    const of = this.data.layers[layer].of[model], maps = this.get(layer, model, image);
    return of && maps && head < of.heads ? attentionRow(of, maps, this.windows(of), head, query) : null;
  }

  get complete() {
    return [...this.found.values()].every(Boolean);
  }
}
