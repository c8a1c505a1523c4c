// Numbers with units as quantities.py writes them, and small elements.
const data = JSON.parse(document.getElementById("data").textContent);

function figures(value) {
  if (value === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value) * 1.0005)));
  return value.toFixed(Math.min(digits, 6));
}

function scaled(value, unit) {
  for (const [size, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size * 0.9995) return `${figures(value / size)} ${prefix}${unit}`;
  }
  return `${figures(value)} ${unit}`;
}

function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size >= 120) {
    const whole = Math.round(size), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
    return (value < 0 ? "-" : "") + (hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${whole % 60} s`);
  }
  if (size >= 0.9995) return `${figures(value)} s`;
  return size >= 0.9995e-3 ? `${figures(value * 1e3)} ms` : `${figures(value * 1e6)} µs`;
}

function share(value) {
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  return `${(value * 100).toFixed(value === 0 || Math.abs(value) >= 0.0995 ? 0 : 1)} %`;
}

function said(value, form) {
  switch (form) {
    case "s": return seconds(value);
    case "share": return share(value);
    case "count": {
      const whole = (Number.isInteger(value) || Math.abs(value) >= 100) && Math.abs(value) < 1e6;
      return whole ? Math.round(value).toLocaleString("en") : scaled(value, "").trim();
    }
    case "1/s": return scaled(value, "/s");
    case "bytes": return scaled(value, "B");
    case "bytes/s": return scaled(value, "B/s");
    case "C": return scaled(value, "°C");
    default: return scaled(value, form);
  }
}

// For axes, where values are round: without zeros at the end.
const short = (text) => text.replace(/\.0+(?=\s|$)/, "").replace(/(\.\d*[1-9])0+(?=\s|$)/, "$1");

const SMALLEST = 1e-300, MOST_MARKS = 100;

// Round values from one to another, each once. They are counted, not added up: beyond 2 ** 53 adding 1 changes nothing.
function marks(from, to, each) {
  const first = Math.ceil(from / each), count = Math.min(Math.floor(to / each) - first + 1, MOST_MARKS);
  const found = Array.from({ length: Math.max(0, count) }, (_, index) => (first + index) * each);
  return found.filter((value, index) => index === 0 || value > found[index - 1]);
}

// A value at or above `most`, and steps up to it, that are easy to read: 1, 2 or 5 times a power of ten.
function ticks(most, count) {
  if (!(most > SMALLEST)) return { top: 1, each: 1 };
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  const each = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  return { top: Math.ceil(most / each - 1e-9) * each, each };
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

// Black or white, whichever is easier to read on a colour `#rrggbb`: one of them always has a contrast of 4.5.
function readable(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000000" : "#ffffff";
}

function drawn(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Calls `draw` when the node gets another width, and when the page turns light or dark.
function redrawn(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (node.clientWidth !== width) { width = node.clientWidth; draw(); }
  }).observe(node);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
