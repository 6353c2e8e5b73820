// The Generate panel (browser). Cards are kept per model, so that all views of it show the same.
// Messages to the kernel: hello, send, stop, clear. From it: cards (text deltas), keep.

const STATES = {
  sent: ["\u25CC", "waiting for the kernel"],
  queued: ["\u25CC", "queued"],
  running: ["\u25B6", "running"],
  stop: ["\u2714", "done"],
  length: ["\u2714", "done (length)"],
  cancelled: ["\u25A0", "stopped"],
  timeout: ["\u25A0", "out of time"],
  overloaded: ["\u2716", "too many requests"],
  error: ["\u2716", "error"],
  replica_lost: ["\u2716", "rank lost"],
};
const CONTROLS = [
  { name: "max_new_tokens", label: "Max new tokens", min: 1, step: 1 },
  { name: "temperature", label: "Temperature", min: 0, step: 0.1, hint: "0 takes the most likely token" },
  { name: "top_k", label: "Top-k", min: 0, step: 1, hint: "0 keeps all tokens" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.05 },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "random", optional: true },
];
// by the panel's id: initialize and render are given different objects for one model
const stores = new Map();

const isLive = (card) => ["sent", "queued", "running"].includes(card.state);

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function freshId() {
  // crypto.randomUUID exists in secure contexts only, and a server may be plain http
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// --- what is known of the requests ----------------------------------------------------------

class Store extends EventTarget {
  constructor(model) {
    super();
    this.model = model;
    this.cards = new Map();
    this.onMessage = (message) => this.receive(message);
    this.onState = () => this.restore();
    model.on("msg:custom", this.onMessage);
    model.on("change:cards", this.onState);
    this.restore();
    model.send({ kind: "hello" });
  }

  close() {
    this.model.off("msg:custom", this.onMessage);
    this.model.off("change:cards", this.onState);
  }

  // Finished cards travel as state too: they are what a saved notebook still has.
  restore() {
    for (const card of this.model.get("cards") ?? []) {
      this.cards.set(card.id, { ...card, size: undefined });
    }
    this.changed();
  }

  receive(message) {
    if (message.kind === "keep") {
      const keep = new Set(message.ids);
      for (const id of [...this.cards.keys()]) if (!keep.has(id)) this.cards.delete(id);
    }
    let missed = false;
    for (const update of message.kind === "cards" ? message.cards : []) {
      const old = this.cards.get(update.id);
      if (update.start === 0) this.cards.set(update.id, update);
      else if (old?.size === update.start)
        this.cards.set(update.id, { ...update, text: old.text + update.text });
      else missed = true;
    }
    if (missed) this.model.send({ kind: "hello" });
    this.changed();
  }

  send(prompts, sampling) {
    const requests = prompts.map((prompt) => ({ id: freshId(), prompt }));
    let number = Math.max(0, ...[...this.cards.values()].map((card) => card.number));
    for (const { id, prompt } of requests) {
      number += 1;
      this.cards.set(id, { id, number, prompt, text: "", size: 0, state: "sent", rank: -1 });
    }
    this.model.send({ kind: "send", requests, sampling });
    this.changed();
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// --- one card -------------------------------------------------------------------------------

class CardView {
  constructor(id, store) {
    this.root = make("li", "nbdist-generate-card");
    const head = make("div", "nbdist-generate-card-head");
    this.state = make("span", "nbdist-generate-state");
    this.facts = make("span", "nbdist-generate-facts");
    this.button = make("button", "nbdist-generate-small", "Stop");
    this.button.type = "button";
    this.button.addEventListener("click", () => store.model.send({ kind: "stop", id }));
    head.append(this.state, this.facts, this.button);
    const body = make("div", "nbdist-generate-text");
    this.prompt = make("span", "nbdist-generate-prompt");
    this.answer = make("span", "nbdist-generate-answer");
    this.caret = make("span", "nbdist-generate-caret");
    this.caret.setAttribute("aria-hidden", "true");
    body.append(this.prompt, this.answer, this.caret);
    this.detail = make("div", "nbdist-generate-detail");
    this.root.append(head, body, this.detail);
  }

  show(card) {
    const [symbol, words] = STATES[card.state] ?? ["?", card.state];
    this.root.dataset.state = card.state;
    this.root.setAttribute("aria-label", `Request ${card.number}, ${words}`);
    this.state.textContent = `${symbol} #${card.number} ${words}`;
    this.facts.replaceChildren(...factsOf(card).map((fact) => make("span", "", fact)));
    this.button.hidden = !isLive(card);
    this.button.setAttribute("aria-label", `Stop request ${card.number}`);
    this.prompt.textContent = card.prompt;
    this.showText(card.text);
    this.caret.hidden = !isLive(card);
    this.detail.textContent = card.detail ?? "";
    this.detail.hidden = !card.detail;
  }

  // Appending leaves a selection in the older text alone.
  showText(text) {
    const shown = this.answer.textContent;
    if (text.startsWith(shown)) {
      if (text.length > shown.length) this.answer.append(text.slice(shown.length));
    } else {
      this.answer.textContent = text;
    }
  }
}

function factsOf(card) {
  const facts = [];
  if (card.num_tokens) facts.push(`${card.num_tokens} ${card.num_tokens === 1 ? "token" : "tokens"}`);
  if (card.tokens_per_second) facts.push(`${card.tokens_per_second.toFixed(1)} tok/s`);
  if (card.first_token_seconds != null) facts.push(`first ${seconds(card.first_token_seconds)}`);
  if (card.rank >= 0) facts.push(`rank ${card.rank}`);
  if (card.batch_size) facts.push(`batch ${card.batch_size}`);
  return facts;
}

const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);

// --- the form -------------------------------------------------------------------------------

function buildForm(model, store) {
  const form = make("form", "nbdist-generate-form");
  const uid = freshId().slice(0, 8);
  const label = make("label", "nbdist-generate-label", "Prompt");
  const prompt = make("textarea", "nbdist-generate-input");
  prompt.id = label.htmlFor = `nbdist-prompt-${uid}`;
  prompt.rows = 3;
  prompt.placeholder = "Text to continue";

  const controls = make("fieldset", "nbdist-generate-controls");
  controls.append(make("legend", "nbdist-generate-hidden", "Sampling"));
  const inputs = CONTROLS.map((control) => {
    const field = make("label", "nbdist-generate-field");
    const input = make("input", "nbdist-generate-input");
    input.type = "number";
    for (const key of ["min", "max"]) if (key in control) input[key] = control[key];
    input.step = control.step === 1 ? 1 : "any";
    input.required = !control.optional;
    if (control.hint) field.title = input.placeholder = control.hint;
    field.append(make("span", "", control.label), input);
    controls.append(field);
    input.addEventListener("change", () => {
      model.set("sampling", { ...model.get("sampling"), [control.name]: valueOf(input) });
      model.save_changes();
    });
    return [control.name, input];
  });

  const lines = make("label", "nbdist-generate-check");
  const each = make("input");
  each.type = "checkbox";
  lines.append(each, "Each line is a prompt");
  const row = make("div", "nbdist-generate-buttons");
  const send = make("button", "nbdist-generate-primary", "Send");
  send.type = "submit";
  send.title = "Ctrl+Enter or Cmd+Enter";
  const stop = make("button", "", "Stop all");
  const clear = make("button", "", "Clear finished");
  stop.type = clear.type = "button";
  stop.addEventListener("click", () => model.send({ kind: "stop", id: null }));
  clear.addEventListener("click", () => model.send({ kind: "clear" }));
  row.append(send, stop, clear, lines);
  form.append(label, prompt, controls, row);

  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const texts = each.checked ? prompt.value.split("\n") : [prompt.value];
    const prompts = texts.filter((text) => text.trim() !== "");
    if (prompts.length === 0) return prompt.focus();
    store.send(prompts, Object.fromEntries(inputs.map(([name, input]) => [name, valueOf(input)])));
    prompt.select();
  });
  return { form, stop, clear, inputs };
}

