// The curves of a run. A point is [step, value]; a value that is no number makes a gap.
const MOST_KEPT = 4000, MOST_DRAWN = 2000
export const LEFT = 54, RIGHT = 8, HEIGHT = 190
const real = ([, value]) => Number.isFinite(value)

export class Curves { // of the lines of metrics.jsonl and events.jsonl
  constructor() {
    Object.assign(this, { loss: [], evaluations: new Map(), learning_rate: [], grad_norm: [] })
  }
  take(of, line) {
    if (!Number.isFinite(line.step)) return
    if (of === 'metrics' && 'loss' in line)
      for (const key of ['loss', 'learning_rate', 'grad_norm']) if (key in line) this[key] = added(this[key], line.step, line[key])
    if (of === 'events' && line.what === 'evaluation') for (const key of Object.keys(line).filter(key => key.startsWith('eval_')))
      this.evaluations.set(key, added(this.evaluations.get(key) ?? [], line.step, line[key]))
  }
}
export function added(points, step, value, most = MOST_KEPT) { // a run that goes back repeats steps
  while (points.length && points.at(-1)[0] >= step) points.pop()
  points.push([step, value])
  return points.length > most ? thinned(points, most / 2) : points
}
export function thinned(points, most = MOST_DRAWN) { // with the ends, and the lowest, the highest and a gap of each part
  if (points.length <= most) return points
  const long = Math.ceil(points.length / Math.floor((most - 2) / 3)), kept = new Set([points[0], points.at(-1)])
  for (let from = 0; from < points.length; from += long) {
    const part = points.slice(from, from + long), [low, high] = extent(part.filter(real).map(([, value]) => value))
    for (const fits of [([, value]) => value === low, ([, value]) => value === high, point => !real(point)]) kept.add(part.find(fits))
  }
  return points.filter(point => kept.has(point))
}
export function within(points, [from, to]) { // and a neighbour on each side, so that lines go on to the edges
  const first = points.findIndex(([step]) => step >= from), after = points.findIndex(([step]) => step > to)
  return first < 0 ? [] : points.slice(Math.max(0, first - 1), after < 0 ? undefined : after + 1)
}
export function nearest(points, step) {
  return points.reduce((best, point) => !best || Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best, null)
}
export function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity])
}
export function ticks(low, high, most) {
  const rough = (high - low) / most || 1, unit = 10 ** Math.floor(Math.log10(rough)), step = unit * [1, 2, 5, 10].find(k => k * unit >= rough)
  const from = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - from + 1
  return Array.from({ length: count }, (_, k) => Number(((from + k) * step).toPrecision(9)))
}
export function figure(value) {
  return !Number.isFinite(value) ? 'not finite' : value && Math.abs(value) < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, 'e')
    : Number(value.toPrecision(4)).toLocaleString('en', { maximumFractionDigits: 6 })
}
export class Scale { // of steps, over a chart of this width
  constructor([from, to], width) { Object.assign(this, { from, to, wide: width - LEFT - RIGHT }) }
  x(step) { return LEFT + (step - this.from) / (this.to - this.from || 1) * this.wide }
  step(x) { return this.from + Math.min(1, Math.max(0, (x - LEFT) / this.wide)) * (this.to - this.from) }
  zoom(x, other) { // the steps between two places; null if these are too close to be meant
    const steps = [this.step(x), this.step(other)].sort((a, b) => a - b)
    return Math.abs(x - other) < 6 || steps[1] - steps[0] < 1 ? null : steps
  }
}
