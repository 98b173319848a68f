// The pictures of a report. Everything comes from the data block of the page; every text goes in as textContent.
'use strict';
(() => {
const data = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);
const percent = x => (100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0) + ' %';
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const dark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(tag, text, parent, name) {
  const found = document.createElement(tag);
  if (text !== undefined && text !== null) found.textContent = text;
  if (name) found.className = name;
  if (parent) parent.append(found);
  return found;
}
function options(select, items, change) {
  select.replaceChildren();
  for (const [value, text] of items) make('option', text, select).value = value;
  select.onchange = () => change(select.value);
}

// --- colours: stops of [r, g, b], read linearly; one scale for amounts, one for less and more than usual
const AMOUNT = { light: [[247, 250, 252], [170, 205, 232], [60, 131, 191], [12, 52, 110]],
  dark: [[29, 35, 42], [40, 82, 130], [72, 158, 190], [250, 236, 150]] };
const LESS_MORE = { light: [[14, 92, 112], [130, 190, 200], [245, 245, 240], [240, 165, 95], [163, 60, 8]],
  dark: [[120, 215, 235], [40, 110, 130], [38, 44, 51], [170, 85, 25], [255, 178, 102]] };
function colour(scale, part) {
  const stops = scale[dark() ? 'dark' : 'light'], x = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const at = Math.min(Math.floor(x), stops.length - 2), f = x - at;
  return 'rgb(' + stops[at].map((a, c) => Math.round(a + f * (stops[at + 1][c] - a))).join(',') + ')';
}
function expertColour(expert) { // neighbours in number are far apart in hue
  const hue = expert * 137.508 % 360, ring = Math.floor(expert / 16) % 3;
  return dark() ? `hsl(${hue} ${60 - 12 * ring}% ${22 + 2 * ring}%)` : `hsl(${hue} ${75 - 15 * ring}% ${80 - 5 * ring}%)`;
}

// --- a heat map: canvas, legend, and the cell under the pointer or the arrow keys in words
// map: {label, rows, cols, part(r, c) -> 0..1 or null, words(r, c), rowName(r), colName(c), scale, legend: [low, high], never}
function heat(place, map) {
  place.replaceChildren();
  const says = make('output', 'Rest the pointer on the map, or press Tab and walk with the arrow keys.', null, 'says');
  says.setAttribute('aria-live', 'polite');
  const box = make('div', null, place, 'map');
  const canvas = make('canvas', null, box);
  canvas.tabIndex = 0;
  canvas.setAttribute('role', 'img');
  canvas.setAttribute('aria-label', map.label + '. Arrow keys walk from cell to cell.');
  const legend = make('div', null, place, 'legend');
  place.append(says);
  const base = document.createElement('canvas'); // the map without the mark
  let here = null, size = null;
  function draw() {
    const pen = base.getContext('2d'), font = '12px system-ui, sans-serif', panel = css('--panel'), mark = css('--mark');
    pen.font = font;
    let left = 0;
    for (let r = 0; r < map.rows; r++) left = Math.max(left, pen.measureText(map.rowName(r)).width);
    left = Math.ceil(left) + 8;
    const room = Math.max(240, place.clientWidth - left - 4);
    const w = Math.min(map.widest || 34, Math.max(3, Math.floor(room / map.cols)));
    const h = map.square ? w : map.rows > 100 ? 5 : map.rows > 40 ? 11 : map.rows > 16 ? 15 : 22;
    const top = 18, width = left + w * map.cols + 14, height = top + h * map.rows + 2, dense = devicePixelRatio || 1;
    size = { left, top, w, h, dense };
    canvas.width = base.width = width * dense; canvas.height = base.height = height * dense;
    canvas.style.width = width + 'px'; canvas.style.height = height + 'px';
    pen.scale(dense, dense);
    pen.font = font;
    const gap = w > 6 && h > 6 ? 1 : 0;
    for (let r = 0; r < map.rows; r++) for (let c = 0; c < map.cols; c++) {
      const part = map.part(r, c);
      pen.fillStyle = part === null ? panel : part === 'never' ? mark : colour(map.scale, part);
      pen.fillRect(left + c * w, top + r * h, w - gap, h - gap);
    }
    pen.fillStyle = css('--ink');
    pen.textBaseline = 'middle'; pen.textAlign = 'right';
    const everyRow = Math.ceil(13 / h);
    for (let r = 0; r < map.rows; r += everyRow) pen.fillText(map.rowName(r), left - 5, top + (r + 0.5) * h);
    pen.textAlign = 'center';
    const widest = pen.measureText(map.colName(map.cols - 1)).width + 10;
    const everyCol = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100].find(n => n * w >= widest) || 128;
    for (let c = 0; c < map.cols; c += everyCol) pen.fillText(map.colName(c), left + (c + 0.5) * w, 9);
    drawMark();
    drawLegend();
  }
  function drawMark() {
    const pen = canvas.getContext('2d'), { left, top, w, h, dense } = size;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(base, 0, 0);
    if (!here) return;
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.strokeStyle = css('--ink'); pen.lineWidth = 2;
    pen.strokeRect(left + here[1] * w - 1, top + here[0] * h - 1, w + 1, h + 1);
  }
  function drawLegend() {
    legend.replaceChildren();
    const bar = document.createElement('canvas');
    bar.width = 160; bar.height = 12;
    bar.setAttribute('aria-hidden', 'true');
    for (let x = 0; x < 160; x++) {
      const pen = bar.getContext('2d');
      pen.fillStyle = colour(map.scale, x / 159);
      pen.fillRect(x, 0, 1, 12);
    }
    make('span', map.legend[0], legend); legend.append(bar); make('span', map.legend[1], legend);
    if (map.never) {
      const box = document.createElement('canvas');
      box.width = box.height = 12;
      const pen = box.getContext('2d');
      pen.fillStyle = css('--mark'); pen.fillRect(0, 0, 12, 12);
      legend.append(box); make('span', map.never, legend);
    }
  }
  function go(r, c) {
    here = [r, c];
    says.textContent = map.words(r, c);
    drawMark();
  }
  canvas.onpointermove = event => {
    const box = canvas.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left - size.left) / size.w), r = Math.floor((event.clientY - box.top - size.top) / size.h);
    if (r >= 0 && c >= 0 && r < map.rows && c < map.cols && !(here && here[0] === r && here[1] === c)) go(r, c);
  };
  canvas.onkeydown = event => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [r, c] = here || [-step[0], -step[1]];
    go(Math.min(Math.max(r + step[0], 0), map.rows - 1), Math.min(Math.max(c + step[1], 0), map.cols - 1));
  };
  canvas.onclick = () => { if (here && map.click) map.click(here[0], here[1]); };
  draw();
  return draw;
}
const drawn = {}; // one function for each place, so that a new map takes the place of the old one
function show(id, map) { drawn[id] = heat($(id), map); }
function table(place, caption, heads, rows) {
  place.replaceChildren();
  const found = make('table', null, place);
  make('caption', caption, found);
  const head = make('tr', null, make('thead', null, found)), body = make('tbody', null, found);
  for (const text of heads) make('th', text, head).scope = 'col';
  for (const row of rows) {
    const line = make('tr', null, body);
    row.forEach((text, at) => { const cell = make(at ? 'td' : 'th', text, line); if (!at) cell.scope = 'row'; });
  }
}

