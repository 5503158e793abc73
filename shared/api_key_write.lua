-- Writes an API key if nobody has written it since it was read.
--
-- KEYS: records (key id -> JSON), digests (digest of a secret -> key id), version of all keys.
-- ARGV: key id, the version that was read (0: the key is new), the new record as JSON.
-- Returns "ok", or why nothing was changed: "exists", "missing", "conflict", "revoked", "unreadable".
--
-- The index of digests always is that of the records: both change here and nowhere else. Digests of a
-- revoked key stay in it, since its record says that it is one.

local key_id, expected, json = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local stored = redis.call('HGET', KEYS[1], key_id)
local record = cjson.decode(json)
local ended = {}

if not stored then
  -- Also after a flush: who still holds a record that Redis has lost must not bring it back.
  if expected ~= 0 then return 'missing' end
else
  if expected == 0 then return 'exists' end
  local is_json, old = pcall(cjson.decode, stored)
  if not is_json or type(old) ~= 'table' or type(old.secrets) ~= 'table' then return 'unreadable' end
  if type(old.revoked_at) == 'number' then return 'revoked' end
  if old.version ~= expected then return 'conflict' end
  for _, secret in ipairs(old.secrets) do ended[secret.digest] = true end
end

for _, secret in ipairs(record.secrets) do
  ended[secret.digest] = nil
  redis.call('HSET', KEYS[2], secret.digest, key_id)
end
for digest in pairs(ended) do redis.call('HDEL', KEYS[2], digest) end
redis.call('HSET', KEYS[1], key_id, json)

-- It begins at the time, so that it differs from what it was before a flush.
if redis.call('EXISTS', KEYS[3]) == 0 then
  local now = redis.call('TIME')
  redis.call('SET', KEYS[3], string.format('%.0f', tonumber(now[1]) * 1000000 + tonumber(now[2])))
end
redis.call('INCR', KEYS[3])
return 'ok'
