// Vercel's AI SDK with its defaults, which are the Responses API; called with URL.
import assert from 'node:assert/strict';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const openai = createOpenAI({ baseURL: process.argv[2], apiKey: '-' });
const options = { model: openai('pycode'), maxOutputTokens: 24, maxRetries: 0 };

// three turns: earlier answers are sent by reference, unless the client is told otherwise
const messages = [];
for (const question of ['def main():', 'and then?', 'once more']) {
  messages.push({ role: 'user', content: question });
  const answer = await generateText({ ...options, messages });
  assert.ok(answer.usage.inputTokens > 0);
  assert.ok(answer.response.messages.length > 0);
  messages.push(...answer.response.messages);
}

const stream = streamText({ ...options, messages: [...messages, { role: 'user', content: 'x' }] });
let text = '';
for await (const piece of stream.textStream) text += piece;
assert.equal(text, await stream.text);

// a call, its result, and the answer after it
let calls = 0;
const weather = tool({
  description: 'The weather in a city.',
  inputSchema: z.object({ city: z.enum(['Oslo', 'Rome']) }),
  execute: async ({ city }) => {
    calls += 1;
    return `fine in ${city}`;
  },
});
const loop = await generateText({
  ...options,
  maxOutputTokens: 64,
  prompt: 'Weather in Oslo?',
  tools: { weather },
  toolChoice: 'required',
  providerOptions: { openai: { parallelToolCalls: false } }, // this model would never end
  stopWhen: stepCountIs(2),
});
assert.ok(calls >= 1);
assert.equal(loop.steps.length, 2);
console.log('done');