// --- load
const layers = data.layers, most = Math.max(1, ...layers.map(one => one.counts.length));
const sum = values => values.reduce((a, b) => a + b, 0);
function expertWords(one, e) {
  const parts = [`layer ${one.layer}, expert ${e}: ${one.counts[e]} of ${one.rows} tokens (${percent(one.counts[e] / Math.max(1, one.rows))}; ` +
    `even: ${percent(one.k / one.counts.length)}), ${percent(one.mass[e] / Math.max(1e-9, sum(one.mass)))} of router weights`];
  if (one.ns) parts.push(`${(one.ns[e] / 1e6).toFixed(2)} ms in ${one.visits[e]} visits, read ${one.reads[e]} times`);
  return parts.join('; ');
}
const WHAT = { load: { text: 'how often each expert is chosen', of: one => one.counts },
  mass: { text: 'router weights it gets', of: one => one.mass } };
if (layers.some(one => one.ns)) {
  WHAT.ns = { text: 'time of its work', of: one => one.ns };
  WHAT.reads = { text: 'share of visits for which it was read', of: one => one.reads };
}
function loadPart(one, e, what) {
  if (e >= one.counts.length) return null;
  if (what === 'reads') return one.visits[e] ? one.reads[e] / one.visits[e] : null;
  const values = WHAT[what].of(one);
  if (!one.counts[e]) return 'never';
  return (Math.log2(values[e] * values.length / Math.max(1e-12, sum(values))) + 2) / 4;
}
function loadMap(rows, what, label) {
  const lessMore = what !== 'reads';
  return { label, rows: rows.length, cols: most, scale: lessMore ? LESS_MORE : AMOUNT, part: (r, c) => loadPart(rows[r], c, what),
    words: (r, c) => c < rows[r].counts.length ? expertWords(rows[r], c) : `layer ${rows[r].layer} has no expert ${c}`,
    rowName: r => 'layer ' + rows[r].layer, colName: c => String(c), never: 'never chosen',
    legend: lessMore ? ['a quarter of an even share or less', '4 times or more'] : ['never read', 'read at every visit'],
    click: r => choose(rows[r].layer) };
}
const showLoad = what => show('load-map', loadMap(layers, what, 'Heat map of layers by experts: ' + WHAT[what].text));
options($('load-what'), Object.entries(WHAT).map(([name, one]) => [name, one.text]), showLoad);

