"use strict";
const at = (id) => document.getElementById(id);
const talk = at("talk"), said = at("said"), key = at("key");
const STORE = "moe-mps chat ";
let model = null, chat = null, running = null, edited = null;

function add(parent, tag, name, text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  parent.append(made);
  return made;
}

function button(parent, text, act) {
  const made = add(parent, "button", "", text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

// Chats, each under a name of its own in the browser's storage: pages beside each other write different ones.

function stored() {
  try {
    const names = Object.keys(localStorage).filter((name) => name.startsWith(STORE));
    return names.map((name) => JSON.parse(localStorage[name])).sort((a, b) => b.at - a.at);
  } catch {
    return [];
  }
}

function save(one = chat) {
  if (!one.messages.length) return;
  one.at = Date.now();
  const others = stored().filter((other) => other.id !== one.id);
  for (;;) {
    try {
      localStorage[STORE + one.id] = JSON.stringify(one);
      break;
    } catch {
      if (!others.length) return;  // no storage: the chat lives as long as the page
      localStorage.removeItem(STORE + others.pop().id);
    }
  }
  if (one === chat) history.replaceState(null, "", "#" + one.id);
  list();
}

function list() {
  at("list").replaceChildren();
  for (const one of stored()) {
    const row = add(at("list"), "li", "");
    const open = button(row, one.messages[0].content.slice(0, 80), () => { begin(one); showChats(false); });
    if (one.id === chat.id) open.setAttribute("aria-current", "true");
    button(row, "Delete", () => {
      localStorage.removeItem(STORE + one.id);
      if (one.id === chat.id) begin(null);
      list();
    }).setAttribute("aria-label", "Delete the chat " + open.textContent);
  }
  if (!at("list").children.length) add(at("list"), "li", "soft", "There are none yet.");
}

function showChats(shown) {
  at("chats").hidden = !shown;
  at("chats-button").setAttribute("aria-expanded", shown);
}

/** Shows a chat, or a new one. */
function begin(one) {
  stop();
  chat = one || { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 6), at: 0, system: "", temperature: "", messages: [] };
  history.replaceState(null, "", one ? "#" + chat.id : location.pathname);
  at("system").value = chat.system;
  at("temperature").value = chat.temperature;
  edit(null);
  draw();
  list();
  said.focus();
}

// Messages

const sanitized = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "form", "button", "textarea", "select"],
  FORBID_ATTR: ["style", "id", "name", "for", "form"],
  RETURN_DOM_FRAGMENT: true,
};
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (!/^language-[\w+#.-]+$/.test(node.className)) node.removeAttribute("class");
  if (node.tagName === "A") {
    node.target = "_blank";
    node.rel = "noopener noreferrer";
  }
});

/** Markdown as elements without scripts; each block of code has a button. */
function markdown(text) {
  const made = DOMPurify.sanitize(marked.parse(text), sanitized);
  for (const pre of made.querySelectorAll("pre")) {
    const box = document.createElement("div"), code = pre.textContent;
    box.className = "code";
    pre.replaceWith(box);
    pre.tabIndex = 0;  // to be scrolled by keys
    const head = add(box, "div", "");
    add(head, "span", "", ((pre.firstElementChild || pre).className.match(/^language-(.*)/) || ["", "code"])[1]);
    button(head, "Copy", (event) => copy(code, event.target));
    box.append(pre);
  }
  return made;
}

async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // on a page of another machine, without TLS
    const field = add(document.body, "textarea", "");
    field.value = text;
    field.select();
    document.execCommand("copy");
    field.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
}

function fill(shown, message) {
  shown.thought.hidden = !message.reasoning;
  shown.thought.lastChild.textContent = message.reasoning;
  shown.text.replaceChildren(markdown(message.content));
  shown.figures.textContent = message.figures;
  shown.figures.classList.toggle("error", message.failed);
}

function drawOne(message, number) {
  const box = add(at("messages"), "article", "message " + message.role);
  if (message.role === "user") {
    add(box, "div", "text", message.content);
    button(add(box, "div", "under"), "Edit", () => edit(number));
    return null;
  }
  const thought = add(box, "details", "thought");
  add(thought, "summary", "", "Reasoning");
  add(thought, "div", "");
  const shown = { box, thought, text: add(box, "div", "text") };
  const under = add(box, "div", "under");
  shown.figures = add(under, "span", "figures");
  button(under, "Copy", (event) => copy(message.content, event.target));
  button(under, "Retry", () => retry(number));
  fill(shown, message);
  return shown;
}

function draw() {
  at("first").hidden = chat.messages.length > 0;
  at("messages").replaceChildren();
  const shown = chat.messages.map(drawOne);
  talk.scrollTop = talk.scrollHeight;
  return shown.at(-1);
}

function edit(number) {
  edited = number;
  at("editing").hidden = number === null;
  said.value = number === null ? "" : chat.messages[number].content;
  said.focus();
}

function retry(number) {
  if (running) return;
  chat.messages.length = number;
  answer();
}

// The server

