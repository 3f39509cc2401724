const token = location.hash.slice(1) || sessionStorage.getItem('token') || ''
sessionStorage.setItem('token', token) // a reload keeps it, and the address bar does not show it
history.replaceState(null, '', '/')
const ask = (path, method = 'GET') => fetch(path, { method, headers: { Authorization: 'Bearer ' + token } })
const filled = (element, about, inside) => { // what is inside is text, never markup
  for (const [name, value] of Object.entries(about)) element.setAttribute(name, value)
  element.append(...inside.filter(part => part))
  return element
}
const make = (tag, about, ...inside) => filled(document.createElement(tag), about, inside)
const draw = (tag, about, ...inside) => filled(document.createElementNS('http://www.w3.org/2000/svg', tag), about, inside)
const div = (kind, ...inside) => make('div', { class: kind }, ...inside), dim = text => make('span', { class: 'dim' }, text)
const write = (x, y, text, anchor = 'start', kind = '') => draw('text', { x, y, 'text-anchor': anchor, class: kind }, text)
const shown = (x, unit = '') => !Number.isFinite(x) ? '–' : (Math.abs(x) >= 99.95 ? Math.round(x).toLocaleString('en') : x.toPrecision(3)) + unit
const size = bytes => bytes >= 2 ** 30 ? shown(bytes / 2 ** 30, ' GiB') : shown(bytes / 2 ** 20, ' MiB')
const clock = s => [s / 3600, s / 60 % 60, s % 60].map(part => String(Math.floor(part)).padStart(2, '0')).join(':')
const named = owner => owner === 'local' ? 'coordinator' : owner === 'direct' ? 'other workers' : 'worker ' + owner
const short = name => [...name].length > 13 ? [...name].slice(0, 12).join('') + '…' : name
const legend = entries => div('legend', ...entries.map(([kind, text]) => make('span', {}, make('i', { class: kind }), text)))
const KINDS = { forward: 'forward', backward: 'backward', forward_backward: 'forward and backward', commit: 'weights change' }
const AWAY = { 'worker lost': 1, 'worker left': 1, 'worker hangs': 1, 'worker back': 0, 'worker connected': 0 }
const ENDS = { 'run started': '', 'run resumed': '', 'run finished': 'finished', 'run stopped': 'stopped' }
const ISLANDS = { 'island lost': 1, 'island left': 1, 'waiting for islands': 1, islands: 0 }
const NOTE_MS = 20000
class Run {
  constructor(number, title) {
    Object.assign(this, { number, live: {}, told: '' }).clear()
    for (const part of ['pill', 'note', 'figures', 'chain', 'others', 'flow', 'loss']) this[part] = div(part)
    for (const [part, tag] of [['happened', 'ul'], ['said', 'ul'], ['bar', 'progress']]) this[part] = make(tag, {})
    this.buttons = ['Pause', 'Resume', 'Checkpoint', 'Stop'].map(label => make('button', { 'data-do': label.toLowerCase() }, label))
    for (const button of this.buttons) button.onclick = () => this.act(button.dataset.do)
    const box = (heading, ...inside) => make('section', {}, make('h2', {}, heading), ...inside)
    Object.assign(this, { flowBox: box('A step as it flowed', this.flow), saidBox: box('Samples', this.said) })
    document.getElementById('runs').append(make('article', {},
      make('header', {}, make('h1', {}, title), this.pill, make('nav', {}, ...this.buttons)), this.note, this.figures, this.bar,
      box('Machines', this.chain, this.others), this.flowBox, box('Loss', this.loss), div('lists', box('Events', this.happened), this.saidBox)))
  }
  clear() { Object.assign(this, { points: [], evaluations: new Map(), events: [], samples: [], away: new Map(), waits: new Set(), last: {}, end: '' }) }
  later() { this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.render() }) }
  async act(action) {
    if (action === 'stop' && !confirm('Stop the run after this step? It saves its state first.')) return
    const answer = await ask(`/do/${this.number}/${action}`, 'POST').catch(() => null)
    this.say(answer?.ok ? '' : await answer?.text() || 'The run does not answer.')
  }
  say(text) {
    clearTimeout(this.fades)
    this.told = text
    this.fades = setTimeout(() => this.say(''), NOTE_MS)
    this.later()
  }
  lose() {
    if (!['finished', 'stopped', 'failed', 'ended'].includes(this.live.state)) this.live.state = 'out of reach'
    this.later()
  }
  take({ of, line, ...news }) {
    this.later()
    if (news.anew) this.clear()
    if (news.noted > this.live.noted) this.say(news.note ?? this.live.note)
    if (!of) return Object.assign(this.live, news)
    if (of === 'samples') this.samples = [line, ...this.samples.filter(one => one.step <= line.step)].slice(0, 60)
    if (of === 'metrics' && 'loss' in line) {
      while (this.points.length && this.points.at(-1)[0] >= line.step) this.points.pop()
      this.points.push([line.step, line.loss])
      if (this.points.length > 4096) this.points = this.points.filter((_, k) => k % 2)
      this.last = line
      if (line.step > this.lostAt) this.waits.clear() // it goes on without them
    }
    if (of !== 'events') return
    this.events = [line, ...this.events].slice(0, 200)
    this.end = ENDS[line.what] ?? this.end
    if (this.end === 'stopped' && !['StoppedEarly', undefined].includes(line.kind)) this.end = 'failed'
    this.live.total = line.total_steps ?? this.live.total
    if (line.what in AWAY) this.away.set(String(line.worker), AWAY[line.what] && (line.reason || line.what))
    const whom = line.what in ISLANDS ? 'other islands' : named(line.worker), waits = AWAY[line.what] ?? ISLANDS[line.what]
    if (waits) this.waits.add(whom) && (this.lostAt = line.step)
    else if (waits === 0) this.waits.delete(whom)
    else if (line.what in ENDS || line.what === 'plan changed') this.waits.clear()
    for (const key of Object.keys(line).filter(key => line.what === 'evaluation' && key.startsWith('eval_')))
      this.evaluations.set(key, [...(this.evaluations.get(key) ?? []).filter(point => point[0] < line.step), [line.step, line[key]]])
  }
  render() {
    const { last, live } = this, ended = this.end || (this.events.length ? 'ended' : 'not begun'), waits = [...this.waits].join(', ')
    const state = live.state === 'ended' ? ended : live.state === 'running' && waits ? 'waiting' : live.state || 'connecting'
    const goes = this.goes = ['running', 'waiting', 'pausing', 'paused', 'saving'].includes(state), hidden = state.startsWith('paus') ? 'pause' : 'resume'
    this.pill.textContent = state
    this.pill.className = 'pill ' + state.replaceAll(' ', '')
    this.note.textContent = this.told || live.why || (goes && waits ? `Waiting for ${waits}.` : goes && !live.steers ? 'With training.page, the run can be paused and saved here.' : '')
    for (const button of this.buttons) {
      button.disabled = !goes || (button.dataset.do !== 'stop' && !live.steers)
      button.hidden = button.dataset.do === hidden
    }
    const figure = (label, text) => div('', make('b', {}, text), dim(label)), left = live.total - last.step
    this.figures.replaceChildren(figure('step', `${last.step ?? 0} / ${live.total ?? '–'}`), figure('loss', shown(last.loss)),
      ...[...this.evaluations].map(([key, points]) => figure(key.replaceAll('_', ' '), shown(points.at(-1)[1]))),
      figure((live.unit || 'tokens') + ' per second', shown(last.tokens_per_second)), figure('per step', shown(last.step_seconds, ' s')),
      figure('to go', goes && !waits && left >= 0 ? clock(left * last.step_seconds) : '–'), ...last.island ? [figure('islands', last.island.members.join(', '))] : [])
    Object.assign(this.bar, { max: live.total || 1, value: last.step || 0 })
    for (const part of ['Machines', 'Flow']) this['render' + part]()
    chart(this.loss, [['loss', this.points], ...this.evaluations])
    const about = line => line.text || Object.entries(line).filter(([key, value]) => value !== '' && value !== null && !['time', 'step', 'process'].includes(key))
      .map(([key, value]) => ['what', 'action', 'reason'].includes(key) ? value : `${key} ${Number.isFinite(value) && value % 1 ? shown(value) : value}`).join(', ')
    const at = line => dim(new Date(line.time).toLocaleTimeString('en-GB') + (line.step ? ` step ${line.step} ` : ' '))
    this.happened.replaceChildren(...this.events.map(line => make('li', { class: AWAY[line.what] ? 'away' : '' }, at(line), about(line))))
    this.said.replaceChildren(...this.samples.map(one => make('li', {}, dim(`step ${one.step} ${one.prompt} `), one.text)))
    this.saidBox.hidden = !this.samples.length
  }
  renderMachines() {
    const { last: { stages = [], step_seconds: seconds }, live: { machines, flow } } = this, sent = new Map(), found = new Map()
    for (const one of machines?.length ? machines : stages) // perhaps several of one process
      (found.get(one.owner) ?? found.set(one.owner, { ...one, layers: [] }).get(one.owner)).layers.push(...one.layers ?? [])
    const pair = (...owners) => JSON.stringify(owners.map(String))
    const add = (from, to, bytes, s) => sent.set(pair(from, to), (sent.get(pair(from, to)) ?? 0) + bytes * 8e-6 / s)
    if (flow) for (const [owner, kind, , , , peer, bytes] of flow.spans) if (kind === 'send') add(owner, peer, bytes, span(flow)[1])
    if (!flow) for (const { owner, bytes_in: received, bytes_out: given, direct_bytes_out: direct } of stages)
      for (const [from, to, bytes] of [['local', owner, given], [owner, 'local', received], [owner, 'direct', direct]]) add(from, to, bytes, seconds)
    const rate = (from, to, sign, mbit = sent.get(pair(from, to))) =>
      sent.delete(pair(from, to)) && mbit ? make('span', {}, sign + shown(mbit, ' Mbit/s')) : null
    const row = (label, text) => text ? div('', dim(label), text) : null, owners = [...found.keys()]
    const cards = owners.flatMap((owner, k) => {
      const one = found.get(owner), own = stages.filter(stage => stage.owner === owner), away = this.away.get(String(owner))
      const busy = own.reduce((sum, stage) => sum + stage.busy_s, 0), used = Math.max(0, ...own.map(stage => stage.peak_memory))
      const memory = used ? size(used) : one.planned ? 'about ' + size(one.planned) : ''
      return [k ? div('edge', rate(owners[k - 1], owner, '→ '), rate(owner, owners[k - 1], '← ')) : null, div('machine',
        div('', make('b', {}, named(owner)), make('span', { class: away ? 'away' : 'here' }, away ? 'away' : this.goes ? 'here' : '')), row('host', one.host),
        row('layers', one.layers.map(text => text.replace(/layers? /, '')).join(', ')), row('device', one.device),
        row('memory', memory && memory + (one.memory ? ' of ' + size(one.memory) : '')),
        row('busy', seconds && shown(100 * busy / seconds, ' %')), row('why', away))]
    })
    this.chain.replaceChildren(...cards.filter(card => card))
    this.others.replaceChildren(...[...sent].filter(([, mbit]) => mbit).map(([ends, mbit]) =>
      make('span', {}, JSON.parse(ends).map(named).join(' → ') + ': ' + shown(mbit, ' Mbit/s'))))
  }
  renderFlow() {
    const { flow, machines = [] } = this.live, width = this.flow.clientWidth || 300, left = 84
    this.flowBox.hidden = !flow
    if (!flow || (flow === this.drawn && width === this.width)) return
    Object.assign(this, { drawn: flow, width })
    const [first, seconds] = span(flow), rows = machines.map(one => one.owner), height = rows.length * 26 + 18
    const svg = draw('svg', { height, viewBox: `0 0 ${width} ${height}` }), x = s => left + (s - first) / seconds * (width - left)
    rows.forEach((owner, k) => svg.append(write(0, k * 26 + 15, short(named(owner)))))
    for (const [owner, kind, from, to, batch] of flow.spans.filter(([, kind]) => kind in KINDS)) {
      const y = rows.indexOf(owner) * 26, wide = Math.max(1, x(to) - x(from) - 1), text = batch < 0 ? '' : String(batch)
      const about = draw('title', {}, `${KINDS[kind]} ${text}: ${shown(1e3 * (to - from), ' ms')}`)
      svg.append(draw('rect', { x: x(from), y, width: wide, height: 22, rx: 2, class: kind }, about))
      if (wide > 9 * text.length + 6) svg.append(write(x(from) + 4, y + 15, text, 'start', 'batch'))
    }
    svg.append(write(left, height - 4, `step ${flow.step}`), write(width, height - 4, shown(seconds, ' s'), 'end'))
    const sweep = div('sweep')
    sweep.style.animationDuration = Math.max(3, seconds) + 's'
    this.flow.replaceChildren(div('drawn', svg, sweep), legend(Object.entries(KINDS)))
  }
}
function span({ spans }) { // when a recorded step began, and its seconds
  const [first, end] = spans.reduce(([from, to], one) => [Math.min(from, one[2]), Math.max(to, one[3])], [Infinity, -Infinity])
  return [first, end - first]
}
function ticks(low, high, most) {
  const rough = (high - low) / most || 1, unit = 10 ** Math.floor(Math.log10(rough)), step = unit * [1, 2, 5, 10].find(k => k * unit >= rough)
  const from = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - from + 1
  return Array.from({ length: count }, (_, k) => Number(((from + k) * step).toPrecision(9)))
}
function chart(place, curves) {
  const width = place.clientWidth || 300, height = 260, left = 46, bottom = height - 24, isFinite = point => point.every(Number.isFinite)
  const all = curves.flatMap(([, points]) => points).filter(isFinite)
  if (!all.length) return place.replaceChildren(dim('No step is done yet.'))
  const range = k => all.reduce(([low, high], point) => [Math.min(low, point[k]), Math.max(high, point[k])], [Infinity, -Infinity])
  const [first, final] = range(0), [low, high] = range(1), y = value => bottom - (value - low) / (high - low || 1) * (bottom - 12)
  const x = step => left + (step - first) / (final - first || 1) * (width - left - 8)
  const svg = draw('svg', { height, viewBox: `0 0 ${width} ${height}` })
  for (const at of ticks(low, high, 5)) svg.append(draw('line', { x1: left, x2: width - 8, y1: y(at), y2: y(at) }),
    write(left - 8, y(at) + 4, at.toLocaleString('en'), 'end'))
  for (const at of ticks(first, final, Math.max(2, width / 110)).filter(Number.isInteger))
    svg.append(write(x(at), height - 5, at.toLocaleString('en'), 'middle'))
  curves.forEach(([label, points], k) => {
    const path = points.map((point, n) => !isFinite(point) ? '' :
      `${n && isFinite(points[n - 1]) ? 'L' : 'M'}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join('')
    const marks = k || points.length === 1 ? points.filter(isFinite) : []
    svg.append(draw('g', { class: 'curve' + k % 4 }, draw('path', { d: path }), ...marks.map(([step, value]) =>
      draw('circle', { cx: x(step), cy: y(value), r: 3.5 }, draw('title', {}, `${label} ${shown(value)} after step ${step}`)))))
  })
  place.replaceChildren(svg, legend(curves.map(([label], k) => ['curve' + k % 4, label.replaceAll('_', ' ')])))
}
const answer = await ask('/runs').catch(() => null), names = answer?.ok ? await answer.json() : []
document.getElementById('runs').replaceChildren(names.length ? '' : dim('This is no whole address of a page; hetero watch prints it.'))
document.title = names.join(', ') + ' – hetero'
const runs = names.map((name, number) => new Run(number, name))
addEventListener('resize', () => runs.forEach(run => run.later()))
while (runs.length) { // in one stream for all runs: a browser opens six at most
  try {
    const answer = await ask('/news'), reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
    if (!answer.ok) throw Error()
    for (const run of runs) run.clear()
    for (let rest = '', read; !(read = await reader.read()).done;) {
      const lines = (rest + read.value).split('\n')
      rest = lines.pop()
      for (const line of lines) try { runs[line.split(' ', 1)].take(JSON.parse(line.slice(line.indexOf(' ')))) } catch { } // a damaged line
    }
  } catch { } // and try again
  for (const run of runs) run.lose()
  await new Promise(done => setTimeout(done, 2000))
}
