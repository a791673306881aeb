// Answers as rows of a table; every text from outside becomes a text node.

export function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// A probability as `heedful predict` prints it.
function percent(probability) {
  return probability == null ? "" : `${(100 * probability).toFixed(1)} %`;
}

// A row of a name, perhaps its kind, and a probability with a bar, or another number.
export function rowOf({ name, kind, probability, number }) {
  const row = element("tr");
  const heading = element("th");
  heading.scope = "row";
  heading.append(element("bdi", name));
  row.append(heading);
  if (kind !== undefined) {
    const cell = row.insertCell();
    cell.className = "kind";
    cell.append(element("bdi", kind));
  }
  if (number === undefined) {
    const cell = row.insertCell();
    cell.className = "bar";
    if (probability !== null) {
      const bar = element("progress");
      bar.value = probability;
      bar.setAttribute("aria-hidden", "true");
      cell.append(bar);
    }
  }
  row.append(element("td", number?.toFixed(4) ?? percent(probability), "number"));
  return row;
}
