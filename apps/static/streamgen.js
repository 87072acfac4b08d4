/* The player of streamgen.v1: a canvas, a websocket and the keys. No build, no dependency.
 *
 * One file for two pages: Gradio runs it inside gr.HTML (`js_on_load`), and /plain loads it with a
 * <script> tag. Both then call mountStreamgen(element, {token, prompt, seed, base}).
 *
 * What is on the screen is the truth: a frame is acknowledged when it is drawn, so a page that is
 * slow or hidden holds the server back by itself, and pause and rewind mean the frame one sees.
 */

function mountStreamgen(root, options) {
  "use strict";
  if (root.streamgen) return root.streamgen; // mounting twice is mounting once

  const HEADER_BYTES = 32;
  const JPEG = 1, PNG = 6;
  const KEY_OF_CODE = {
    KeyW: "w", KeyS: "s", KeyA: "a", KeyD: "d", KeyQ: "q", KeyE: "e",
    ArrowUp: "w", ArrowDown: "s", ArrowLeft: "a", ArrowRight: "d",
  };
  // 16 x 16 outlines; fonts do not have these signs everywhere
  const ICONS = {
    pause: "M5.5 3v10M10.5 3v10", play: "M5 3l8 5-8 5z", rewind: "M8 3.5L3 8l5 4.5zM13.5 3.5L8.5 8l5 4.5z",
    fork: "M4.5 13.5v-11M4.5 9.5c4 0 7-1.5 7-6M9.5 5.5l2-2.5 2 2.5", record: "M8 4.5a3.5 3.5 0 1 0 .01 0z",
    smooth: "M1.5 10c2-6 4.5-6 6.5-2s4.5 4 6.5-2", pixels: "M2.5 2.5h5.5v5.5H2.5zM8 8h5.5v5.5H8z",
    download: "M8 2.5v8M4.5 7.5L8 11l3.5-3.5M3 13.5h10",
  };
  const FATAL = { 4401: "this page is out of date; reload it", 4403: "this page may not connect", 4409: "this page is out of date; reload it" };
  const BACKOFF_MS = [400, 800, 1600, 3200, 6400];

  const base = options.base || new URL(".", window.location.href).href;
  const state = {
    phase: "connecting", // connecting | waking | live | paused | offline | gone
    world: null, frame: null, branch: 0, drawn: 0, seq: 0,
    prompt: options.prompt || "", seed: options.seed == null ? null : options.seed, image: null,
    paused: false, recording: null, fps: 0, latency: null, stats: null,
    prompts: [],   // {id, text, frame, applied}: what was asked for and where it applies
    sent: [],      // types of the last messages, for tests and curious people
  };
  const held = new Set();       // codes and chips that are down
  const kept = new Map();       // branch -> its prompts, while another one is live
  const sentAt = new Map();     // action seq -> when the key went down
  const latencies = [], gaps = [], drawTimes = [];
  let socket = null, tries = 0, epoch = 0, pending = null, last = null, frozen = false;
  let promptId = 0, smooth = readSetting("smooth", "1") === "1", recordedSince = 0, timer = null;

  const ui = buildPage(root);
  const view = ui.canvas.getContext("2d", { alpha: false });

  // -- small helpers ---------------------------------------------------------------------------

  function readSetting(name, fallback) {
    try { return localStorage.getItem("streamgen." + name) || fallback; } catch (_) { return fallback; }
  }

  function writeSetting(name, value) {
    try { localStorage.setItem("streamgen." + name, value); } catch (_) { /* a private window */ }
  }

  function median(values) {
    if (!values.length) return null;
    const sorted = values.slice().sort((a, b) => a - b);
    return sorted[Math.floor(sorted.length / 2)];
  }

  function clock(seconds) {
    const whole = Math.floor(seconds);
    return Math.floor(whole / 60) + ":" + String(whole % 60).padStart(2, "0");
  }

  // -- the wire --------------------------------------------------------------------------------

  function connect() {
    setPhase("connecting");
    const url = new URL("v1/stream", base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const mine = new WebSocket(url, "streamgen.v1");
    socket = mine;
    mine.binaryType = "arraybuffer";
    mine.onopen = () => send({ type: "hello", version: 1, client: "page", token: options.token });
    mine.onmessage = (event) => {
      if (mine !== socket) return;
      if (typeof event.data === "string") onText(JSON.parse(event.data));
      else onFrame(event.data);
    };
    mine.onclose = (event) => { if (mine === socket) onClose(event); };
  }

  function send(message) {
    if (!socket || socket.readyState !== WebSocket.OPEN) return false;
    socket.send(JSON.stringify(message));
    state.sent.push(message.type);
    if (state.sent.length > 200) state.sent.shift();
    return true;
  }

  function onClose(event) {
    socket = null;
    jump();
    setRecording(null);
    if (!root.isConnected) return;
    if (FATAL[event.code]) { setPhase("gone", FATAL[event.code]); return; }
    const wait = BACKOFF_MS[Math.min(tries, BACKOFF_MS.length - 1)];
    tries += 1;
    const full = event.code === 4503;
    setPhase("offline", full ? "every place is taken; waiting for one" : "connection lost; trying again");
    timer = setTimeout(connect, wait * (0.8 + 0.4 * Math.random()) + (full ? 2000 : 0));
  }

  function onText(message) {
    const handler = {
      hello: onHello, started: onStarted, ack: onAck, branch: onBranch, recording: onRecording,
      stats: onStats, warn: (m) => toast(m.message), error: onError,
    }[message.type];
    if (handler) handler(message);
  }

  function onHello(message) {
    state.world = message.world;
    showWorld(message.world);
    const first = state.prompt || message.world.suggestions[0] || "";
    const start = { type: "start", prompt: first };
    if (state.seed !== null) start.seed = state.seed;
    if (state.image) start.image = state.image;
    send(start);
    send({ type: "stats", hz: 2 });
    setPhase("waking");
  }

  function onStarted(message) {
    if (tries > 0) toast("connected again: the same seed, from its first frame");
    tries = 0;
    jump();
    kept.clear();
    state.frame = null;
    state.prompt = message.prompt;
    state.seed = message.seed;
    state.prompts = message.prompt ? [{ id: 0, text: message.prompt, frame: message.frame, applied: false }] : [];
    ui.seed.value = String(message.seed);
    setPaused(false);
    setPhase("waking");
    sizeCanvas();
    showPrompts();
    if (held.size) sendKeys(performance.now());
  }

  function onAck(message) {
    if (message.of === "prompt") {
      notePrompt(message);
    } else if (message.of === "pause") {
      jump();
      setPaused(true);
      caption("paused at frame " + (message.shown ?? state.frame));
    } else if (message.of === "resume") {
      setPaused(false);
    } else if (message.of === "rewind") {
      jump();
      backTo(message, state.prompts);
      caption("rewound to frame " + message.applies_at_frame);
    } else if (message.of === "switch") {
      jump();
      kept.set(state.branch, state.prompts);
      backTo(message, kept.get(message.id) || []);
      caption("back in this branch at frame " + message.applies_at_frame);
    } else if (message.of === "fork") {
      kept.set(state.branch, state.prompts.map((entry) => ({ ...entry })));
      caption("a new branch from frame " + message.applies_at_frame);
    }
  }

  /** The walk stands at an earlier frame or in another branch, and has the words it had there. */
  function backTo(message, prompts) {
    state.prompts = prompts.filter((entry) => entry.frame < message.applies_at_frame || entry.frame === 0);
    state.prompt = message.prompt || state.prompt;
    showPrompts();
  }

  function onBranch(message) {
    state.branch = message.id;
    ui.branches.replaceChildren(...message.branches.map((branch) => {
      const chip = make("button", "sg-chip sg-branch", branch.name);
      chip.type = "button";
      chip.title = branch.prompt + " · stands at frame " + branch.frame;
      chip.dataset.live = String(branch.id === message.id);
      chip.onclick = () => { send({ type: "switch", branch: branch.id }); refocus(); };
      return chip;
    }));
    ui.branchRow.hidden = message.branches.length < 2;
  }

  function onRecording(message) {
    setRecording(message.on ? message.id : null);
    if (message.on || !message.url) return;
    const link = make("a", "sg-download");
    link.append(drawIcon("download"), make("span", "", "mp4 · " + clock(message.seconds)));
    link.href = new URL(message.url, base).href;
    link.download = "streamgen-" + (state.seed ?? "walk") + ".mp4";
    ui.downloads.replaceChildren(link);
    ui.downloads.hidden = false;
  }

  function onStats(message) {
    state.stats = message;
  }

  function onError(message) {
    toast(message.message);
    frozen = frozen && message.ref !== "pause";
    if (message.ref === "start") setPhase("gone", message.message);
  }

  /** The timeline moved: nothing that is under way belongs to it. The server gave the credit back. */
  function jump() {
    epoch += 1;
    frozen = false;
    if (pending) { pending.bitmap.close(); pending = null; }
  }

  // -- frames ----------------------------------------------------------------------------------

  function onFrame(buffer) {
    const at = new DataView(buffer);
    if (buffer.byteLength < HEADER_BYTES || at.getUint16(0, true) !== 0x4753) return;
    const frame = {
      codec: at.getUint8(3), flags: at.getUint16(4, true), branch: at.getUint16(6, true),
      frame: at.getUint32(8, true), seq: at.getUint32(12, true), genMs: at.getFloat32(24, true),
      epoch, bitmap: null,
    };
    const kind = { [JPEG]: "image/jpeg", [PNG]: "image/png" }[frame.codec];
    createImageBitmap(new Blob([new Uint8Array(buffer, HEADER_BYTES)], { type: kind })).then((bitmap) => {
      if (frame.epoch !== epoch || frozen) { bitmap.close(); return; }
      if (pending) pending.bitmap.close(); // the newest wins; its ack returns this one's credit too
      frame.bitmap = bitmap;
      pending = frame;
    }).catch(() => toast("a frame could not be decoded"));
  }

  function loop(now) {
    if (!root.isConnected) { destroy(); return; }
    if (pending && !frozen) {
      const frame = pending;
      pending = null;
      show(frame, now);
    }
    requestAnimationFrame(loop);
  }

  function show(frame, now) {
    if (last) last.bitmap.close();
    last = frame;
    paint();
    send({ type: "ack", frame: frame.frame });
    state.drawn += 1;
    state.frame = frame.frame;
    if (state.phase === "waking") setPhase(state.paused ? "paused" : "live");
    measure(frame, now);
    applyPrompts(frame.frame);
    ui.frame.textContent = "frame " + frame.frame;
  }

  function measure(frame, now) {
    drawTimes.push(now);
    while (drawTimes.length > 4 && now - drawTimes[0] > 2000) drawTimes.shift();
    gaps.push(frame.genMs * (state.world ? state.world.chunk_frames : 1));
    if (gaps.length > 120) gaps.shift();
    let newest = null;
    for (const [seq, when] of sentAt) {
      if (seq > frame.seq) break;
      newest = when;
      sentAt.delete(seq);
    }
    if (newest !== null) {
      latencies.push(performance.now() - newest);
      if (latencies.length > 60) latencies.shift();
      state.latency = median(latencies.slice(-15));
    }
  }

  function paint() {
    if (last) view.drawImage(last.bitmap, 0, 0, ui.canvas.width, ui.canvas.height);
  }

  /** Smooth: enlarged 4 times by the canvas with a cubic filter. Pixels: left to the style sheet. */
  function sizeCanvas() {
    if (!state.world) return;
    const times = smooth && state.world.width <= 320 ? 4 : 1;
    ui.canvas.width = state.world.width * times;
    ui.canvas.height = state.world.height * times;
    view.imageSmoothingEnabled = smooth;
    view.imageSmoothingQuality = "high";
    ui.canvas.dataset.smooth = String(smooth);
    ui.view.style.aspectRatio = state.world.width + " / " + state.world.height;
    paint();
  }

  // -- keys ------------------------------------------------------------------------------------

  function isTyping(target) {
    return target instanceof Element && target.closest("input, textarea, select, [contenteditable=''], [contenteditable='true']") !== null;
  }

  function keysNow() {
    return [...new Set([...held].map((code) => KEY_OF_CODE[code]))].sort();
  }

  function sendKeys(when) {
    showKeys();
    if (state.phase !== "live" && state.phase !== "paused" && state.phase !== "waking") return;
    state.seq += 1;
    if (send({ type: "action", seq: state.seq, keys: keysNow() })) sentAt.set(state.seq, when);
    if (sentAt.size > 100) sentAt.delete(sentAt.keys().next().value);
  }

  function onKeyDown(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (KEY_OF_CODE[event.code]) {
      event.preventDefault(); // arrows would scroll
      if (event.repeat || held.has(event.code)) return;
      held.add(event.code);
      sendKeys(event.timeStamp);
    } else if (!event.repeat && !(event.target instanceof HTMLButtonElement)) {
      const verb = { Space: togglePause, KeyR: rewind, KeyB: fork }[event.code];
      if (verb) { event.preventDefault(); verb(); }
    }
  }

  function onKeyUp(event) {
    if (held.delete(event.code)) sendKeys(event.timeStamp);
  }

  /** No key stays down in a window that does not hear it go up. */
  function release() {
    if (!held.size) return;
    held.clear();
    sendKeys(performance.now());
  }

  function onHide() {
    if (document.hidden) release();
  }

  function showKeys() {
    for (const chip of ui.keys) chip.dataset.on = String(held.has(chip.dataset.code));
  }

  // -- verbs -----------------------------------------------------------------------------------

  function prompt(text) {
    const words = (text || "").trim();
    if (!words) return;
    promptId += 1;
    send({ type: "prompt", id: promptId, text: words });
  }

  function notePrompt(message) {
    const known = state.prompts.find((p) => p.id === message.id && p.id !== 0);
    if (known) { known.frame = message.applies_at_frame; known.applied = false; }
    else state.prompts.push({ id: message.id, text: message.prompt, frame: message.applies_at_frame, applied: false });
    state.prompt = message.prompt;
    showPrompts();
  }

  /** A prompt counts as applied when its first frame is on the screen, not when it was asked for. */
  function applyPrompts(frame) {
    for (const entry of state.prompts) {
      if (entry.applied || frame < entry.frame) continue;
      entry.applied = true;
      showPrompts();
      if (entry.id !== 0) caption(entry.text + " · applied at frame " + entry.frame);
    }
  }

  function togglePause() {
    if (state.paused) { send({ type: "resume" }); return; }
    if (state.frame === null || frozen) return;
    frozen = true; // from this moment nothing newer is drawn
    if (!send({ type: "pause", frame: state.frame })) frozen = false;
  }

  function rewind() { send({ type: "rewind", seconds: 2 }); }

  function fork() { send({ type: "fork" }); }

  function record() { send({ type: "record", on: !state.recording }); }

  function reset(changes) {
    if (state.phase === "gone" || state.phase === "offline") return;
    const seed = Number.parseInt(ui.seed.value, 10);
    const message = { type: "reset", ...(changes || {}) };
    if (message.seed === undefined && Number.isSafeInteger(seed) && seed >= 0) message.seed = seed;
    if (send(message)) setPhase("waking");
  }

  /** Start anew from a picture: `ref` is what POST /v1/images answered. */
  function setImage(ref) {
    state.image = ref || null;
    if (ref) reset({ image: ref });
  }

  async function upload(file) {
    const answer = await fetch(new URL("v1/images", base), {
      method: "POST", body: file, headers: options.token ? { Authorization: "Bearer " + options.token } : {},
    }).then((r) => r.json()).catch(() => ({ message: "the picture could not be sent" }));
    if (answer.ref) setImage(answer.ref); else toast(answer.message);
  }

  // -- the page --------------------------------------------------------------------------------

  function make(tag, name, text) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function drawIcon(name) {
    const box = make("span", "sg-icon");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 16 16");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", ICONS[name]);
    svg.append(path);
    box.append(svg);
    return box;
  }

  function setIcon(node, name) {
    node.querySelector(".sg-icon").replaceWith(drawIcon(name));
  }

  function button(name, icon, label, hint, action) {
    const node = make("button", "sg-button " + name);
    node.type = "button";
    node.append(drawIcon(icon), make("span", "sg-label", label));
    if (hint) node.append(make("kbd", "sg-hint", hint));
    node.onclick = () => { action(); refocus(); };
    return node;
  }

  /** After a click the keys belong to the world again, and Space does not press the button twice. */
  function refocus() {
    if (document.activeElement instanceof HTMLElement) document.activeElement.blur();
    ui.view.focus({ preventScroll: true });
  }

  function keyChip(code, label) {
    const chip = make("span", "sg-key", label);
    chip.title = { w: "forward", s: "back", a: "turn left", d: "turn right", q: "step left", e: "step right" }[KEY_OF_CODE[code]];
    chip.dataset.code = code;
    chip.dataset.on = "false";
    chip.onpointerdown = (event) => {
      event.preventDefault();
      chip.setPointerCapture(event.pointerId);
      held.add(code);
      sendKeys(event.timeStamp);
    };
    chip.onpointerup = chip.onpointercancel = (event) => { if (held.delete(code)) sendKeys(event.timeStamp); };
    return chip;
  }

  function keyPad(name, rows) {
    const pad = make("div", "sg-pad " + name);
    for (const row of rows) {
      const line = make("div", "sg-pad-row");
      line.append(...row.map(([code, label]) => keyChip(code, label)));
      pad.append(line);
    }
    return pad;
  }

  function figure(label) {
    const box = make("div", "sg-figure");
    const value = make("span", "sg-value", "–");
    box.append(value, make("span", "sg-unit", label));
    return { box, value };
  }

  function section(title, ...nodes) {
    const box = make("section", "sg-section");
    if (title) box.append(make("h3", "sg-title", title));
    box.append(...nodes);
    return box;
  }

  function buildPage(into) {
    const page = {};
    into.classList.add("sg");

    const top = make("header", "sg-top");
    page.model = make("span", "sg-model", "");
    page.status = make("span", "sg-status", "connecting");
    top.append(make("span", "sg-mark", "streamgen"), page.model, page.status);

    page.view = make("div", "sg-view");
    page.view.tabIndex = 0;
    page.canvas = make("canvas", "sg-canvas");
    page.frame = make("span", "sg-frame", "");
    page.rec = make("span", "sg-rec", "");
    page.rec.hidden = true;
    page.caption = make("div", "sg-caption", "");
    page.toast = make("div", "sg-toast", "");
    page.veil = make("div", "sg-veil");
    page.veilText = make("span", "sg-veil-text", "waking the world…");
    page.veil.append(make("span", "sg-breath"), page.veilText);
    const pads = make("div", "sg-pads");
    pads.append(
      keyPad("sg-letters", [[["KeyQ", "Q"], ["KeyW", "W"], ["KeyE", "E"]], [["KeyA", "A"], ["KeyS", "S"], ["KeyD", "D"]]]),
      keyPad("sg-arrows", [[["ArrowUp", "↑"]], [["ArrowLeft", "←"], ["ArrowDown", "↓"], ["ArrowRight", "→"]]]),
    );
    page.keys = [...pads.querySelectorAll(".sg-key")];
    page.view.append(page.canvas, page.frame, page.rec, page.toast, page.caption, pads, page.veil);

    page.pause = button("sg-pause", "pause", "Pause", "space", () => togglePause());
    page.record = button("sg-record", "record", "Record", "", () => record());
    page.smooth = button("sg-smooth", "smooth", "", "", () => toggleSmooth());
    page.downloads = make("span", "sg-downloads");
    page.downloads.hidden = true;
    const bar = make("div", "sg-bar");
    bar.append(page.pause, button("sg-rewind", "rewind", "Rewind 2 s", "R", () => rewind()),
      button("sg-fork", "fork", "Branch", "B", () => fork()), page.record, page.downloads,
      make("span", "sg-space"), page.smooth);

    page.prompt = make("textarea", "sg-prompt");
    page.prompt.rows = 2;
    page.prompt.placeholder = "Describe the world…";
    page.prompt.setAttribute("aria-label", "Prompt");
    page.prompt.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        sendPrompt();
      } else if (event.key === "Escape") refocus();
    };
    const go = make("button", "sg-go", "Change the world");
    go.type = "button";
    go.onclick = () => sendPrompt();
    page.suggestions = make("div", "sg-chips");
    page.prompts = make("ol", "sg-prompts");

    page.branches = make("div", "sg-chips");
    page.branchRow = section("Branches", page.branches);
    page.branchRow.hidden = true;

    page.seed = make("input", "sg-seed");
    page.seed.type = "number";
    page.seed.min = "0";
    page.seed.setAttribute("aria-label", "Seed");
    page.seed.onkeydown = (event) => { if (event.key === "Enter") { reset(); refocus(); } };
    const again = make("button", "sg-go", "Restart");
    again.type = "button";
    again.onclick = () => { reset(); refocus(); };
    const dice = make("button", "sg-go sg-dice", "New seed");
    dice.type = "button";
    again.title = "from the first frame, with this seed";
    dice.onclick = () => { reset({ seed: Math.floor(Math.random() * 1e6) }); refocus(); };
    const seedRow = make("div", "sg-row");
    seedRow.append(page.seed, again, dice);
    if (options.upload) seedRow.append(uploadButton());

    page.fps = figure("frames / s");
    page.gen = figure("ms per chunk, p50 / p95");
    page.latency = figure("ms key to picture");
    page.spark = make("canvas", "sg-spark");
    page.spark.width = 560;
    page.spark.height = 72;
    const figures = make("div", "sg-figures");
    figures.append(page.fps.box, page.latency.box, page.gen.box);

    const side = make("aside", "sg-side");
    side.append(section("", page.prompt, go, page.suggestions, page.prompts), page.branchRow,
      section("Seed", seedRow), section("", figures, page.spark));
    const left = make("div", "sg-left");
    left.append(page.view, bar);
    const main = make("div", "sg-main");
    main.append(left, side);
    into.replaceChildren(top, main);
    return page;
  }

  function uploadButton() {
    const label = make("label", "sg-go sg-upload", "Picture…");
    const input = make("input");
    input.type = "file";
    input.accept = "image/png,image/jpeg,image/webp";
    input.onchange = () => { if (input.files[0]) upload(input.files[0]); input.value = ""; };
    label.append(input);
    label.title = "start from a picture of your own";
    return label;
  }

  function sendPrompt() {
    prompt(ui.prompt.value);
    ui.prompt.value = "";
    refocus();
  }

  function showWorld(world) {
    ui.model.textContent = world.name;
    ui.suggestions.replaceChildren(...world.suggestions.map((text) => {
      const chip = make("button", "sg-chip", text);
      chip.type = "button";
      chip.onclick = () => { prompt(text); refocus(); };
      return chip;
    }));
    for (const chip of ui.keys) chip.hidden = !world.keys.includes(KEY_OF_CODE[chip.dataset.code]);
    sizeCanvas();
  }

  function showPrompts() {
    ui.prompts.replaceChildren(...state.prompts.slice(-3).map((entry) => {
      const line = make("li", "sg-applied");
      line.dataset.applied = String(entry.applied);
      line.append(make("span", "sg-words", entry.text), make("span", "sg-at",
        (entry.applied ? "applied at frame " : "applies at frame ") + entry.frame));
      return line;
    }));
  }

  let captionTimer = null;
  function caption(text) {
    ui.caption.textContent = text;
    ui.caption.dataset.on = "true";
    clearTimeout(captionTimer);
    captionTimer = setTimeout(() => { ui.caption.dataset.on = "false"; }, 3500);
  }

  let toastTimer = null;
  function toast(text) {
    ui.toast.textContent = text;
    ui.toast.dataset.on = "true";
    clearTimeout(toastTimer);
    toastTimer = setTimeout(() => { ui.toast.dataset.on = "false"; }, 5000);
  }

  function setPhase(phase, text) {
    state.phase = phase;
    const words = { connecting: "connecting…", waking: "waking the world…" };
    ui.veilText.textContent = text || words[phase] || "";
    ui.veil.dataset.on = String(phase !== "live" && phase !== "paused");
    ui.status.textContent = phase === "gone" ? "ended" : phase;
    ui.status.dataset.phase = phase;
  }

  function setPaused(paused) {
    state.paused = paused;
    setIcon(ui.pause, paused ? "play" : "pause");
    ui.pause.querySelector(".sg-label").textContent = paused ? "Resume" : "Pause";
    ui.pause.dataset.on = String(paused);
    if (state.phase === "live" || state.phase === "paused") setPhase(paused ? "paused" : "live");
  }

  function setRecording(id) {
    state.recording = id;
    recordedSince = performance.now();
    ui.rec.hidden = !id;
    ui.record.dataset.on = String(Boolean(id));
    ui.record.querySelector(".sg-label").textContent = id ? "Stop" : "Record";
  }

  function toggleSmooth() {
    smooth = !smooth;
    writeSetting("smooth", smooth ? "1" : "0");
    showSmooth();
    sizeCanvas();
  }

  function showSmooth() {
    setIcon(ui.smooth, smooth ? "smooth" : "pixels");
    ui.smooth.title = smooth ? "smooth; click for pixels" : "pixels; click for smooth";
    ui.smooth.setAttribute("aria-label", ui.smooth.title);
  }

  /** Numbers change twice a second: faster can't be read. */
  function showNumbers() {
    const now = performance.now();
    const count = drawTimes.length, newest = drawTimes[count - 1];
    const span = count > 1 ? newest - drawTimes[0] : 0;
    state.fps = span > 0 && !state.paused && now - newest < 5000 ? (count - 1) * 1000 / span : 0;
    ui.fps.value.textContent = state.fps ? state.fps.toFixed(1) : "–";
    ui.latency.value.textContent = state.latency === null ? "–" : state.latency.toFixed(0);
    if (state.stats) ui.gen.value.textContent = state.stats.gen_p50_ms.toFixed(0) + " / " + state.stats.gen_p95_ms.toFixed(0);
    if (state.recording) ui.rec.textContent = "● " + clock((now - recordedSince) / 1000);
    drawSpark();
  }

  /** Two quiet lines: time per chunk (dim), key to picture (bright). */
  function drawSpark() {
    const pen = ui.spark.getContext("2d"), width = ui.spark.width, height = ui.spark.height;
    pen.clearRect(0, 0, width, height);
    const sorted = [...gaps, ...latencies].sort((a, b) => a - b); // one slow moment must not flatten the rest
    const top = Math.max(60, sorted[Math.floor(sorted.length * 0.95)] || 0) * 1.15;
    const line = (values, slots, color) => {
      pen.beginPath();
      values.forEach((value, index) => {
        const x = (slots - values.length + index) / (slots - 1) * (width - 8) + 4;
        const y = height - 4 - Math.min(value / top, 1) * (height - 8);
        if (index) pen.lineTo(x, y); else pen.moveTo(x, y);
      });
      pen.strokeStyle = color;
      pen.lineWidth = 2.5;
      pen.lineJoin = "round";
      pen.stroke();
      return values.length;
    };
    line(gaps, 120, "rgba(255,255,255,.22)");
    line(latencies, 60, "#f2b266");
  }

  // -- life ------------------------------------------------------------------------------------

  const numbers = setInterval(showNumbers, 500);
  const listeners = [
    [window, "keydown", onKeyDown], [window, "keyup", onKeyUp], [window, "blur", release],
    [document, "visibilitychange", onHide], [document, "focusin", (e) => { if (isTyping(e.target)) release(); }],
  ];
  for (const [target, name, listener] of listeners) target.addEventListener(name, listener);

  /** Gradio tells nobody that an element is gone; `loop` sees it. */
  function destroy() {
    for (const [target, name, listener] of listeners) target.removeEventListener(name, listener);
    clearInterval(numbers);
    clearTimeout(timer);
    if (socket) socket.close();
    socket = null;
  }

  showSmooth();
  const api = { state, prompt, reset, rewind, fork, record, togglePause, setImage, upload, destroy };
  root.streamgen = api;
  window.streamgen = api;
  setPhase("connecting");
  setPaused(false);
  connect();
  requestAnimationFrame(loop);
  return api;
}
