// Requests of the pages to their server.

export function keyHeader(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// Return the JSON of the server's answer, or throw an error with the server's message and status.
export async function getJson(path, options) {
  const answer = await fetch(path, options);
  if (answer.ok) return answer.json();
  const { error = path } = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(`${answer.status} · ${error}`), { status: answer.status });
}
