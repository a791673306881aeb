// Requests to the server that the pages come from.

export function keyHeader(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// The JSON that the server answers with; an error has its message and status.
export async function getJson(path, options) {
  const answer = await fetch(path, options);
  if (answer.ok) return answer.json();
  const { error = path } = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(`${answer.status} · ${error}`), { status: answer.status });
}
