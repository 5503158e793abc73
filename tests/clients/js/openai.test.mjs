// OpenAI's JavaScript client, unchanged, against the default model: how it asks, stops, and tries again.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { LengthFinishReasonError } from "openai/error";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ChatCompletionStream } from "openai/lib/ChatCompletionStream";
import { z } from "zod";
import { ABSENT, EMBEDDER, LONG, MODEL } from "./stack.mjs";
import { clientOf, engineIsAtWork, givesUpEarly, watchedClientOf } from "./stack.mjs";

const client = clientOf();
const QUESTION = [{ role: "user", content: "What is the capital of France? Answer in one sentence." }];
const GREEDY = { model: MODEL, messages: QUESTION, max_tokens: 32, temperature: 0 };
const LONG_WORK = { model: MODEL, prompt: "Once upon a time", max_tokens: LONG, ignore_eos: true };
const City = z.object({ country: z.enum(["France", "Italy", "Spain"]), is_capital: z.boolean() });

async function all(stream) {
  const parts = [];
  for await (const part of stream) {
    parts.push(part);
  }
  return parts;
}

test("a question is answered streamed and whole", async () => {
  const whole = await client.chat.completions.create(GREEDY);
  const chunks = await all(await client.chat.completions.create({ ...GREEDY, stream: true }));
  const text = whole.choices[0].message.content;
  assert.match(text, /Paris/);
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), text);
  assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("the stream helper ends with the answer that comes whole", async () => {
  const whole = await client.chat.completions.create(GREEDY);
  const stream = client.chat.completions.stream({ ...GREEDY, stream_options: { include_usage: true } });
  const deltas = [];
  stream.on("content", (delta) => deltas.push(delta));
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  assert.equal(deltas.join(""), whole.choices[0].message.content);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
});

test("a stream can be handed on to another reader", async () => {
  const handedOn = client.chat.completions.stream(GREEDY).toReadableStream();
  const text = await ChatCompletionStream.fromReadableStream(handedOn).finalContent();
  assert.match(text, /Paris/);
});

test("a plain completion adds up and several prompts are answered in order", async () => {
  const asked = { model: MODEL, prompt: ["One, two,", "Red, green,"], max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create(asked);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
    for (const choice of chunk.choices) {
      texts[choice.index] += choice.text;
    }
  }
  assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
  assert.notEqual(texts[0], texts[1]);
});

test("several things are asked at once", async () => {
  const ask = (number) =>
    client.completions.create({ model: MODEL, prompt: `${number} and`, max_tokens: 8, temperature: 0 });
  const together = await Promise.all([1, 2, 3, 4].map(ask));
  const alone = await ask(3);
  assert.equal(together[2].choices[0].text, alone.choices[0].text);
});

test("a zod schema is parsed in a chat whole and streamed", async () => {
  const asked = { ...GREEDY, max_tokens: 100, response_format: zodResponseFormat(City, "city") };
  const whole = await client.chat.completions.parse(asked);
  City.parse(whole.choices[0].message.parsed);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, whole.choices[0].message.parsed);
});

test("a zod schema is parsed in a response whole and streamed", async () => {
  const asked = {
    model: MODEL,
    input: QUESTION,
    temperature: 0,
    max_output_tokens: 100,
    text: { format: zodTextFormat(City, "city") },
  };
  const whole = await client.responses.parse(asked);
  City.parse(whole.output_parsed);
  const streamed = await client.responses.stream(asked).finalResponse();
  assert.deepEqual(streamed.output_parsed, whole.output_parsed);
});

test("an answer that was cut is not parsed", async () => {
  const asked = { ...GREEDY, max_tokens: 2, response_format: zodResponseFormat(City, "city") };
  await assert.rejects(client.chat.completions.parse(asked), LengthFinishReasonError);
});

test("a response is streamed kept and forgotten", async () => {
  const asked = { model: MODEL, input: QUESTION, max_output_tokens: 32, temperature: 0 };
  const events = await all(await client.responses.create({ ...asked, stream: true }));
  const { response } = events.at(-1);
  const texts = events.filter((event) => event.type === "response.output_text.delta");
  const kept = await client.responses.retrieve(response.id);
  assert.match(kept.output_text, /Paris/);
  assert.equal(texts.map((event) => event.delta).join(""), kept.output_text);
  assert.deepEqual(kept.output, response.output);
  const [item] = await all(client.responses.inputItems.list(response.id));
  assert.equal(item.content[0].text, QUESTION[0].content);
  await client.responses.delete(response.id);
  await assert.rejects(client.responses.retrieve(response.id), OpenAI.NotFoundError);
});

