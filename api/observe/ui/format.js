// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);

export const pace = (number) => (number < 100 ? tenth : whole).format(number);

export const share = (part, all) => (all ? `${whole.format((100 * part) / all)} %` : "–");

export function seconds(value) {
  if (value < 0.01) return `${tenth.format(value * 1000)} ms`;
  if (value < 1) return `${whole.format(value * 1000)} ms`;
  return value < 100 ? `${tenth.format(value)} s` : `${whole.format(value)} s`;
}

export function ago(value) {
  return value < 60 ? `${Math.floor(value)} s ago` : `${whole.format(Math.floor(value / 60))} min ago`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  // From 1000 on the next unit, so that there are never more than three digits.
  const power = units.findIndex((_, each) => value < 1000 * 1024 ** each);
  const scaled = value / 1024 ** power;
  return `${(power && scaled < 100 ? tenth : whole).format(scaled)} ${units[power]}`;
}
