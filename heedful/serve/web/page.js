// The routes of the loaded models, a body to send, and the answer; every text from outside becomes a text node.

const at = (id) => document.getElementById(id);
let paths = {};

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function headers() {
  const key = at("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function get(path) {
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function options(select, values) {
  select.replaceChildren(...values.map((value) => new Option(value, value)));
}

async function showModel(name) {
  const info = await get(name ? `/info?model=${encodeURIComponent(name)}` : "/info");
  if (!name) options(at("model"), info.models);
  at("model").value = info.model_id;
  at("facts").textContent = [
    info.family, Object.keys(info.model_type)[0], `${info.parameters.toLocaleString("en")} parameters`, info.model_dtype,
  ].join(" · ");
  options(at("route"), info.routes);
  showRoute();
}

function showRoute() {
  const asked = paths[at("route").value]?.post;
  at("told").textContent = asked?.summary ?? "";
  at("body").value = JSON.stringify(asked?.requestBody.content["application/json"].example ?? {}, null, 2);
}

function bars(answer) {
  const rows = [answer].flat(2).filter((each) => each !== null && typeof each === "object");
  const table = element("table");
  for (const each of rows.flatMap((row) => row.masks?.flatMap((mask) => mask.tokens) ?? row.entities ?? [row])) {
    const share = each.probability ?? each.score;
    const name = each.label ?? each.token ?? each.answer ?? each.choice ?? each.text;
    if (typeof share !== "number" || typeof name !== "string") continue;
    const row = element("tr");
    const cell = element("td");
    cell.append(element("bdi", name));
    const bar = element("td", undefined, "bar");
    const shown = element("progress");
    shown.value = Math.max(0, Math.min(1, share));
    shown.setAttribute("aria-hidden", "true");
    bar.append(shown);
    row.append(cell, bar, element("td", share.toFixed(4), "number"));
    table.append(row);
  }
  at("shown").replaceChildren(...(table.rows.length ? [table] : []));
  at("whole").open = table.rows.length === 0;
}

function say(text, wrong) {
  at("status").textContent = text;
  at("status").className = wrong ? "wrong" : "";
}

async function ask(event) {
  event?.preventDefault();
  const button = document.querySelector("button");
  if (button.disabled) return;
  button.disabled = true;
  say("…", false);
  const start = performance.now();
  try {
    const body = { ...JSON.parse(at("body").value), model: at("model").value };
    const answer = await fetch(at("route").value, {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    const found = await answer.json();
    say(`${answer.status} · ${Math.round(performance.now() - start)} ms`, !answer.ok);
    at("answer").textContent = JSON.stringify(found, null, 2).slice(0, 100_000);
    bars(answer.ok ? found : []);
    at("found").hidden = false;
  } catch (error) {
    say(String(error.message), true);
    at("found").hidden = true;
  } finally {
    button.disabled = false;
  }
}

// A link of the page, with the key that is given: the browser alone would ask without one.
async function follow(event) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  try {
    const answer = await fetch(event.currentTarget.href, { headers: headers() });
    const json = answer.headers.get("content-type").startsWith("application/json");
    const found = json ? JSON.stringify(await answer.json(), null, 2) : await answer.text();
    say(answer.status === 401 ? "401 · give a key above" : String(answer.status), !answer.ok);
    at("answer").textContent = found.slice(0, 100_000);
    bars([]);
    at("found").hidden = false;
  } catch (error) {
    say(String(error.message), true);
    at("found").hidden = true;
  }
}

async function begin() {
  try {
    paths = (await get("/openapi.json")).paths;
    await showModel("");
  } catch (error) {
    at("facts").textContent = `${error.message}; a key may be needed`;
  }
}

at("form").addEventListener("submit", ask);
for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", follow);
at("body").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
});
at("model").addEventListener("change", () => showModel(at("model").value));
at("route").addEventListener("change", showRoute);
at("key").addEventListener("change", begin);
begin();