const valueOf = (input) => (input.value === "" ? null : Number(input.value));

// --- the view -------------------------------------------------------------------------------

function initialize({ model }) {
  const store = new Store(model);
  stores.set(model.get("panel_id"), store);
  return () => {
    store.close();
    stores.delete(model.get("panel_id"));
  };
}

function render({ model, el }) {
  const store = stores.get(model.get("panel_id"));
  const root = make("section", "nbdist-generate");
  root.setAttribute("aria-label", "Generate");
  // Notebook shortcuts must not see keys meant for the panel: "d, d" deletes a cell.
  root.addEventListener("keydown", (event) => event.stopPropagation());

  const head = make("div", "nbdist-generate-head");
  const serving = make("span", "nbdist-generate-serving");
  const status = make("span", "nbdist-generate-status");
  status.setAttribute("role", "status");
  status.setAttribute("aria-live", "polite");
  head.append(make("strong", "", "Generate"), serving, status);
  const memory = make("div", "nbdist-generate-memory");
  const { form, stop, clear, inputs } = buildForm(model, store);
  const list = make("ol", "nbdist-generate-cards");
  root.append(head, form, memory, list);
  el.append(root);

  const showModel = () => {
    serving.textContent = [model.get("model"), model.get("serving")].filter(Boolean).join(" on ");
    const values = model.get("sampling");
    for (const [name, input] of inputs) input.value = values[name] ?? "";
  };
  const showMemory = () => (memory.textContent = model.get("memory"));
  const views = new Map();
  const showCards = () => {
    const cards = [...store.cards.values()].sort((a, b) => b.number - a.number);
    for (const [id, view] of views) {
      if (!store.cards.has(id)) {
        view.root.remove();
        views.delete(id);
      }
    }
    cards.forEach((card, index) => {
      if (!views.has(card.id)) views.set(card.id, new CardView(card.id, store));
      const view = views.get(card.id);
      view.show(card);
      // moved only when out of place: moving takes the focus away
      if (list.children[index] !== view.root) list.insertBefore(view.root, list.children[index] ?? null);
    });
    const live = cards.filter(isLive).length;
    const words = cards.length === 0 ? "ready" : `${live} running, ${cards.length - live} finished`;
    // set only when different, or a screen reader would repeat it with every token
    if (status.textContent !== words) status.textContent = words;
    stop.disabled = live === 0;
    clear.disabled = live === cards.length;
  };

  model.on("change:sampling change:serving change:model", showModel);
  model.on("change:memory", showMemory);
  store.addEventListener("change", showCards);
  showModel();
  showMemory();
  showCards();
  return () => {
    model.off("change:sampling change:serving change:model", showModel);
    model.off("change:memory", showMemory);
    store.removeEventListener("change", showCards);
  };
}

export default { initialize, render };
