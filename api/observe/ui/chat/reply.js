// Asks the server for a reply, and adds what arrives to a message.

import { call, events } from "../server.js";
import { requestMessages } from "./conversation.js";
import { parameters } from "./settings.js";

const SLICE_MS = 8; // work on chunks before the browser may do other things

// Streams a reply into `message`, which is the path's last one.
//
// A message that has content is continued. `onPiece` is called with each piece: its `content` and
// `thought`. Throws an AbortError when `signal` stops it, and other errors with a text to show.
export async function stream(path, settings, signal, onPiece) {
  const message = path.at(-1);
  const continues = message.content !== "";
  const response = await call("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...parameters(settings),
      messages: requestMessages(path, settings.system),
      stream: true,
      stream_options: { include_usage: true },
      ...(continues && { continue_final_message: true, add_generation_prompt: false }),
    }),
  });
  const speed = new Speed(message);
  let since = performance.now();
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    message.model = chunk.model;
    if (chunk.usage) speed.end(chunk.usage.completion_tokens);
    const [choice] = chunk.choices;
    if (choice) take(choice, message, speed, onPiece);
    // Hundreds of chunks may arrive at once: let the browser draw, and answer the user, in between.
    if (performance.now() - since < SLICE_MS) continue;
    await pause();
    since = performance.now();
  }
}

// Resolves in a task of its own. NOTE: a timer would wait for a second in a tab in the background.
function pause() {
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

function take({ delta, logprobs, finish_reason: finish }, message, speed, onPiece) {
  const content = delta.content ?? "";
  const thought = delta.reasoning_content ?? "";
  const calls = delta.tool_calls ?? [];
  if (content || thought || calls.length) speed.addChunk();
  message.content += content;
  message.thought += thought;
  for (const piece of calls) addCall(message, piece);
  for (const token of logprobs?.content ?? []) (message.tokens ??= []).push(scored(token));
  if (finish) message.finish = finish;
  onPiece({ content, thought, calls });
}

// The calls of a reply arrive in pieces, of which the first has id and name.
function addCall(message, { index, id, function: piece }) {
  const known = (message.calls[index] ??= { id, name: "", text: "" });
  known.id ??= id;
  known.name += piece?.name ?? "";
  known.text += piece?.arguments ?? "";
}

const scored = ({ token, logprob, top_logprobs: top }) => ({
  token,
  logprob,
  top: top.flatMap((other) => [other.token, other.logprob]), // flat: there may be 100,000
});

// The token count and times of a reply, in seconds; kept in its `speed`. Until the server sends
// usage, each chunk counts as a token. A continued reply has the sum of both.
class Speed {
  constructor(message) {
    this.before = message.speed ?? { tokens: 0, seconds: 0, gaps: 0, first: undefined };
    this.message = message;
    this.started = performance.now();
    this.chunks = 0;
  }

  addChunk() {
    this.last = performance.now();
    this.first ??= this.last;
    this.chunks += 1;
    this.keep(this.chunks, true);
  }

  end(tokens) {
    this.keep(tokens, false);
  }

  keep(tokens, about) {
    const { before } = this;
    const took = this.first === undefined ? 0 : (this.last - this.first) / 1000;
    this.message.speed = {
      about,
      tokens: before.tokens + tokens,
      gaps: before.gaps + Math.max(tokens - 1, 0), // between tokens, in `seconds`
      seconds: before.seconds + took,
      first: before.first ?? (this.first === undefined ? undefined : (this.first - this.started) / 1000),
    };
  }
}
