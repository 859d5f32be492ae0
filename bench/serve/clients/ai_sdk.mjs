// Vercel's AI SDK against a running server: `node bench/serve/clients/ai_sdk.mjs http://127.0.0.1:8000`
// in a folder where `npm install ai @ai-sdk/openai-compatible zod` was run (NODE_PATH is not read by modules, so run it from there).
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.cwd() + "/");
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, generateObject, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const url = process.argv[2];
const name = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const provider = createOpenAICompatible({ name: "windlass", baseURL: `${url}/v1`, apiKey: "unused", supportsStructuredOutputs: true });
const model = provider.chatModel(name);
const prompt = "What is the capital of France?";
const check = (ok, what) => { if (!ok) throw new Error(what); };

const plain = await generateText({ model, prompt, maxOutputTokens: 12 });
check(plain.text && plain.usage.outputTokens, "generateText");
let text = "";
const streamed = streamText({ model, prompt, maxOutputTokens: 12 });
for await (const piece of streamed.textStream) text += piece;
check(text, "streamText");
const weather = tool({ description: "The weather of a city.", inputSchema: z.object({ city: z.string().max(20) }) });
const called = await generateText({ model, prompt, tools: { weather }, toolChoice: "required", maxOutputTokens: 60 });
check(called.toolCalls.length === 1 && typeof called.toolCalls[0].input.city === "string", "tools");
const made = await generateObject({ model, prompt, schema: z.object({ name: z.string().max(20) }), maxOutputTokens: 60 });
check(typeof made.object.name === "string", "generateObject");
const version = require("ai/package.json").version;
console.log(`| ai (Vercel's AI SDK) | ${version} | generateText, streamText, a required tool, generateObject with a schema |`);