test("a second turn goes on from the first", async () => {
  const asked = { model: MODEL, temperature: 0, max_output_tokens: 24 };
  const first = await client.responses.create({ ...asked, input: "Tell me a story about a mill." });
  const second = await client.responses.create({ ...asked, input: "Go on.", previous_response_id: first.id });
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens);
});

test("texts have the same vectors in both encodings", async () => {
  const input = ["water falls to the turbine", "fox"];
  const byBase64 = await client.embeddings.create({ model: EMBEDDER, input }); // what it asks for by itself
  const byFloat = await client.embeddings.create({ model: EMBEDDER, input, encoding_format: "float" });
  assert.equal(byBase64.data.length, 2);
  for (const [number, { embedding }] of byBase64.data.entries()) {
    assert.equal(embedding.length, byFloat.data[number].embedding.length);
    assert.ok(embedding.every((value, at) => Math.abs(value - byFloat.data[number].embedding[at]) < 1e-7));
  }
});

test("models are listed and found", async () => {
  const models = await all(client.models.list());
  assert.deepEqual(models.map((model) => model.id), [MODEL, EMBEDDER, ABSENT]);
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
  await assert.rejects(client.models.retrieve("nobody/such"), OpenAI.NotFoundError);
});

test("an answer and an error have the id of their request", async () => {
  const { data, response, request_id: id } = await client.chat.completions
    .create({ ...GREEDY, max_tokens: 1 }, { headers: { "x-request-id": "mine" } })
    .withResponse();
  assert.equal(id, "mine");
  assert.equal(data._request_id, "mine");
  assert.equal(response.headers.get("x-request-id"), "mine");
  await assert.rejects(client.chat.completions.create({ ...GREEDY, temperature: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    assert.match(error.requestID, /^req-/);
    return true;
  });
});

test("a request that times out ends on the engine too", async () => {
  await givesUpEarly(async () => {
    const asked = client.completions.create(LONG_WORK, { timeout: 500 });
    await assert.rejects(asked, OpenAI.APIConnectionTimeoutError);
  });
});

test("a request that is aborted ends on the engine too", async () => {
  await givesUpEarly(async () => {
    const controller = new AbortController();
    const asked = client.completions.create(LONG_WORK, { signal: controller.signal });
    const refused = assert.rejects(asked, OpenAI.APIUserAbortError);
    await engineIsAtWork();
    controller.abort();
    await refused;
  });
});

test("a stream whose controller aborts ends on the engine too", async () => {
  await givesUpEarly(async () => {
    const stream = await client.completions.create({ ...LONG_WORK, stream: true });
    let num = 0;
    for await (const _ of stream) {
      num += 1;
      stream.controller.abort();
    }
    assert.ok(num >= 1);
  });
});

test("a stream that is left ends on the engine too", async () => {
  await givesUpEarly(async () => {
    for await (const _ of await client.completions.create({ ...LONG_WORK, stream: true })) {
      break;
    }
  });
});

test("a stream helper that is aborted ends on the engine too", async () => {
  await givesUpEarly(async () => {
    const asked = { model: MODEL, messages: QUESTION, max_tokens: LONG, ignore_eos: true };
    const stream = client.chat.completions.stream(asked);
    stream.on("content", () => stream.abort());
    await assert.rejects(stream.done(), OpenAI.APIUserAbortError);
  });
});

test("a rate limit is waited out for as long as the server says", async () => {
  const { client: hasty, answers } = watchedClientOf("hasty", { maxRetries: 1 });
  await hasty.embeddings.create({ model: EMBEDDER, input: "one" });
  answers.length = 0;
  await hasty.embeddings.create({ model: EMBEDDER, input: "two" });
  assert.deepEqual(answers.map((answer) => answer.status), [429, 200]);
});

test("a model without an engine is asked for again when the server says", async () => {
  const { client: patient, answers } = watchedClientOf("free", { maxRetries: 1 });
  await assert.rejects(patient.completions.create({ model: ABSENT, prompt: "hi" }), (error) => {
    assert.ok(error instanceof OpenAI.InternalServerError);
    assert.equal(error.status, 503);
    const wait = Number(error.headers.get("retry-after"));
    assert.ok(wait >= 1);
    assert.ok(answers[1].at - answers[0].at >= 1000 * wait - 50);
    return true;
  });
  assert.deepEqual(answers.map((answer) => answer.status), [503, 503]);
});

test("what cannot get better is not tried again", async () => {
  const { client: patient, answers } = watchedClientOf("free", { maxRetries: 3 });
  const asked = { model: MODEL, prompt: "a", max_tokens: 10 ** 6 };
  await assert.rejects(patient.completions.create(asked), OpenAI.BadRequestError);
  await assert.rejects(clientOf("free", { apiKey: "hr-wrong" }).models.list(), OpenAI.AuthenticationError);
  assert.equal(answers.length, 1);
});
