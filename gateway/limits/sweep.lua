-- Settles by rule what has no lease any more, and forgets accounts that have run off: a part of them each time.
--
-- ARGV     how many leases at most, cursor of the accounts ('0': from the first one on)
-- Returns  {how many leases had run out, the next cursor}
local NUM_ACCOUNTS_AT_ONCE = 64

local num_swept = sweep(tonumber(ARGV[1]))
if num_swept > 0 then write_accounts() end
local cursor, entries = unpack(redis.call('HSCAN', KEYS[1], ARGV[2], 'COUNT', NUM_ACCOUNTS_AT_ONCE))
for index = 1, #entries, 2 do
  local field, first = entries[index], tonumber(string.match(entries[index + 1], '^%S+'))
  local has_run_off = first < now
  if string.sub(field, -8) == '_per_day' then has_run_off = first < today end
  if has_run_off then redis.call('HDEL', KEYS[1], field) end
end
return {num_swept, cursor}