// --- one layer
function unpacked(text, n) { // what stands above the diagonal
  const flat = bytes(text);
  return (i, j) => { if (i > j) [i, j] = [j, i]; return flat[i * (2 * n - i - 1) / 2 + j - i - 1]; };
}
const PAIRS = { lift: ['how often chosen together, by chance', ['an eighth of chance or less', '8 times or more'], LESS_MORE],
  usage: ['similarity of the tokens they are used for', ['none in common', 'the same'], AMOUNT],
  weights: ['similarity of their weights', ['opposite', 'the same'], LESS_MORE] };
let current = layers[0];
function showPairs(what) {
  const n = current.counts.length, at = unpacked(current[what], n);
  const figure = v => what === 'lift' ? (2 ** ((2 * v / 254 - 1) * data.lift_span)).toFixed(2) + ' times as often together as by chance'
    : 'cosine ' + (what === 'usage' ? v / 254 : 2 * v / 254 - 1).toFixed(2);
  show('layer-pairs', { label: `Heat map of pairs of experts in layer ${current.layer}: ${PAIRS[what][0]}`, rows: n, cols: n, square: true, widest: 26,
    scale: PAIRS[what][2], legend: PAIRS[what][1], rowName: String, colName: String,
    part: (r, c) => r === c || at(r, c) === 255 ? null : at(r, c) / 254,
    words: (r, c) => r === c ? `expert ${r}` : `experts ${r} and ${c}: ${at(r, c) === 255 ? 'too rare to say' : figure(at(r, c))}` });
  const best = $('layer-best');
  best.replaceChildren();
  if (what === 'lift' && current.pairs.length) table(best, 'The pairs that go together most', ['experts', 'tokens', 'times chance'],
    current.pairs.map(([i, j, n, lift]) => [`${i} and ${j}`, n, (lift / current.chance).toFixed(2)]));
}
const ABOUT = { domains: ['domain of the text', data.labels], classes: ['kind of token', data.classes], drift: ['position', data.bins] };
function showAbout(what) {
  const found = current[what], names = ABOUT[what][1], n = current.counts.length;
  const labels = found.table.map((_, at) => at).filter(at => sum(found.table[at]));
  const total = sum(found.table.map(sum)), ofExpert = e => sum(found.table.map(row => row[e]));
  const columns = Array.from({ length: n }, (_, e) => ofExpert(e));
  const lift = (at, e) => found.table[at][e] / sum(found.table[at]) / (columns[e] / total);
  $('about-says').textContent = `A choice says ${found.bits.toFixed(3)} of ${found.entropy.toFixed(2)} bits of it ` +
    `(${percent(found.entropy ? found.bits / found.entropy : 0)}), beyond ${found.shuffled.toFixed(3)} of shuffled ones: ` +
    (found.above_chance ? 'more than chance.' : 'no more than chance.');
  show('layer-about', { label: `Heat map of ${ABOUT[what][0]} by expert in layer ${current.layer}`, rows: labels.length, cols: n,
    scale: LESS_MORE, legend: ['a quarter as often as for all, or less', '4 times or more'], rowName: r => names[labels[r]], colName: String,
    part: (r, c) => columns[c] ? (Math.log2(Math.max(1e-9, lift(labels[r], c))) + 2) / 4 : null,
    words: (r, c) => { const at = labels[r], t = found.table[at][c];
      return `${names[at]}, expert ${c}: ${t} choices; ${columns[c] ? percent(t / columns[c]) : 'nothing'} of what expert ${c} takes is ` +
        `${names[at]}, which is ${percent(sum(found.table[at]) / total)} of all`; } });
}
function showLayer() {
  show('layer-load', loadMap([current], 'load', `Load of the experts of layer ${current.layer}`));
  const pairs = Object.keys(PAIRS).filter(name => current[name]), before = $('pairs-what').value;
  options($('pairs-what'), pairs.map(name => [name, PAIRS[name][0]]), showPairs);
  if (pairs.includes(before)) $('pairs-what').value = before;
  showPairs($('pairs-what').value);
  const about = Object.keys(ABOUT).filter(name => current[name]), was = $('about-what').value;
  options($('about-what'), about.map(name => [name, ABOUT[name][0]]), showAbout);
  if (about.includes(was)) $('about-what').value = was;
  showAbout($('about-what').value);
}
function choose(layer) {
  const at = layers.findIndex(one => one.layer === Number(layer));
  if (at < 0) return;
  current = layers[at];
  $('layer-which').value = $('text-layer').value = current.layer;
  showLayer();
  showText();
}

