// Talking to the server: its errors in words, and its event streams.

const TITLES = { 401: "An API key is needed", 429: "The server is busy", 503: "The engine is not serving" };

export class ServerError extends Error {
  constructor(status, error) {
    super(error && error.message ? error.message.replace("the engine is not serving: ", "") : `the server answered with status ${status}`);
    const is_long = error && error.param === "messages" && /maximum context length|more than \d+ tokens/.test(error.message);
    const refused = is_long ? "The conversation is longer than the context" : error && error.param ? `The server refused ${error.param}` : "The request was refused";
    this.title = TITLES[status] || (status >= 500 ? "The server failed" : status ? refused : "The server cannot be reached");
    this.status = status;
    this.is_long = Boolean(is_long);
    this.size = is_long ? /((more than )?\d+) tokens of prompt/.exec(error.message)?.[1] : undefined;  // such as "more than 4096"
  }
}

// The events of one streamed answer. Throws ServerError; an AbortError when `signal` fires.
export async function* answersOf(body, headers, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new ServerError(response.status, (await response.json().catch(() => ({}))).error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.code === "engine_dead" ? 503 : 500, event.error);
      yield event;
    }
  }
}
