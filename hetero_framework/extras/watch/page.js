import { Curves, HEIGHT, LEFT, RIGHT, Scale, extent, figure, nearest, thinned, ticks, within } from './curves.js'
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
const NOTE_MS = 20000, MOST_SAMPLED = 100, MOST_MARKED = 60
const CHARTS = { loss: 'Loss', evaluation: 'Evaluation loss', learning_rate: 'Learning rate', grad_norm: 'Gradient norm' }
class Chart {
  constructor(run, key) {
    Object.assign(this, { run, key, drag: null, told: dim(''), plot: div('plot'), legend: div('') })
    this.box = div('chart', div('top', make('h3', {}, CHARTS[key]), this.told), this.plot, this.legend)
    const place = event => event.clientX - this.plot.getBoundingClientRect().left, look = change => Object.assign(run, change).lookAgain()
    this.plot.onpointerdown = event => {
      if (event.button || !this.scale) return
      this.plot.setPointerCapture(event.pointerId)
      this.drag = [place(event), place(event)]
    }
    this.plot.onpointermove = event => {
      if (this.drag) this.drag[1] = place(event)
      if (this.scale) look({ at: this.scale.step(place(event)) })
    }
    this.plot.onpointerup = () => {
      const zoom = this.drag && this.scale.zoom(...this.drag)
      this.drag = null
      look(zoom ? { zoom } : {})
    }
    this.plot.onpointercancel = this.plot.onpointerleave = () => {
      this.drag = null
      look({ at: null })
    }
    this.plot.ondblclick = () => look({ zoom: null })
  }
  lines() { // label, kind and points of each curve
    const { run, key } = this, lines = []
    for (const [title, curves] of [[run.other && run.title, run.curves], [run.other?.name, run.other?.curves]].filter(([, curves]) => curves)) {
      const sets = key === 'evaluation' ? [...curves.evaluations] : [[key, curves[key]]], isOther = curves !== run.curves
      sets.forEach(([name, points], k) => lines.push([[title, sets.length > 1 && name.replaceAll('_', ' ')].filter(part => part).join(', '),
        'curve' + (isOther ? 1 : [0, 2, 3][k % 3]), points]))
    }
    return lines
  }
  render(range) {
    const lines = this.lines(), width = this.plot.clientWidth || 300, bottom = HEIGHT - 22, { at } = this.run
    const seen = lines.map(([, kind, points]) => [kind, thinned(within(points, range))])
    const [low, high] = extent(seen.flatMap(([, points]) => points).filter(([step, value]) => step >= range[0] && step <= range[1] && Number.isFinite(value)).map(point => point[1]))
    this.box.hidden = !lines.some(([, , points]) => points.length)
    this.scale = low <= high ? new Scale(range, width) : null
    if (!this.scale) return this.plot.replaceChildren(dim('No value here.'))
    const more = (high - low) * .04 || Math.abs(high) * .1 || 1, y = value => bottom - (value - low + more) / (high - low + 2 * more) * (bottom - 6)
    const x = step => this.scale.x(step), svg = draw('svg', { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` })
    for (const value of ticks(low - more, high + more, 5)) svg.append(draw('line', { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      write(LEFT - 7, y(value) + 4, figure(value), 'end'))
    for (const step of ticks(...range, Math.max(2, width / 110)).filter(Number.isInteger)) svg.append(write(x(step), HEIGHT - 5, step.toLocaleString('en'), 'middle'))
    const inside = draw('svg', { x: LEFT - 4, width: width - LEFT - RIGHT + 8, height: bottom + 4, viewBox: `${LEFT - 4} 0 ${width - LEFT - RIGHT + 8} ${bottom + 4}` })
    for (const [kind, points] of seen) {
      const isReal = k => Number.isFinite(points[k]?.[1]), isFew = this.key === 'evaluation' && points.length <= MOST_MARKED
      const path = points.map(([step, value], k) => isReal(k) ? `${isReal(k - 1) ? 'L' : 'M'}${x(step).toFixed(1)} ${y(value).toFixed(1)}` : '')
      const marks = points.filter((_, k) => isReal(k) && (isFew || !isReal(k - 1) && !isReal(k + 1)))
      inside.append(draw('g', { class: kind }, draw('path', { d: path.join('') }), ...marks.map(([step, value]) => draw('circle', { cx: x(step), cy: y(value), r: 3 }))))
    }
    const found = at === null ? [] : lines.map(([label, kind, points]) => [label, kind, nearest(points, at)]).filter(([, , point]) => point)
    for (const [, kind, [step, value]] of found) inside.append(draw('line', { class: 'at', x1: x(step), x2: x(step), y1: 0, y2: bottom }),
      Number.isFinite(value) ? draw('circle', { class: kind, cx: x(step), cy: y(value), r: 4 }) : '')
    if (this.drag) inside.append(draw('rect', { class: 'zoom', x: Math.min(...this.drag), width: Math.abs(this.drag[0] - this.drag[1]), height: bottom }))
    this.told.textContent = found.map(([label, , [step, value]]) => `${label && label + ' '}${figure(value)} at step ${step}`).join(' · ')
    svg.append(inside)
    this.plot.replaceChildren(svg)
    this.legend.replaceChildren(lines.length > 1 ? legend(lines.map(([label, kind]) => [kind, label])) : '')
  }
}
class Run {
  constructor(number, title) {
    Object.assign(this, { number, title, live: {}, told: '', zoom: null, at: null, other: null }).clear()
    for (const part of ['pill', 'note', 'figures', 'chain', 'others', 'flow', 'said']) this[part] = div(part)
    for (const [part, tag] of [['happened', 'ul'], ['bar', 'progress']]) this[part] = make(tag, {})
    this.charts = Object.keys(CHARTS).map(key => new Chart(this, key))
    this.hint = dim('')
    this.whole = make('button', { class: 'whole' }, 'Whole run')
    this.whole.onclick = () => Object.assign(this, { zoom: null }).lookAgain()
    this.earlier = make('select', { class: 'earlier' })
    this.earlier.onchange = () => this.compare(this.earlier.value)
    this.comparing = make('label', {}, 'compare with ', this.earlier)
    this.sampled = make('select', { 'aria-label': 'step' })
    this.sampled.onchange = () => Object.assign(this, { chosen: Number(this.sampled.value), hasNewSamples: true }).later()
    this.buttons = ['Pause', 'Resume', 'Checkpoint', 'Stop'].map(label => make('button', { 'data-do': label.toLowerCase() }, label))
    for (const button of this.buttons) button.onclick = () => this.act(button.dataset.do)
    const box = (heading, ...inside) => make('section', {}, make('h2', {}, heading), ...inside)
    Object.assign(this, { flowBox: box('A step as it flowed', this.flow), saidBox: box('Samples', this.said) })
    document.getElementById('runs').append(make('article', {},
      make('header', {}, make('h1', {}, title), this.pill, make('nav', {}, ...this.buttons)), this.note, this.figures, this.bar,
      box('Curves', div('tools', this.whole, this.hint, this.comparing), div('charts', ...this.charts.map(one => one.box))),
      this.saidBox, box('Machines', this.chain, this.others), this.flowBox, box('Events', this.happened)))
    this.list()
  }
  clear() { Object.assign(this, { curves: new Curves(), events: [], samples: new Map(), pictures: new Map(), hasNewSamples: true, away: new Map(), waits: new Set(), last: {}, end: '' }) }
  later() { this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.render() }) }
  lookAgain() { this.looking ||= requestAnimationFrame(() => { this.looking = 0; this.renderCurves() }) }
  async list() { // the earlier runs
    const answer = await ask(`/earlier/${this.number}/`).catch(() => null), names = answer?.ok ? await answer.json() : [], chosen = this.earlier.value
    this.earlier.replaceChildren(...['', ...names].map(name => make('option', { value: name }, name || 'no other run')))
    this.earlier.value = names.includes(chosen) ? chosen : ''
    this.comparing.hidden = !names.length
  }
  async compare(name) {
    const answer = name && await ask(`/earlier/${this.number}/${encodeURIComponent(name)}`).catch(() => null), curves = new Curves()
    for (const text of answer?.ok ? (await answer.text()).split('\n') : []) try {
      const { of, line } = JSON.parse(text)
      curves.take(of, line)
    } catch { } // a damaged line
    if (name !== this.earlier.value) return // another was chosen meanwhile
    if (name && !answer?.ok) this.say('This run cannot be read.')
    this.other = answer?.ok ? { name, curves } : null
    this.lookAgain()
  }
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
    if (news.anew) this.clear() || this.list()
    if (news.noted > this.live.noted) this.say(news.note ?? this.live.note)
    if (!of) return Object.assign(this.live, news)
    this.curves.take(of, line)
    if (of === 'samples') this.sample(line)
    if (of === 'metrics' && 'loss' in line) {
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
  }
  sample({ step, prompt, text, pictures = [] }) { // texts by prompt, at each step; a prompt may be there twice
    for (const later of [...this.samples.keys()].filter(other => other > step)) this.samples.delete(later)
    const texts = this.samples.get(step) ?? this.samples.set(step, new Map()).get(step)
    let key = String(prompt)
    while (texts.has(key)) key += '\0'
    texts.set(key, text)
    this.pictures.set(key, [pictures].flat().filter(one => String(one).startsWith('data:image/')))
    if (this.samples.size > MOST_SAMPLED) this.samples.delete([...this.samples.keys()][1])
    this.hasNewSamples = true
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
    const fact = (label, text) => div('', make('b', {}, text), dim(label)), left = live.total - last.step
    this.figures.replaceChildren(fact('step', `${last.step ?? 0} / ${live.total ?? '–'}`), fact('loss', shown(last.loss)),
      ...[...this.curves.evaluations].map(([key, points]) => fact(key.replaceAll('_', ' '), shown(points.at(-1)[1]))),
      fact((live.unit || 'tokens') + ' per second', shown(last.tokens_per_second)), fact('per step', shown(last.step_seconds, ' s')),
      fact('to go', goes && !waits && left >= 0 ? clock(left * last.step_seconds) : '–'), ...last.island ? [fact('islands', last.island.members.join(', '))] : [])
    Object.assign(this.bar, { max: live.total || 1, value: last.step || 0 })
    for (const part of ['Machines', 'Flow', 'Curves', 'Samples']) this['render' + part]()
    const about = line => line.text || Object.entries(line).filter(([key, value]) => value !== '' && value !== null && !['time', 'step', 'process'].includes(key))
      .map(([key, value]) => ['what', 'action', 'reason'].includes(key) ? value : `${key} ${Number.isFinite(value) && value % 1 ? shown(value) : value}`).join(', ')
    const at = line => dim(new Date(line.time).toLocaleTimeString('en-GB') + (line.step ? ` step ${line.step} ` : ' '))
    this.happened.replaceChildren(...this.events.map(line => make('li', { class: AWAY[line.what] ? 'away' : '' }, at(line), about(line))))
  }
  renderCurves() {
    const every = [this.curves, this.other?.curves].filter(one => one).flatMap(one => [one.loss, ...one.evaluations.values()]).flat()
    this.whole.hidden = this.whole.disabled = !this.zoom
    this.hint.textContent = !every.length ? 'No step is done yet.' : this.zoom ? '' : 'Drag to zoom.'
    const range = this.zoom ?? extent(every.map(([step]) => step))
    for (const chart of this.charts) chart.render(range)
  }
  renderSamples() {
    const steps = [...this.samples.keys()], between = steps.slice(1, -1)
    this.saidBox.hidden = !steps.length
    if (!this.hasNewSamples) return // a list that is open stays open
    this.hasNewSamples = false
    this.sampled.replaceChildren(...between.map(step => make('option', { value: step }, `step ${step}`)))
    this.sampled.value = between.includes(this.chosen) ? this.chosen : between[between.length >> 1]
    const columns = [...new Set([steps[0], between.length ? Number(this.sampled.value) : steps[0], steps.at(-1)])]
    const prompts = new Set(columns.flatMap(step => [...this.samples.get(step)?.keys() ?? []]))
    this.said.replaceChildren(make('table', {},
      make('tr', {}, make('th', {}, 'prompt'), ...columns.map((step, k) => make('th', {}, k === 1 && between.length ? this.sampled : `step ${step}`))),
      ...[...prompts].map(key => make('tr', {}, make('th', {}, ...this.pictures.get(key).map(src => make('img', { src, alt: 'picture' })), key.replaceAll('\0', '')), ...columns.map(step =>
        make('td', {}, this.samples.get(step).get(key) || dim(this.samples.get(step).has(key) ? '(empty)' : '–')))))))
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