async function ask(path, body, signal) {
  const headers = { "content-type": "application/json", ...(key.value && { authorization: "Bearer " + key.value }) };
  const got = await fetch(path, { headers, signal, ...(body && { method: "POST", body: JSON.stringify(body) }) });
  at("locked").hidden = got.status !== 401;
  if (got.ok) return got;
  let reason = got.statusText;
  try { reason = (await got.json()).error.message; } catch { /* no object in JSON */ }
  throw new Error(reason);
}

async function look() {
  try {
    if (model === null) {
      const told = (await (await ask("v1/models")).json()).data[0];
      model = told.id;
      if (told.context_length) at("reads").textContent = "It reads " + told.context_length.toLocaleString("en") + " tokens.";
    }
    for (const place of [at("model"), ...document.querySelectorAll(".model")]) place.textContent = model;
    document.title = model;
    const text = await (await ask("metrics")).text();
    const value = (name) => Number((text.match(new RegExp("^moe_mps_" + name + " (.*)$", "m")) || [])[1]);
    const waiting = value("requests_waiting");
    at("state").textContent = (value("memory_bytes") / 1e9).toFixed(2) + " GB in use" + (waiting ? ", " + waiting + " waiting" : "");
  } catch (error) {
    at("state").textContent = error.message;
  }
}

/** Reads an answer into its message; `show` is called behind each part. */
async function read(message, stream, show) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", first = 0, reason = "", figures = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith(": ")) { message.figures = event.slice(2); continue; }
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      for (const choice of part.choices) {
        if (!first && (choice.delta.content || choice.delta.reasoning_content)) first = performance.now();
        reason = choice.finish_reason || reason;
        message.reasoning += choice.delta.reasoning_content || "";
        message.content += choice.delta.content || "";
      }
      if (part.usage && first) {
        const { prompt_tokens: prompt, completion_tokens: count } = part.usage;
        const seconds = (performance.now() - first) / 1000;
        figures = count + " tokens" + (count > 1 && seconds > 0 ? ", " + ((count - 1) / seconds).toFixed(1) + " tokens/s" : "");
        message.figures = figures;
        figures += ", " + part.usage.prompt_tokens_details.cached_tokens + " of " + prompt + " prompt tokens cached";
        const { accepted_prediction_tokens: held, rejected_prediction_tokens: wrong } = part.usage.completion_tokens_details;
        if (held + wrong) figures += ", " + held + " of " + (held + wrong) + " draft tokens accepted";
      }
    }
    show();
  }
  message.figures = figures + (reason === "length" ? ", cut off" : "");
}

/** The messages as the server takes them: what had no answer is left out. */
function sent(one) {
  const messages = one.system.trim() ? [{ role: "system", content: one.system }] : [];
  for (const { role, content } of one.messages) {
    if (content) messages.push({ role, content });
    else messages.pop();
  }
  return messages;
}

/** Lets the model answer the last message. */
async function answer() {
  const mine = chat, messages = sent(mine);
  const message = { role: "assistant", content: "", reasoning: "", figures: "…", failed: false };
  mine.messages.push(message);
  save();
  const shown = draw(), ending = new AbortController();
  running = ending;
  at("stop").disabled = false;
  at("send").disabled = true;
  shown.box.setAttribute("aria-busy", "true");  // read out once, when it is whole
  let due = 0, kept = performance.now();
  const update = () => {
    due = 0;
    const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120;
    fill(shown, message);
    if (follows) talk.scrollTop = talk.scrollHeight;
    if (performance.now() - kept > 1000) {
      kept = performance.now();
      save(mine);
    }
  };
  try {
    const body = { model, messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    if (mine.temperature !== "") body.temperature = Number(mine.temperature);
    await read(message, (await ask("v1/chat/completions", body, ending.signal)).body, () => { due = due || setTimeout(update, 100); });
  } catch (error) {
    message.failed = error.name !== "AbortError";
    message.figures = message.failed ? error.message : "stopped";
  }
  clearTimeout(due);
  update();
  shown.box.removeAttribute("aria-busy");
  save(mine);
  running = null;
  at("stop").disabled = true;
  at("send").disabled = false;
  look();
}

function stop() {
  if (running) running.abort();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = said.value.trim();
  if (model === null) look();
  if (!text || running) return;
  if (edited !== null) chat.messages.length = edited;
  edit(null);
  chat.messages.push({ role: "user", content: text });
  answer();
});
said.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("form").requestSubmit(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  stop();
  if (edited !== null) edit(null);
});
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", () => begin(null));
at("keep").addEventListener("click", () => edit(null));
at("chats-button").addEventListener("click", () => showChats(at("chats").hidden));
for (const idea of document.querySelectorAll("#ideas button")) {
  idea.addEventListener("click", () => { said.value = idea.textContent; at("form").requestSubmit(); });
}
for (const name of ["system", "temperature"]) {
  at(name).addEventListener("change", () => {
    if (at(name).validity.valid) chat[name] = at(name).value;
    save();
  });
}
window.addEventListener("storage", list);
window.addEventListener("pagehide", () => save());
key.addEventListener("change", look);
begin(stored().find((one) => "#" + one.id === location.hash) || null);
look();
setInterval(() => running || document.hidden || look(), 10000);
