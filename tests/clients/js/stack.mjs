// The stack that these tests talk to. tests/clients/test_openai_js.py has started it.
import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";
import OpenAI from "openai";

export const MODEL = process.env.HEADRACE_MODEL;
export const EMBEDDER = process.env.HEADRACE_EMBEDDER;
export const ABSENT = process.env.HEADRACE_ABSENT; // a model that no engine serves
export const LONG = 1500; // tokens: seconds of work, of which those that give up leave nearly all undone

const url = process.env.HEADRACE_URL;
const keys = { free: process.env.HEADRACE_KEY, hasty: process.env.HEADRACE_HASTY_KEY };
const IDLE_WITHIN_MS = 30_000;

/** `tenant`: "free" of limits, or "hasty", which may ask once a second. */
export function clientOf(tenant = "free", options = {}) {
  const usual = { baseURL: `${url}/v1`, apiKey: keys[tenant], maxRetries: 0, timeout: 120_000 };
  return new OpenAI({ ...usual, ...options });
}

/** A client that also tells the answers to its requests, those that it tries again included. */
export function watchedClientOf(tenant, options) {
  const answers = [];
  const watched = async (...request) => {
    const answer = await fetch(...request);
    answers.push({ status: answer.status, at: performance.now() });
    return answer;
  };
  return { client: clientOf(tenant, { ...options, fetch: watched }), answers };
}

/** Of the default model's engine, as /metrics tells it. */
async function figure(name) {
  const text = await (await fetch(`${url}/metrics`)).text();
  const isMeant = (line) => line.startsWith(`${name}{`) && line.includes(`model_name="${MODEL}"`);
  const line = text.split("\n").find(isMeant);
  assert.ok(line, `${name} is not in /metrics`);
  return Number(line.slice(line.lastIndexOf(" ")));
}

/** For `work` that asks for `LONG` tokens and leaves: the engine, too, has to stop soon. */
export async function givesUpEarly(work) {
  const before = await figure("vllm:generation_tokens_total");
  await work();
  const deadline = performance.now() + IDLE_WITHIN_MS;
  while ((await figure("vllm:num_requests_running")) > 0) {
    assert.ok(performance.now() < deadline, "the engine goes on");
    await pause(20);
  }
  assert.ok((await figure("vllm:generation_tokens_total")) - before < LONG / 2, "nearly all was computed");
}

/** Resolves when the engine has begun to work on something. */
export async function engineIsAtWork() {
  while ((await figure("vllm:num_requests_running")) === 0) {
    await pause(20);
  }
}
