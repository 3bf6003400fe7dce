// Attention maps as the page stores them, and single rows of them: what one query attends to.
// A row has the rounding of its values; values up to its `floor` are drawn as no difference.
// A layer's geometry is the grid of its queries and keys, and which queries are stored.

/** Unpack one model's maps of one layer and image: 256 levels between the ends of each row. */
async function unpackMaps(id, geometry, windows) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const {heads, prefix, stored, keys} = geometry;
  const queryCount = prefix + stored[0] * stored[1];
  const keyCount = windows ? windows[0].length : prefix + keys[0] * keys[1];
  const rangeCount = heads * queryCount * 2;
  const numbers = new DataView(buffer);
  const ranges = Float32Array.from({length: rangeCount}, (_, i) => numbers.getFloat32(4 * i, true));
  return {ranges, levels: new Uint8Array(buffer, 4 * rangeCount), queryCount, keyCount};
}

/** Return one row of a map: attention of a query to all tokens, 0 outside of its window. */
function readRow(geometry, maps, windows, head, {index, position}) {
  const {prefix, queries, keys, signed} = geometry;
  const rowNumber = head * maps.queryCount + index;
  const [low, high] = maps.ranges.subarray(2 * rowNumber, 2 * rowNumber + 2);
  const query = windows && position[0] * queries[1] + position[1];
  const window = windows && windows.find(members => members.includes(query));
  const values = new Float32Array(prefix + keys[0] * keys[1]);
  for (let k = 0; k < maps.keyCount; k++) {
    const key = window ? window[k] : k;
    const level = maps.levels[rowNumber * maps.keyCount + k];
    if (key >= 0) values[key] = low + level * (high - low) / 255;
  }
  const rounding = (high - low) / 510;
  return {values, geometry, onGrid: values.subarray(prefix), signed, rounding, floor: -1};
}

/** Return the largest absolute value of several rows on the grid. */
function largestValue(rows) {
  const largest = row => row.onGrid.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  return Math.max(1e-12, ...rows.filter(Boolean).map(largest));
}

/** The maps of one viewer, each unpacked when first asked for. */
class MapStore {
  /** Create a store; `onReady` is called whenever maps have been unpacked. */
  constructor(viewerNumber, data, onReady) {
    Object.assign(this, {viewerNumber, data, onReady, unpacked: new Map()});
  }

  /** Return the windows of a layer as lists of keys, null for a layer without windows. */
  windows(geometry) {
    return geometry.windows === null ? null : this.data.windows[geometry.windows];
  }

  /** Return the maps of a layer, null until they are unpacked. */
  maps(geometry, image) {
    const id = `maps-${this.viewerNumber}-${geometry.maps}-${image}`;
    if (!this.unpacked.has(id)) {
      this.unpacked.set(id, null);
      unpackMaps(id, geometry, this.windows(geometry)).then(maps => {
        this.unpacked.set(id, maps);
        this.onReady();
      });
    }
    return this.unpacked.get(id);
  }

  /** Return a head's row for a query, null while there is none. */
  row(layer, model, head, image, query) {
    const geometry = this.data.layers[layer].byModel[model];
    const maps = geometry && this.maps(geometry, image);
    if (!maps || head >= geometry.heads) return null;
    return readRow(geometry, maps, this.windows(geometry), head, query);
  }

  /** True if all maps asked for so far are unpacked. */
  get complete() {
    return [...this.unpacked.values()].every(Boolean);
  }
}
