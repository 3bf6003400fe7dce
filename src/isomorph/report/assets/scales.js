// Scales and ticks of charts, and how their numbers and names are written.

/** Return a function that maps the values low..high to the coordinates from..to. */
function linearScale(low, high, from, to) {
  const scale = value => from + (value - low) / (high - low) * (to - from);
  return Object.assign(scale, {low, high});
}

/** Return the smallest and largest of some values without nulls; `floor` is included if given. */
function extent(values, floor = null) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!isFinite(low)) return [0, 1];
  if (floor !== null) low = Math.min(low, floor);
  return low === high ? [low - .5, high + .5] : [low, high];
}

/** Return the distance between about `count` ticks: 1, 2 or 5 times a power of ten. */
function tickStep(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(factor => factor * power).find(step => step >= rough);
}

/** Return the ticks between two values. */
function ticksBetween(low, high, count) {
  const step = tickStep(low, high, count);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    ticks.push(+(i * step).toPrecision(12));
  }
  return ticks;
}

/** Widen a range of values so that it ends on ticks. */
function alignToTicks(low, high, count) {
  const step = tickStep(low, high, count);
  const ends = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  return ends.map(value => +value.toPrecision(12));
}

/** Return the largest absolute value, 0 for none. */
function largestAbsolute(values) {
  return Math.max(0, ...values.filter(Number.isFinite).map(Math.abs));
}

/** True if numbers up to `largest` are written with an exponent. */
const needsExponent = largest => largest > 0 && (largest < 1e-4 || largest >= 1e6);

/** Return a function that writes a chart's numbers alike: the largest one with three digits. */
function sameDecimals(values) {
  const largest = largestAbsolute(values);
  if (needsExponent(largest)) return value => value.toExponential(2);
  if (largest > 100) return value => value.toFixed(0); // but 100.0 %, next to 99.9 %
  const decimals = largest ? clamp(2 - Math.floor(Math.log10(largest)), 1, 6) : 1;
  return value => value.toFixed(decimals);
}

/** Return a function that writes ticks with as many decimals as the step between them has. */
function tickFormat(ticks) {
  const largest = largestAbsolute(ticks);
  const exponent = value => Math.floor(Math.log10(value) + 1e-9);
  const step = ticks.length > 1 ? exponent(ticks[1] - ticks[0]) : exponent(largest || 1) - 1;
  if (needsExponent(largest)) {
    const digits = Math.max(0, exponent(largest) - step);
    return value => value ? value.toExponential(digits) : "0";
  }
  return value => value.toFixed(clamp(-step, 0, 12));
}

/** Drop the parts that dotted names share at both ends: blocks.0.attn, blocks.1.attn -> 0, 1. */
function shortenNames(names) {
  if (names.length < 2) return {names, pattern: ""};
  const parts = names.map(name => name.split("."));
  const shortest = Math.min(...parts.map(p => p.length));
  const [first] = parts;
  let head = 0;
  let tail = 0;
  while (head < shortest - 1 && parts.every(p => p[head] === first[head])) head++;
  while (tail < shortest - 1 - head && parts.every(p => p.at(-1 - tail) === first.at(-1 - tail))) {
    tail++;
  }
  const shared = [...first.slice(0, head), "*", ...(tail ? first.slice(-tail) : [])];
  const short = parts.map(p => p.slice(head, p.length - tail).join("."));
  return {names: short, pattern: head || tail ? shared.join(".") : ""};
}
