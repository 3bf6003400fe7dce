// Scales and ticks of charts, and how their numbers and names are written.

/** Return a function that maps low..high to the coordinates from..to, with about `count` ticks. */
function linearScale([low, high], from, to, count) {
  const scale = value => from + (value - low) / (high - low) * (to - from);
  return Object.assign(scale, {ticks: ticksBetween(low, high, count)});
}

/** Return the power of ten below the distance between about `count` ticks. */
const tickPower = (low, high, count) => 10 ** Math.floor(Math.log10((high - low) / count));

/** Return about `count` ticks between two values, three or more. */
function ticksBetween(low, high, count) {
  const power = tickPower(low, high, count);
  let ticks = [];
  for (const factor of [10, 5, 2, 1, .5]) {
    const step = factor * power;
    const margin = 1e-9 * step;
    ticks = ticksAround(low, high, step).filter(t => t >= low - margin && t <= high + margin);
    if (ticks.length >= Math.max(3, count - 1)) break;
  }
  return ticks;
}

/** Return the ticks at multiples of a step that enclose a range. */
function ticksAround(low, high, step) {
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  const count = last - first + 1;
  return Array.from({length: count}, (_, i) => +((first + i) * step).toPrecision(12));
}

/**
 * Return the ticks of an axis that begins and ends on a tick: the widest apart of which at least
 * three lie inside the range, which covers at least 70 % of the axis.
 */
function axisTicks(low, high, count) {
  const power = tickPower(low, high, count);
  const inside = tick => tick >= low - 1e-9 * power && tick <= high + 1e-9 * power;
  for (const factor of [10, 5, 2, 1]) {
    const ticks = ticksAround(low, high, factor * power);
    const covered = (high - low) / (ticks.at(-1) - ticks[0]);
    if (ticks.filter(inside).length >= 3 && covered >= .7) return ticks;
  }
  return ticksAround(low, high, power / 2);
}

/** Return a scale that begins and ends on a tick, with its ticks. */
function axisScale([low, high], count, from, to) {
  const ticks = axisTicks(low, high, count);
  return Object.assign(linearScale([ticks[0], ticks.at(-1)], from, to, count), {ticks});
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

/** Return the number of letters of the longest of some names. */
const longestName = names => Math.max(...names.map(name => name.length));

/** Break a name at spaces and after _ . - / into lines of at most `letters`, longer parts whole. */
function wrapName(name, letters) {
  const lines = [""];
  for (const part of name.match(/[^\s_.\/-]*[\s_.\/-]*/g)) {
    const line = lines.at(-1) + part;
    if (line.trimEnd().length <= letters || !lines.at(-1)) lines[lines.length - 1] = line;
    else lines.push(part);
  }
  return lines.map(line => line.trimEnd());
}
