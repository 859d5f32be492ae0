// OpenAI's client for JavaScript: a whole answer, a streamed one, one that is left early, an error.
import OpenAI from "openai";

const [, , baseURL] = process.argv;
const client = new OpenAI({ baseURL, apiKey: "alpha", maxRetries: 0 });
const asked = { model: "fake", messages: [{ role: "user", content: "Hello" }] };

const whole = await client.chat.completions.create({ ...asked, max_tokens: 3 });

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

let pieces = 0;
for await (const _ of await client.chat.completions.create({ ...asked, stream: true, max_tokens: 4000 })) {
  if (++pieces === 3) break;
}

let refused = null;
try {
  await client.chat.completions.create({ ...asked, temperature: -1 });
} catch (error) {
  refused = { status: error.status, param: error.param };
}

console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed, usage, pieces, refused }));
