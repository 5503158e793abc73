// Calls of tools by OpenAI's JavaScript client. The model is small, so calls are demanded of it.
import assert from "node:assert/strict";
import test from "node:test";
import { zodFunction, zodResponsesFunction } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, clientOf } from "./stack.mjs";

const client = clientOf();
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), in_days: z.union([z.literal(1), z.literal(2)]) });
const QUESTION = "What is the weather in Paris?";
const CHAT = {
  model: MODEL,
  messages: [{ role: "user", content: QUESTION }],
  tools: [zodFunction({ name: "get_weather", parameters: Weather })],
  tool_choice: "required",
  parallel_tool_calls: false,
  temperature: 0,
  max_tokens: 200,
};

test("a call that is demanded is made and its arguments are parsed", async () => {
  const { choices } = await client.chat.completions.parse(CHAT);
  assert.equal(choices[0].finish_reason, "tool_calls");
  assert.ok(choices[0].message.tool_calls.length >= 1);
  for (const call of choices[0].message.tool_calls) {
    assert.equal(call.function.name, "get_weather");
    Weather.parse(call.function.parsed_arguments);
  }
});

test("a call is streamed in pieces that add up to the whole one", async () => {
  const whole = await client.chat.completions.create(CHAT);
  const stream = client.chat.completions.stream(CHAT);
  const pieces = [];
  stream.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
  const final = await stream.finalChatCompletion();
  const argumentsOf = (answer) => answer.choices[0].message.tool_calls.map((call) => call.function.arguments);
  assert.deepEqual(argumentsOf(final), argumentsOf(whole));
  assert.equal(pieces.join(""), argumentsOf(whole).join(""));
  assert.ok(pieces.length > argumentsOf(whole).length);
});

function runs(stream) {
  return async () => {
    const asked = [];
    const tool = zodFunction({
      name: "get_weather",
      parameters: Weather,
      function: (given) => {
        asked.push(Weather.parse(given));
        return "sunny";
      },
    });
    const choice = { type: "function", function: { name: "get_weather" } }; // it stops after this one
    const runner = client.chat.completions.runTools({ ...CHAT, stream, tools: [tool], tool_choice: choice });
    const results = [];
    runner.on("functionToolCallResult", (content) => results.push(content));
    await runner.done();
    assert.ok(asked.length >= 1);
    assert.equal(results[0], "sunny");
    assert.equal(runner.messages.at(-1).role, "tool");
  };
}

test("a function is run by a runner", runs(false));
test("a function is run by a streaming runner", runs(true));

test("the result of a call is read in the next turn", async () => {
  const first = await client.chat.completions.create(CHAT);
  const { message } = first.choices[0];
  assert.equal(message.tool_calls.length, 1);
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny, 21 degrees" };
  const turn = { ...CHAT, messages: [...CHAT.messages, message, result], max_tokens: 16 };
  const free = await client.chat.completions.create({ ...turn, tool_choice: "auto" });
  assert.ok(free.usage.prompt_tokens > first.usage.prompt_tokens);
  const told = await client.chat.completions.create({ ...turn, tool_choice: "none" });
  assert.ok(told.choices[0].message.content);
});

test("a call in a response is parsed and its result is taken", async () => {
  const asked = {
    model: MODEL,
    input: QUESTION,
    tools: [zodResponsesFunction({ name: "get_weather", parameters: Weather })],
    tool_choice: "required",
    parallel_tool_calls: false,
    temperature: 0,
    max_output_tokens: 200,
  };
  const whole = await client.responses.parse(asked);
  const calls = whole.output.filter((item) => item.type === "function_call");
  assert.ok(calls.length >= 1);
  calls.forEach((call) => Weather.parse(call.parsed_arguments));
  const streamed = await client.responses.stream(asked).finalResponse();
  assert.deepEqual(
    streamed.output.map((item) => item.arguments),
    whole.output.map((item) => item.arguments),
  );
  const results = calls.map(({ call_id }) => ({ type: "function_call_output", call_id, output: "sunny" }));
  const turn = { input: results, previous_response_id: whole.id, max_output_tokens: 16 };
  const told = await client.responses.create({ ...asked, ...turn, tool_choice: "none" });
  assert.ok(told.output_text);
});