// --- cache
const NAMES = { lru: 'LRU', lfru: 'LFRU', belady: 'Belady (optimum)' }, DASH = { lru: '', lfru: '7 4', belady: '2 4' };
function svg(tag, attributes, parent, text) {
  const found = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  if (text !== undefined) found.textContent = text;
  parent.append(found);
  return found;
}
function showCache() {
  const { slots, experts, hit_rates: rates, accesses, of_accesses: all } = data.cache;
  const place = $('cache-curve'), W = 820, H = 340, left = 56, right = 150, top = 12, bottom = 46;
  $('cache-says').textContent = 'Hit rate by the number of experts held, of all layers together, each token evaluated by itself as in decoding' +
    (accesses < all ? `: the first ${accesses.toLocaleString('en')} of ${all.toLocaleString('en')} uses.` : '.');
  const root = svg('svg', { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: 'img', 'aria-label': 'Hit rates of LRU, LFRU and the optimum; the table below has the figures' }, place);
  const x = n => left + (W - left - right) * n / experts, y = rate => top + (H - top - bottom) * (1 - rate);
  for (let at = 0; at <= 4; at++) {
    svg('line', { class: 'grid', x1: left, x2: W - right, y1: y(at / 4), y2: y(at / 4) }, root);
    svg('text', { x: left - 8, y: y(at / 4) + 4, 'text-anchor': 'end' }, root, 25 * at + ' %');
    const n = Math.round(experts * at / 4);
    svg('text', { x: x(n), y: H - bottom + 18, 'text-anchor': 'middle' }, root, n);
  }
  svg('line', { class: 'axis', x1: left, x2: W - right, y1: y(0), y2: y(0) }, root);
  svg('text', { x: (left + W - right) / 2, y: H - 6, 'text-anchor': 'middle' }, root, `experts held, of ${experts}`);
  Object.keys(NAMES).forEach((name, at) => {
    const points = slots.map((n, i) => [x(n), y(rates[name][i])]);
    svg('polyline', { class: name, fill: 'none', 'stroke-width': 2, 'stroke-dasharray': DASH[name], points: points.map(p => p.join(',')).join(' ') }, root);
    points.forEach(([cx, cy], i) => svg('title', {}, svg('circle', { class: name, cx, cy, r: 3.5 }, root), `${NAMES[name]}, ${slots[i]} experts: ${percent(rates[name][i])}`));
    svg('line', { class: name, x1: W - right + 12, x2: W - right + 40, y1: 26 + 22 * at, y2: 26 + 22 * at, 'stroke-width': 2, 'stroke-dasharray': DASH[name] }, root);
    svg('text', { class: name, x: W - right + 46, y: 30 + 22 * at }, root, NAMES[name].split(' ')[0]);
  });
  table($('cache-table'), 'Hit rates', ['experts held', 'of all', ...Object.values(NAMES)],
    slots.map((n, i) => [n, percent(n / experts), ...Object.keys(NAMES).map(name => percent(rates[name][i]))]));
  table($('window-table'), 'Working set: distinct experts in so many tokens', ['tokens', 'experts', 'of all'],
    data.windows[0].map((n, i) => [n, data.windows[1][i].toFixed(1), percent(data.windows[1][i] / experts)]));
}

