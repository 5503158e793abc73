// What OpenAI's JavaScript client, unchanged, makes of a server.
//
//   node openai_client.mjs --url URL --model M --embedding-model E --node-modules FOLDER CASE...
//
// The key is in OPENAI_API_KEY. For each case a line of JSON says what came of it: with `failed` or
// `notApplicable`, the reason, with `refused` the status and error of a refusal that nobody expected.
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { parseArgs } from "node:util";

const { values: given, positionals: names } = parseArgs({
  options: {
    url: { type: "string" },
    model: { type: "string" },
    "embedding-model": { type: "string" },
    "node-modules": { type: "string" },
  },
  allowPositionals: true,
});
const load = createRequire(resolve(given["node-modules"], "here.js"));

class Failed extends Error {}
class NotApplicable extends Error {}

/** Of a package that is there or is not; the reason says what to install. */
function loaded(name, ...modules) {
  try {
    return modules.map((each) => load(each));
  } catch (error) {
    throw new NotApplicable(`${name} cannot be loaded (npm install ${name}): ${error.message}`);
  }
}

function check(holds, reason) {
  if (!holds) {
    throw new Failed(reason);
  }
}

function checkEqual(found, expected, what) {
  const [one, other] = [JSON.stringify(found), JSON.stringify(expected)];
  check(one === other, `${what} is ${one}, not ${other}`);
}

async function checkThrows(promise, kind) {
  try {
    await promise;
  } catch (error) {
    check(error instanceof kind, `${error.constructor.name} instead of ${kind.name}: ${error.message}`);
    return error;
  }
  throw new Failed(`there is no ${kind.name}`);
}

async function all(stream) {
  const parts = [];
  for await (const part of stream) {
    parts.push(part);
  }
  return parts;
}

const QUESTION = "Count from one to one hundred in words, without stopping.";
const ABOUT_A_RIVER = "Which river flows through Rome? Answer as JSON.";
const ABOUT_WEATHER = "What is the weather in Paris? Call a tool.";
const ROOM = 300; // tokens: enough for any form or call below
const { model } = given;

function chatOf(content, fields) {
  return { model, messages: [{ role: "user", content }], max_tokens: 20, temperature: 0, ...fields };
}

const COUNTING = chatOf(QUESTION, { stream_options: { include_usage: true } });

