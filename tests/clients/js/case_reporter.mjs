// For `node --test --test-reporter`: a line of JSON for each case.
export default async function* (events) {
  for await (const { type, data } of events) {
    if ((type === "test:pass" || type === "test:fail") && data.nesting === 0) {
      const error = data.details.error;
      const message = error ? String(error.cause?.stack ?? error.cause ?? error) : null;
      yield JSON.stringify({ name: data.name, passed: type === "test:pass", message }) + "\n";
    }
  }
}