// --- texts
const T = data.texts, chosen = new Uint16Array(bytes(T.experts).buffer), weights = bytes(T.weights);
let begin = 0;
for (const one of T.texts) { one.begin = begin; begin += one.ids.length; }
let text = T.texts[0], token = null, spans = [];
const choiceAt = (layer, row, rank) => (layer * T.rows + row) * T.k + rank;
function choicesOf(i) {
  const layer = layers.indexOf(current), found = [];
  for (let rank = 0; rank < T.k; rank++) {
    const at = choiceAt(layer, text.begin + i, rank);
    if (chosen[at] !== 65535) found.push([chosen[at], weights[at] / 255]);
  }
  return found;
}
function tokenWords(i) {
  const parts = [`${JSON.stringify(text.texts[i])} (${text.names[i]}, id ${text.ids[i]}, position ${text.positions[i]}`];
  if (text.classes.length) parts.push(', ' + data.classes[text.classes[i]]);
  const asked = choicesOf(i).map(([e, w]) => `expert ${e} (weight ${w.toFixed(2)})`).join(', ');
  return parts.join('') + `), layer ${current.layer}: ` + (asked || 'does not pass this layer');
}
function point(i) {
  if (spans[token]) spans[token].classList.remove('here');
  token = i;
  spans[i].classList.add('here');
  $('text-says').textContent = tokenWords(i);
}
function showText() {
  if (!text) { $('text-says').textContent = 'The trace holds no text.'; return; }
  const body = $('text-body'), only = $('text-expert').value;
  body.replaceChildren();
  spans = text.texts.map((piece, i) => {
    const span = make('span', piece.replace(/\n/g, '\u21b5\n') || '\u00b7', body), asked = choicesOf(i);
    if (asked.length) span.style.backgroundColor = expertColour(asked[0][0]);
    if (only !== '' && !asked.some(([e]) => e === Number(only))) span.className = 'dim';
    if (text.positions[i] >= text.prompt) span.classList.add('written');
    span.onpointerenter = () => point(i);
    return span;
  });
  if (text.ids.length < text.length) make('span', ` [… ${text.length - text.ids.length} more tokens]`, body);
  token = null;
  showTokens();
}
function showTokens() {
  const n = current.counts.length, count = Math.min(text.ids.length, 400);
  const of = Array.from({ length: count }, (_, i) => new Map(choicesOf(i)));
  show('text-map', { label: `Heat map of experts of layer ${current.layer} by tokens`, rows: n, cols: count, scale: AMOUNT, widest: 14,
    legend: ['not chosen', 'weight 1'], rowName: r => 'expert ' + r, colName: String, part: (r, c) => of[c].has(r) ? 0.25 + 0.75 * of[c].get(r) : 0,
    words: (r, c) => `token ${c}: ${tokenWords(c)}` + (of[c].has(r) ? '' : `; not expert ${r}`), click: (r, c) => point(c) });
}
$('text-body').onkeydown = event => {
  const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
  if (!step || !spans.length) return;
  event.preventDefault();
  point(token === null ? 0 : Math.min(Math.max(token + step, 0), spans.length - 1));
  spans[token].scrollIntoView({ block: 'nearest' });
};

// --- begin
if (layers.length) {
  const names = layers.map(one => [one.layer, 'layer ' + one.layer]);
  options($('layer-which'), names, choose);
  options($('text-layer'), names, choose);
  options($('text-expert'), [['', 'any'], ...Array.from({ length: most }, (_, e) => [e, String(e)])], showText);
  options($('text-which'), T.texts.map((one, at) => [at, `text ${one.number}` + (one.label ? ` (${one.label})` : '')]), at => { text = T.texts[at]; showText(); });
  for (const link of document.querySelectorAll('a[data-layer]')) link.addEventListener('click', () => choose(link.dataset.layer));
  showLoad('load');
  showLayer();
  showCache();
  showText();
}
function again() {
  for (const draw of Object.values(drawn)) draw();
  spans.forEach((span, i) => { const asked = choicesOf(i); if (asked.length) span.style.backgroundColor = expertColour(asked[0][0]); });
}
$('theme').onclick = () => { document.documentElement.dataset.theme = dark() ? 'light' : 'dark'; again(); };
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
let waiting = 0;
addEventListener('resize', () => { clearTimeout(waiting); waiting = setTimeout(again, 150); });
document.documentElement.dataset.drawn = 'yes';
})();
