// Formats numbers for people.

const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => integer.format(number);

export const pace = (number) => (number < 100 ? tenth : integer).format(number);

export const share = (part, all) => (all ? `${integer.format((100 * part) / all)} %` : "–");

export function seconds(value) {
  if (value < 0.01) return `${tenth.format(value * 1000)} ms`;
  if (value < 1) return `${integer.format(value * 1000)} ms`;
  return value < 100 ? `${tenth.format(value)} s` : `${integer.format(value)} s`;
}

export function ago(value) {
  return value < 60 ? `${Math.floor(value)} s ago` : `${integer.format(Math.floor(value / 60))} min ago`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  // Use the next unit from 1000 on, so that there are at most three digits.
  const power = units.findIndex((_, each) => value < 1000 * 1024 ** each);
  const scaled = value / 1024 ** power;
  return `${(power && scaled < 100 ? tenth : integer).format(scaled)} ${units[power]}`;
}