const cases = {
  async "a chat"({ client }) {
    const { stream_options: _, ...asked } = COUNTING;
    const { choices, usage } = await client.chat.completions.create(asked);
    const chunks = await all(await client.chat.completions.create({ ...COUNTING, stream: true }));
    const pieces = chunks.flatMap((chunk) => chunk.choices);
    check(choices[0].message.content, "there is no content");
    checkEqual(
      [pieces.map(({ delta }) => delta.content ?? "").join(""), pieces.at(-1).finish_reason],
      [choices[0].message.content, choices[0].finish_reason],
      "the streamed content and finish_reason",
    );
    checkEqual(chunks.at(-1).usage?.completion_tokens, usage.completion_tokens, "completion_tokens");
  },

  async "the stream helper"({ client }) {
    const { stream_options: _, ...asked } = COUNTING;
    const whole = await client.chat.completions.create(asked);
    const stream = client.chat.completions.stream(COUNTING);
    const deltas = [];
    stream.on("content", (delta) => deltas.push(delta));
    const final = await stream.finalChatCompletion();
    const cameOf = ({ choices: [{ message, finish_reason: reason }], usage }) => [
      message.content,
      reason,
      usage?.completion_tokens,
    ];
    checkEqual(cameOf(final), cameOf(whole), "the final completion");
    checkEqual(deltas.join(""), whole.choices[0].message.content, "the deltas");
  },

  async "a forced call"({ client }) {
    const parameters = {
      type: "object",
      properties: { city: { enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    };
    const tools = [{ type: "function", function: { name: "get_weather", strict: true, parameters } }];
    const asked = chatOf(ABOUT_WEATHER, { tools, tool_choice: "required", max_tokens: ROOM });
    const whole = await client.chat.completions.parse(asked);
    const stream = client.chat.completions.stream(asked);
    const deltas = [];
    stream.on("tool_calls.function.arguments.delta", (event) => deltas.push(event.arguments_delta));
    const final = await stream.finalChatCompletion();
    const callsOf = ({ choices }) => (choices[0].message.tool_calls ?? []).map((call) => call.function);
    check(callsOf(whole).length >= 1, "no tool was called");
    for (const call of callsOf(whole)) {
      checkEqual(call.name, "get_weather", "the called tool");
      check(["Paris", "Rome"].includes(call.parsed_arguments?.city), `the arguments are ${call.arguments}`);
    }
    const textsOf = (answer) => callsOf(answer).map((call) => call.arguments);
    checkEqual(textsOf(final), textsOf(whole), "the streamed arguments");
    checkEqual(deltas.join(""), textsOf(whole).join(""), "the deltas of the arguments");
  },

  async "a zod form"({ client }) {
    const [{ zodResponseFormat, zodTextFormat }, { z }] = loaded("zod", "openai/helpers/zod", "zod");
    const River = z.object({ name: z.enum(["Rhine", "Tiber"]), is_long: z.boolean() });
    const response_format = zodResponseFormat(River, "river");
    const asked = chatOf(ABOUT_A_RIVER, { response_format, max_tokens: ROOM });
    const { choices } = await client.chat.completions.parse(asked);
    const { parsed } = choices[0].message;
    check(River.safeParse(parsed).success, `parsed is ${JSON.stringify(parsed)}`);
    const final = await client.chat.completions.stream(asked).finalChatCompletion();
    checkEqual(final.choices[0].message.parsed, parsed, "the streamed object");
  },

  async "a response"({ client }) {
    const asked = { model, input: QUESTION, max_output_tokens: 20, temperature: 0 };
    const { output_text: whole } = await client.responses.create(asked);
    check(whole, "there is no output_text");
    const stream = client.responses.stream(asked);
    const deltas = [];
    stream.on("response.output_text.delta", (event) => deltas.push(event.delta));
    const { output } = await stream.finalResponse();
    const parts = output.flatMap((item) => item.content ?? []);
    checkEqual(parts.map((part) => part.text ?? "").join(""), whole, "the final text");
    checkEqual(deltas.join(""), whole, "the deltas");
  },

  async vectors({ client }) {
    const asked = { model: given["embedding-model"], input: ["a river", "three"] };
    const packed = (await client.embeddings.create(asked)).data; // by base64
    const plain = (await client.embeddings.create({ ...asked, encoding_format: "float" })).data;
    checkEqual(packed.length, 2, "the number of vectors");
    for (const [number, { embedding }] of packed.entries()) {
      const other = plain[number].embedding;
      checkEqual(embedding.length, other.length, "the number of dimensions");
      const isClose = embedding.every((value, at) => Math.abs(value - other[at]) <= 1e-3);
      check(isClose, "the numbers differ");
    }
  },

  async "models and refusals"({ client, OpenAI }) {
    const listed = (await all(client.models.list())).map((each) => each.id);
    check(listed.includes(model), `the listed models are ${JSON.stringify(listed)}`);
    checkEqual((await client.models.retrieve(model)).id, model, "the retrieved id");
    const missing = await checkThrows(client.models.retrieve("no/such"), OpenAI.NotFoundError);
    checkEqual(missing.code, "model_not_found", "code");
    const hot = client.chat.completions.create(chatOf(QUESTION, { temperature: 3 }));
    checkEqual((await checkThrows(hot, OpenAI.BadRequestError)).param, "temperature", "param");
  },
};

async function outcomeOf(name) {
  let OpenAI, LengthFinishReasonError;
  try {
    [{ OpenAI }, { LengthFinishReasonError }] = loaded("openai", "openai", "openai/error");
    const client = new OpenAI({ baseURL: given.url, maxRetries: 0, timeout: 60_000 });
    if (!client.responses || !client.chat.completions.parse) {
      throw new NotApplicable("the client is too old: npm install openai");
    }
    await cases[name]({ client, OpenAI });
    return {};
  } catch (error) {
    if (error instanceof NotApplicable) {
      return { notApplicable: error.message };
    }
    if (LengthFinishReasonError && error instanceof LengthFinishReasonError) {
      return { notApplicable: "the model did not come to an end in time" };
    }
    if (OpenAI && error instanceof OpenAI.APIError && error.status !== undefined) {
      return { refused: { status: error.status, error: error.error ?? { message: error.message } } };
    }
    return { failed: error instanceof Failed ? error.message : `${error.constructor.name}: ${error.message}` };
  }
}

function tell(name, outcome) {
  console.log(JSON.stringify({ case: name, ...outcome }));
}

for (const name of names) {
  const thrownElsewhere = (error) => {
    tell(name, { failed: `uncaught ${error}` });
    process.exit();
  };
  process.on("uncaughtException", thrownElsewhere); // unhandled rejections included
  tell(name, await outcomeOf(name));
  process.off("uncaughtException", thrownElsewhere);
}
