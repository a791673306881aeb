// Answers as rows of a table. Every text from outside becomes a text node.

// A new element with a text and a class, if they are given.
export function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// A probability as `heedful predict` prints it.
function percent(probability) {
  return probability == null ? "" : `${(100 * probability).toFixed(1)} %`;
}

// A table row: a name, its kind if there is one, and a probability with a bar, or another number.
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
