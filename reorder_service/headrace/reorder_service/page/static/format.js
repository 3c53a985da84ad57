// Numbers, times and sizes as they are read. What is null was not measured, and is said to be so.

export const NOT_MEASURED = "not measured";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const calendar = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

const known = (write) => (value) => (value === null || value === undefined ? NOT_MEASURED : write(value));

/** 1,234 */
export const count = known((value) => whole.format(value));

/** 1,234 or 12.3 or 0.0123: three digits, more where they are in front of the point. */
export const figure = known((value) => (Math.abs(value) >= 1000 ? whole : exact).format(value));

/** 41%, and 0.4% where whole ones would hide it. */
export const share = known((value) => {
  const percent = value * 100;
  return `${percent && Math.abs(percent) < 9.95 ? percent.toFixed(1) : percent.toFixed(0)}%`;
});

/** 812 ms, 1.24 s, 3 min 20 s, 2 h 5 min. */
export const seconds = known((value) => {
  const { scale, name } = unitOf(value);
  if (value < 120) return `${figure(value * scale)} ${name}`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${whole.format(Math.floor(value / 3600))} h ${Math.floor((value % 3600) / 60)} min`;
});

/** The unit in which so many seconds read well, and the factor from seconds to it. */
export function unitOf(longest) {
  if (longest >= 1 || longest === 0) return { scale: 1, name: "s" };
  return longest >= 1e-3 ? { scale: 1e3, name: "ms" } : { scale: 1e6, name: "µs" };
}

/** 212 samples/s */
export const rate = known((value) => `${figure(value)} samples/s`);

/** 1.5 GiB, 96 MiB */
export const bytes = known((value) => {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(names.length - 1, Math.floor(Math.log2(value) / 10));
  return `${figure(value / 1024 ** power)} ${names[power]}`;
});

/** The time of day of a Unix time, with its date where that is not today's. */
export const time = known((value) => {
  const [at, today] = [new Date(value * 1000), new Date()];
  return (at.toDateString() === today.toDateString() ? clock : calendar).format(at);
});

/** `1 step`, `2 steps` */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
